"""One rank of a trainer group: ``python -m tests.training.rank_process ORDERS RANK``.

ORDERS is a JSON file: the trainer's ``spec``; the ``meeting`` file that rank 0 writes its address
into; the ``tables`` of the steps, by step; the ``steps`` to train; ``gradients``, whether those of
the first step are wanted; and a ``deadly`` [rank, step, moment] at which a rank kills itself.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from relax_infer.contracts.training import TrainerSpec
from relax_infer.training import PolicyTrainer
from relax_infer.transfer import PublishedRows, rows_of_table
from tests.transfer.tables import read_table


def main(orders: dict[str, Any], rank: int) -> None:
    spec = TrainerSpec.model_validate(orders["spec"])
    now = 0

    def moment(reached: str) -> None:
        if [rank, now, reached] == orders["deadly"]:
            os.kill(os.getpid(), signal.SIGKILL)

    policy = PolicyTrainer(spec, rank, moment=moment)
    if spec.ranks > 1:
        policy.meeting = meet(Path(orders["meeting"]), rank)
    policy.onload()

    def rows(step: int) -> PublishedRows:
        return rows_of_table(read_table(orders["tables"][str(step)]))

    out = Path(orders["out"])
    if orders["round_trip"]:
        (out / f"digest-{rank}").write_text(policy._export(0))
    if orders["gradients"]:
        write_gradients(policy, rows(1), out / f"gradients-{rank}.safetensors")
    results: list[str] = []
    for now in orders["steps"]:
        policy.offload()
        policy.onload()
        results.append(policy.train(now, rows(now)).model_dump_json())
    (out / f"results-{rank}.jsonl").write_text("\n".join(results))
    policy.close()


def meet(file: Path, rank: int) -> Any:
    from relax_infer.training.parallel import Meeting

    if rank == 0:
        meeting = Meeting("127.0.0.1")
        file.with_suffix(".new").write_text(meeting.address)
        file.with_suffix(".new").rename(file)
        return meeting
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline, "rank 0 did not come"
        time.sleep(0.05)
    return file.read_text()


def write_gradients(policy: PolicyTrainer, rows: PublishedRows, path: Path) -> None:
    """Those of the whole first batch by Hugging Face name, each stage its own; spoils the model."""
    from megatron.core import parallel_state
    from safetensors.torch import save_file

    from relax_infer.training.batch import build_batch
    from relax_infer.training.pieces import micro_batches, share_of_rank
    from relax_infer.training.targets import Before, with_targets
    from relax_infer.training.weights import export_weights

    spec, learner = policy.spec, policy._learner
    batch = build_batch(rows, spec.top_k)
    batch = with_targets(batch, rows, spec, Before(learner.look(batch).log_probs))
    micro = micro_batches(batch, share_of_rank(torch.arange(len(batch))), spec)
    learner._parallel.zero_grad_buffer()
    learner._run(micro, train=True)
    group: Any = parallel_state.get_data_parallel_group()
    for buffer in learner._parallel.buffers:
        for bucket in buffer.buckets:
            # Each data parallel rank has the sum of its part only.
            parts = bucket.grad_data.chunk(group.size())
            for number, part in enumerate(parts):
                if number != group.rank():
                    part.zero_()
            torch.distributed.all_reduce(bucket.grad_data, group=group)
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.copy_(parameter.main_grad)
    exported = {n: t.clone().contiguous() for n, t in export_weights(learner.model, policy._shape)}
    save_file(exported, path)
    policy._spoilt = True


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))
