"""Groups of trainer ranks as processes of this host, over gloo and without Ray."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from relax_infer.contracts.training import TrainerSpec, TrainResult

ROOT = Path(__file__).parents[2]


def run_group(
    folder: Path,
    spec: TrainerSpec,
    tables: dict[int, str],
    steps: list[int],
    *,
    gradients: bool = False,
    round_trip: bool = False,
    deadly: tuple[int, int, str] | None = None,
) -> list[list[TrainResult]]:
    """What each rank answered to each step; of a group in which a rank died, nothing."""
    folder.mkdir(parents=True)
    orders: dict[str, Any] = {
        "spec": spec.model_dump(mode="json"),
        "meeting": str(folder / "meeting"),
        "tables": tables,
        "steps": steps,
        "gradients": gradients,
        "round_trip": round_trip,
        "deadly": deadly and list(deadly),
        "out": str(folder),
    }
    (folder / "orders.json").write_text(json.dumps(orders))
    command = [sys.executable, "-W", "ignore", "-m", "tests.training.rank_process"]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(spec.ranks):
            with (folder / f"log-{rank}").open("wb") as log:
                arguments = [*command, str(folder / "orders.json"), str(rank)]
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                ranks.append(
                    subprocess.Popen(arguments, cwd=ROOT, stdout=log, stderr=log, env=environment)
                )
        codes = [process.wait(timeout=500) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    if deadly is not None:
        assert codes[deadly[0]] == -signal.SIGKILL
        assert all(codes), "a rank went on without the one that died"
        return []
    logs = "\n".join((folder / f"log-{rank}").read_text()[-3000:] for rank in range(spec.ranks))
    assert codes == [0] * spec.ranks, logs
    return [
        [
            TrainResult.model_validate_json(line)
            for line in (folder / f"results-{rank}.jsonl").read_text().splitlines()
        ]
        for rank in range(spec.ranks)
    ]
