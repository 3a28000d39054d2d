"""The policy trainer of one rank: model, optimizer, ledger. Knows neither Ray nor fences.

Everything that Megatron does happens in the thread that calls; always the same one. The ranks of a
group call :meth:`PolicyTrainer.onload` and :meth:`PolicyTrainer.train` at the same time; offloading
is each rank's own affair.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.refs import WeightsRef
from relax_infer.contracts.training import TrainerSpec, TrainResult
from relax_infer.training.hf_folder import FolderTensors
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
        self.spec, self.rank = spec, rank
        self._moment = moment or (lambda _: None)
        self._moments = 0
        self._checkpoints = Checkpoints(spec.run)
        self._learner: Any = None
        self._critic: Any = None
        self._device: Any = None
        self._shape: Any = None
        self._dtypes: dict[str, Any] = {}
        self._current: Ledger | None = None
        self._spoilt = False
        self.meeting: Any = None
        """Where the ranks of a group meet, to be set before the first onload: rank 0's ``Meeting``,
        or its address; None: there is one rank."""
        self.resident = False
        """Whether everything is on the device."""
        self.holds = False
        """Whether anything may be."""

    @property
    def ledger(self) -> Ledger:
        """From the disk until weights are loaded, then in memory with them."""
        return self._current if self._current is not None else read_ledger(self.spec.run)

    @property
    def built(self) -> bool:
        """Whether the model is there and the ranks have met."""
        return self._learner is not None

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
            for learner in self._learners():
                learner.to_device()
        self.resident = True

    def offload(self) -> None:
        """Nothing but a device context is left on the device. Idempotent."""
        if self._learner is not None and self.holds:
            for learner in self._learners():
                learner.to_host()
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
        from relax_infer.training.parallel import from_first, on_any, together

        if on_any(self._spoilt, self._device):
            self._load()
        ledger = self.ledger
        # Until the step is durable the disk alone says what is true, of weights and ledger.
        self._current, self._spoilt = None, True
        result = from_first(self._train(step, rows), self._device)
        entry = LedgerEntry(result=result, partition=partition, digest=rows_were)
        ledger = ledger.with_entry(entry)
        # Every rank has saved its part: only then there is a checkpoint.
        together(lambda: self._commit(step, ledger), self._device)
        self._current, self._spoilt = ledger, False
        self._passed("committed")
        return result

    def close(self) -> None:
        """Leave the process group; the trainer cannot be used afterwards."""
        if self._learner is not None:
            from relax_infer.training.parallel import stop_parallel

            self._learner = self._critic = None
            self.resident = self.holds = False
            stop_parallel()

    @property
    def beats(self) -> int:
        """Another number than before, once an update has got on; any thread may ask."""
        return self._moments + sum(each.beats for each in self._learners() if each is not None)

    def _passed(self, moment: str) -> None:
        self._moments += 1
        self._moment(moment)

    def _learners(self) -> list[Any]:
        critic = getattr(self, "_critic", None)
        return [self._learner] if critic is None else [self._learner, critic]

    def _commit(self, step: int, ledger: Ledger) -> None:
        if self.rank == 0:
            spec = self.spec
            self._checkpoints.commit(step, ledger, spec.keep_checkpoints, spec.keep_every)
            if spec.keep_weights is not None:
                self._checkpoints.drop_weights(step, spec.keep_weights, spec.keep_every)

    def _build(self) -> None:
        from relax_infer.training.parallel import (
            choose_device,
            start_parallel,
            stop_parallel,
            together,
        )

        device = self._device = choose_device(self.spec.device, self.gpu)
        try:
            start_parallel(device, self.spec, self.rank, self.meeting)
            together(self._make_learner, device)
            self._load()
        except BaseException:
            self._learner = self._critic = None
            stop_parallel()
            raise

    def _make_learner(self) -> None:
        # Megatron may be imported only now that the process has joined its group.
        from relax_infer.training.critic import Critic
        from relax_infer.training.model import build_model, check_layout, read_shape
        from relax_infer.training.update import PolicyLearner

        spec = self.spec
        self._shape = read_shape(Path(spec.model_path))
        check_layout(self._shape, spec.tensor_parallel, spec.pipeline_parallel)
        model = build_model(self._shape, spec).to(self._device)
        self._learner = PolicyLearner(model, spec, self._device)
        if spec.critic is not None:
            model = build_model(self._shape, spec, critic=True).to(self._device)
            self._critic = Critic(model, spec, self._device, spec.critic)

    @property
    def gpu(self) -> int:
        """Index of its device among those that this process sees: Ray shows an actor with a share
        of a GPU that GPU alone; one without a share, all."""
        return 0 if self.spec.ray_gpu_fraction else self.spec.bundles[self.rank].gpu_id

    def _load(self) -> None:
        """What the newest checkpoint says, else the model folder."""
        from relax_infer.training.outputs import load_checkpoint
        from relax_infer.training.parallel import together
        from relax_infer.training.weights import load_weights

        learner, critic, latest = self._learner, self._critic, self._checkpoints.latest()
        wants_reference = self.spec.algorithm.needs_reference

        def initial() -> None:
            tensors = FolderTensors(Path(self.spec.model_path))
            self._dtypes = {name: tensors.dtype(name) for name in tensors}
            if latest is None or wants_reference:
                load_weights(learner.model, self._shape, tensors)
            if latest is None and critic is not None:
                load_weights(critic.model, self._shape, tensors)
            if wants_reference:
                learner.remember_reference()

        together(initial, self._device)
        if latest is not None:
            load_checkpoint(latest, learner, critic, self._device)
        else:
            for each in self._learners():
                each.forget()
        self._current, self._spoilt = read_ledger(self.spec.run), False

    def _train(self, step: int, rows: PublishedRows) -> TrainResult:
        import torch

        from relax_infer.training.batch import build_batch, mini_batches, step_seed
        from relax_infer.training.outputs import save_checkpoint
        from relax_infer.training.targets import Before, check_channels, with_targets
        from relax_infer.training.values import explained_variance

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
        critic: Any = self._critic
        values = None if critic is None else critic.values(batch)
        before = Before(looked.log_probs, reference, values)
        batch = with_targets(batch, rows, spec, before)
        trained = batch.mask.sum()
        # A padding's log-probs may be anything: left out, not multiplied by 0.
        gap = (looked.log_probs - batch.rollout_log_probs).abs()
        gap = torch.where(batch.mask > 0, gap, 0.0)
        probed = time.perf_counter()
        parts = list(mini_batches(len(batch), spec.mini_batches, spec.seed, step))
        stats = learner.update(batch, parts, step)
        told: dict[str, float] = {}
        if critic is not None and values is not None and batch.returns is not None:
            told = critic.update(batch, parts, step)
            told["explained_variance"] = explained_variance(values, batch.returns, batch.mask)
        self._passed("updated")
        updated = time.perf_counter()
        digest = self._export(step)
        self._passed("exported")
        exported = time.perf_counter()
        save_checkpoint(self._checkpoints, step, learner, critic, self._device)
        self._passed("saved")
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
                **told,
                "probe_seconds": probed - began,
                "update_seconds": updated - probed,
                "export_seconds": exported - updated,
                "checkpoint_seconds": saved - exported,
            },
        )

    def _export(self, step: int) -> str:
        """The new weights as a Hugging Face folder; its digest, on rank 0."""
        from relax_infer.training.outputs import export_folder

        target = run_folder(self.spec.run) / "weights" / str(step)
        model = Path(self.spec.model_path)
        policy = self._learner.model
        return export_folder(target, model, policy, self._shape, self._dtypes, self._device)
