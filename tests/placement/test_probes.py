"""What is made of the probes' answers; without Ray."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from relax_infer.contracts.failures import PermanentError
from relax_infer.placement.probes import _answers, _row, device_uuids


async def never() -> None:
    await asyncio.Event().wait()


async def says(value: object) -> object:
    return value


async def fails() -> None:
    raise ConnectionError("the node is gone")


async def test_who_did_not_answer_by_the_deadline_is_none_and_is_not_waited_for() -> None:
    """pains 24: a bundle whose GPU is reserved in full keeps its probe waiting for ever."""
    now = asyncio.get_running_loop().time()
    found = await _answers([says(1), never(), says(2)], now + 0.2)
    assert found == [1, None, 2]
    assert len(asyncio.all_tasks()) == 1


async def test_a_failure_ends_the_wait() -> None:
    far = asyncio.get_running_loop().time() + 3600
    found = await _answers([never(), fails()], far)
    assert found[0] is None
    assert isinstance(found[1], ConnectionError)
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize(
    ("driver", "found"),
    [
        ('printf "0, GPU-b\\n1, GPU-a\\n"', {"0": "GPU-b", "1": "GPU-a"}),
        ('echo "NVIDIA-SMI has failed, no driver."; exit 9', {}),
        ("true", {}),
        (None, {}),
    ],
)
def test_a_driver_tells_the_uuid_of_each_number(
    driver: str | None, found: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if driver else str(tmp_path))
    if driver is not None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(
            "#!/bin/sh\n"
            '[ "$*" = "--query-gpu=index,uuid --format=csv,noheader" ] || exit 2\n'
            f"{driver}\n"
        )
        tool.chmod(0o755)
    assert device_uuids() == found


@pytest.mark.parametrize("gpu", [None, "GPU-5e4a", "MIG-1", "-1"])
def test_a_device_without_a_number_is_refused_with_the_cure(gpu: Any) -> None:
    answer = {"node_id": "n", "node_ip": "10.0.0.1", "gpu_id": gpu, "gpu_uuid": None}
    with pytest.raises(PermanentError, match=r"bundle 3 on node .* has the GPU id") as refused:
        _row(3, answer)
    assert "CUDA_VISIBLE_DEVICES of numbers" in refused.value.cure
    assert _row(3, answer | {"gpu_id": "7"}).gpu_id == 7
