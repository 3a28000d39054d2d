"""What the gateway's bench calls missed."""

import pytest

from tests.bench.gateway import AIMS, CASES, missed


def test_every_case_has_an_aim() -> None:
    assert AIMS.keys() == set(CASES)
    assert {case: aim for case, aim in AIMS.items() if case[0] == "64 KB"} == {
        ("64 KB", 1): 4.0,
        ("64 KB", 32): 4.0,
        ("64 KB", 128): 4.0,
    }


@pytest.mark.parametrize(
    ("case", "rate", "gateway", "fence", "says"),
    [
        (("small", 1), 1.0, 0.1, 0.04, []),
        (("small", 1), 1.0, 0.1, 0.06, ["0.160 ms added at p50"]),
        (("small", 1), 0.9, 0.16, 0.0, ["0.90 of the router's rate", "0.160 ms added"]),
        (("small", 128), 0.5, 9.0, 9.0, []),
        (("64 KB", 1), 3.9, 9.0, 9.0, ["64 KB, 1: 3.90 of the router's rate, not 4.0"]),
        (("64 KB", 128), 3.9, 0.0, 0.0, ["64 KB, 128: 3.90"]),
    ],
)
def test_admission_is_part_of_what_may_be_added(
    case: tuple[str, int], rate: float, gateway: float, fence: float, says: list[str]
) -> None:
    told = missed(case, rate, gateway, fence)
    assert len(told) == len(says)
    assert all(part in one for part, one in zip(says, told, strict=True))
