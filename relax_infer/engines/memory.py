"""Bytes in use on an engine's devices, as the driver counts them on the host."""

import asyncio
import shutil
from collections.abc import Sequence

from relax_infer.contracts.base import Message
from relax_infer.contracts.engines import BundleBinding
from relax_infer.contracts.failures import UnconfirmedError

MIB = 1 << 20


class NodeUse(Message):
    """Bytes in use on one node's devices of a replica; None where they cannot be told."""

    node: int
    devices: int
    at_launch: int | None
    """Just before its server was started; None without one, or once it gave its memory back."""
    in_use: int | None
    after: int | None = None
    """Once it had let go."""
    owing: str | None = None
    """Where no process of its server is left: why its memory is not known to be back."""


async def memory_in_use(bundles: Sequence[BundleBinding]) -> int | None:
    """Sum over the bundles' devices; None on a host without NVIDIA's tools.

    A device is known by its UUID where the binding has it: its number may be another's after a
    reboot, or where a device fell off the bus.

    Raises:
        UnconfirmedError: the driver did not answer, or not about every device.
    """
    program = shutil.which("nvidia-smi")
    if program is None or not bundles:
        return None
    arguments = ("--query-gpu=index,uuid,memory.used", "--format=csv,noheader,nounits")
    process = await asyncio.create_subprocess_exec(
        program, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), 30)
    except TimeoutError as error:
        process.kill()
        raise UnconfirmedError("nvidia-smi did not answer within 30 s.") from error
    return sum_of_devices(output.decode(), [each.gpu_uuid or each.gpu_id for each in bundles])


def sum_of_devices(table: str, devices: Sequence[int | str]) -> int:
    """Bytes of ``devices`` (numbers or UUIDs) in a table ``index, uuid, mebibytes``."""
    used: dict[int | str, int] = {}
    for line in table.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3 and fields[0].isdecimal() and fields[2].isdecimal():
            used[int(fields[0])] = used[fields[1]] = int(fields[2]) * MIB
    if missing := [device for device in devices if device not in used]:
        raise UnconfirmedError(f"nvidia-smi says nothing of devices {missing}: {table.strip()!r}.")
    return sum(used[device] for device in devices)
