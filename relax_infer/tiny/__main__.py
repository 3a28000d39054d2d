"""``python -m relax_infer.tiny --folder DIR --seed N``: make the three models and say how good."""

import argparse
import json
import sys
from pathlib import Path

from relax_infer.contracts.failures import RelaxError
from relax_infer.tiny.lessons import LESSONS
from relax_infer.tiny.models import ensure_models


def _tell(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m relax_infer.tiny", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where the models are kept")
    parser.add_argument("--seed", type=int, default=0, help="of the weak policy")
    parser.add_argument("--names", nargs="+", choices=sorted(LESSONS), default=sorted(LESSONS))
    chosen = parser.parse_args()
    try:
        made = ensure_models(chosen.folder, seed=chosen.seed, names=chosen.names, progress=_tell)
    except RelaxError as error:
        print(error, file=sys.stderr)
        return 1
    for name, path in made.items():
        measured = json.loads((path / "held_out.json").read_text())
        print(f"{name}: {path} ({measured['accuracy']:.3f} on held-out problems)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
