"""The policy trainer of one rank: model, optimizer, ledger. Knows neither Ray nor fences.

Everything that Megatron does happens in the thread that calls; always the same one.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.refs import WeightsRef
from relax_infer.contracts.training import TrainerSpec, TrainResult
from relax_infer.training.hf_folder import read_tensors, write_folder
from relax_infer.training.ledger import Checkpoints, Ledger, LedgerEntry, read_ledger, run_folder
from relax_infer.transfer.rows import PublishedRows, rows_digest

Moment = Callable[[str], None]
"""Told when a step is ``updated``, ``exported``, ``saved`` and ``committed``; for fault tests."""


class PolicyTrainer:
    """Trains each step once: a step that the ledger has is answered from it.

    Nothing touches the training device before :meth:`onload`. A failure or a kill at any moment
    leaves the last checkpoint as the truth; the next call goes on from there.
    """

    def __init__(self, spec: TrainerSpec, rank: int = 0, *, moment: Moment | None = None) -> None:
        if spec.ranks != 1:
            raise PermanentError(
                f"train.ranks is {spec.ranks}: this trainer has one rank.",
                cure="Set train.ranks to 1.",
            )
        self.spec, self.rank = spec, rank
        self._moment = moment or (lambda _: None)
        self._checkpoints = Checkpoints(spec.run)
        self._learner: Any = None
        self._device: Any = None
        self._shape: Any = None
        self._current: Ledger | None = None
        self._spoilt = False
        self.resident = False
        """Whether everything is on the device."""
        self.holds = False
        """Whether anything may be."""

    @property
    def ledger(self) -> Ledger:
        """From the disk until weights are loaded, then in memory with them."""
        return self._current if self._current is not None else read_ledger(self.spec.run)

    @property
    def touched_device(self) -> bool:
        """Whether this process has been on the device, resident or not."""
        return self._device is not None

    def onload(self) -> None:
        """Parameters, gradients and optimizer on the device: built and loaded the first time, from
        the newest checkpoint if there is one, else from the model folder. Idempotent.

        Raises:
            PermanentError: a model or checkpoint that cannot be trained, with file and field.
        """
        if self.resident:
            return
        self.holds = True
        if self._learner is None:
            self._build()
        else:
            self._learner.to_device()
        self.resident = True

    def offload(self) -> None:
        """Nothing but a device context is left on the device. Idempotent."""
        if self._learner is not None and self.holds:
            self._learner.to_host()
        self.resident = self.holds = False

    def memory_in_use(self) -> int | None:
        """Bytes in use on the whole device as the driver counts them; None on a CPU and
        before the first onload."""
        if self._device is None or self._device.type != "cuda":
            return None
        import torch

        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def recorded(self, step: int, digest: str) -> TrainResult | None:
        """The step's ledger entry, marked as repeated; None if the step is the next to train.

        Raises:
            PermanentError: the step is neither in the ledger nor the next one, or was trained on
                rows of another digest.
        """
        ledger = self.ledger
        if (entry := ledger.entry(step)) is not None:
            if entry.digest != digest:
                raise PermanentError(
                    f"Step {step} of run {self.spec.run.run} was trained on rows of digest"
                    f" {entry.digest}, now it is asked for {digest}.",
                    cure="A step is trained once; was the run's id used before?",
                )
            return entry.result.model_copy(update={"repeated": True})
        if step != ledger.step + 1:
            raise PermanentError(
                f"Step {step} was asked, the ledger of run {self.spec.run.run} ends with step"
                f" {ledger.step}: the next is {ledger.step + 1}.",
                cure="Steps are trained in order, each once.",
            )
        return None

    def train(self, step: int, rows: PublishedRows, *, partition: str = "") -> TrainResult:
        """One pass over the rows, new weights exported, checkpoint and ledger entry durable.

        Raises:
            PermanentError: not the next step, not resident, nothing to train on, or the update
                broke down (the checkpoint before it stays the truth).
        """
        rows_were = rows_digest(rows)
        if (known := self.recorded(step, rows_were)) is not None:
            return known
        if not self.resident:
            raise PermanentError(f"Step {step}: the trainer is not resident; onload it first.")
        if self._spoilt:
            self._load()
        ledger = self.ledger
        # Until the step is durable the disk alone says what is true, of weights and ledger.
        self._current, self._spoilt = None, True
        result = self._train(step, rows)
        entry = LedgerEntry(result=result, partition=partition, digest=rows_were)
        ledger = ledger.with_entry(entry)
        self._checkpoints.commit(step, ledger, self.spec.keep_checkpoints)
        self._current, self._spoilt = ledger, False
        self._moment("committed")
        return result

    def close(self) -> None:
        """Leave the process group; the trainer cannot be used afterwards."""
        if self._learner is not None:
            from relax_infer.training.parallel import stop_parallel

            self._learner, self.resident, self.holds = None, False, False
            stop_parallel()

    def _build(self) -> None:
        from relax_infer.training.parallel import choose_device, start_parallel, stop_parallel

        device = self._device = choose_device(self.spec.device, self._gpu())
        try:
            start_parallel(device)
            # Megatron may be imported from here on.
            import torch

            from relax_infer.training.model import build_model, read_shape
            from relax_infer.training.update import Learner

            self._shape = read_shape(Path(self.spec.model_path))
            dtype = torch.bfloat16 if self.spec.precision == "bf16" else torch.float32
            model = build_model(self._shape, dtype).to(device)
            self._learner = Learner(model, self.spec, device)
            self._load()
        except BaseException:
            self._learner = None
            stop_parallel()
            raise

    def _gpu(self) -> int:
        """Ray shows an actor with a share of a GPU that GPU alone; one without a share, all."""
        return 0 if self.spec.ray_gpu_fraction else self.spec.bundles[self.rank].gpu_id

    def _load(self) -> None:
        """What the newest checkpoint says, else the model folder."""
        from relax_infer.training import checkpoint
        from relax_infer.training.weights import load_weights

        learner, latest = self._learner, self._checkpoints.latest()
        tensors = read_tensors(Path(self.spec.model_path))
        self._dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        wants_reference = self.spec.algorithm.needs_reference
        if latest is None or wants_reference:
            load_weights(learner.model, self._shape, tensors)
        if wants_reference:
            learner.remember_reference()
        if latest is not None:
            checkpoint.load(latest, learner.model, learner.optimizer)
        else:
            learner.forget()
        self._current, self._spoilt = read_ledger(self.spec.run), False

    def _train(self, step: int, rows: PublishedRows) -> TrainResult:
        import torch

        from relax_infer.training import checkpoint
        from relax_infer.training.batch import build_batch, mini_batches, step_seed
        from relax_infer.training.targets import Before, check_channels, with_targets
        from relax_infer.training.weights import export_weights

        began = time.perf_counter()
        spec, learner = self.spec, self._learner
        torch.manual_seed(step_seed(spec.seed, step))
        check_channels(rows, spec)
        batch = build_batch(rows, spec.top_k)
        if not batch.mask.any():
            raise PermanentError(f"Step {step}: no token of its {len(rows)} rows is trained on.")
        looked = learner.look(batch)
        reference = None
        if spec.algorithm.needs_reference:
            reference = learner.reference_log_probs(batch)
        batch = with_targets(batch, rows, spec, Before(looked.log_probs, reference))
        trained = batch.mask.sum()
        gap = (looked.log_probs - batch.rollout_log_probs).abs() * batch.mask
        probed = time.perf_counter()
        parts = mini_batches(len(batch), spec.mini_batches, spec.seed, step)
        stats = learner.update(batch, parts, step)
        self._moment("updated")
        updated = time.perf_counter()
        target = run_folder(spec.run) / "weights" / str(step)
        tensors = export_weights(learner.model, self._shape, self._dtypes.__getitem__)
        digest = write_folder(target, tensors, Path(spec.model_path))
        self._moment("exported")
        exported = time.perf_counter()
        checkpoint.save(self._checkpoints.begin(step), learner.model, learner.optimizer)
        self._moment("saved")
        saved = time.perf_counter()
        uri = f"{spec.run.store.rstrip('/')}/{spec.run.run}/weights/{step}"
        return TrainResult(
            step=step,
            rows=len(rows),
            loss=stats.loss,
            grad_norm=stats.grad_norm,
            clip_fraction=stats.clip_fraction,
            policy_kl=stats.policy_kl,
            logprob_gap=float(gap.sum() / trained),
            tokens=stats.tokens,
            seconds=saved - began,
            weights=WeightsRef(version=step, uri=uri, digest=digest),
            metrics={
                "logprob_gap_max": float(gap.max()),
                "advantage_abs_mean": float(batch.advantages.abs().sum() / trained),
                "entropy": float((looked.entropy * batch.mask).sum() / trained),
                "importance_mean": float((batch.importance * batch.mask).sum() / trained),
                "importance_max": float((batch.importance * batch.mask).max()),
                "learning_rate": stats.learning_rate,
                **stats.metrics,
                "probe_seconds": probed - began,
                "update_seconds": updated - probed,
                "export_seconds": exported - updated,
                "checkpoint_seconds": saved - exported,
            },
        )
