"""A trainer process that kills itself: ``python -m tests.training.killed SPEC MOMENT STEP...``.

Trains the steps in order and sends itself SIGKILL when the last one reaches MOMENT; ``never``
lets it finish.
"""

import os
import signal
import sys
from pathlib import Path

from relax_infer.contracts.training import TrainerSpec
from relax_infer.training import PolicyTrainer
from relax_infer.transfer import rows_of_table
from tests.transfer.tables import scored_table


def main(spec: TrainerSpec, deadly: str, steps: list[int]) -> None:
    now = 0

    def moment(reached: str) -> None:
        if reached == deadly and now == steps[-1]:
            os.kill(os.getpid(), signal.SIGKILL)

    policy = PolicyTrainer(spec, moment=moment)
    policy.onload()
    for now in steps:
        rows = rows_of_table(scored_table(groups=6, samples=4, seed=now))
        result = policy.train(now, rows)
        print(result.step, "repeated" if result.repeated else "trained", result.weights.digest)
    policy.close()


if __name__ == "__main__":
    text = Path(sys.argv[1]).read_text()
    main(TrainerSpec.model_validate_json(text), sys.argv[2], [int(n) for n in sys.argv[3:]])
