"""What `make install` tells while it works."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def told(text: str, total: int) -> list[str]:
    """What is left of pip's output."""
    done = subprocess.run(
        ("awk", "-v", f"total={total}", "-f", str(ROOT / "lock" / "progress.awk")),
        input=text,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_a_person_who_waits_is_told_which_package_pip_is_at():
    collected = [f"Collecting package-{n}==1.{n}\n" for n in range(1, 40)]
    collected[18] = "Processing /wheels/torch-2.13.0-cp311-cp311-linux_x86_64.whl\n"
    collected[20] = "Collecting sglang==0.5\n  Downloading sglang-0.5-py3-none-any.whl (5.2 MB)\n"
    collected[22] = "Collecting ray==2.60.0\n  Downloading ray-2.60.0-cp311.whl (71.5 MB)\n"
    collected[19] = "Requirement already satisfied: rich==15.0.0 in ./lib\n"
    text = "".join(collected) + "Installing collected packages: a, b\n"
    assert told(text, 39) == [
        "  20 of 39: rich",
        "  downloads ray, 71.5 MB",
        "  all 39 are here; unpacks them, which takes a minute",
    ]


def test_of_two_pips_at_once_the_first_to_have_all_says_nothing_and_files_keep_their_names():
    text = (
        "Collecting torch==2.13.0\nCollecting ray==2.60.0\n"
        "  Downloading torch-2.13.0-cp311.whl (200.5 MB)\n"
        "Installing collected packages: torch\nCollecting rich==15.0.0\n"
        "Installing collected packages: ray, rich\n"
    )
    assert told(text, 3) == [
        "  downloads torch, 200.5 MB",
        "  all 3 are here; unpacks them, which takes a minute",
    ]
