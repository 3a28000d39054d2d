"""Bytes in use on an engine's devices, as the driver counts them on the host."""

import asyncio
import shutil
from collections.abc import Sequence

from relax_infer.contracts.base import Message
from relax_infer.contracts.failures import UnconfirmedError

MIB = 1 << 20
SLEEPING_CONTEXTS = 4 * 2048 * MIB
"""Per device: what sleeping holders may keep (device context, kernels, communicators). The driver
tells of the whole device, on which each of the four lease roles may have one asleep."""
GONE_SLACK = SLEEPING_CONTEXTS
"""Per device, after the last process of an engine: the contexts of the other roles, which may have
been started after it."""


class NodeUse(Message):
    """Bytes in use on one node's devices of a replica; None where they cannot be told."""

    node: int
    devices: int
    at_launch: int | None
    """Just before its server was started; None without a server."""
    in_use: int | None
    after: int | None = None
    """Once it had let go."""


async def memory_in_use(gpus: Sequence[int]) -> int | None:
    """Sum over the devices; None on a host without NVIDIA's tools.

    Raises:
        UnconfirmedError: the driver did not answer, or not about every device.
    """
    program = shutil.which("nvidia-smi")
    if program is None or not gpus:
        return None
    arguments = ("--query-gpu=index,memory.used", "--format=csv,noheader,nounits")
    process = await asyncio.create_subprocess_exec(
        program, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), 30)
    except TimeoutError as error:
        process.kill()
        raise UnconfirmedError("nvidia-smi did not answer within 30 s.") from error
    return sum_of_devices(output.decode(), gpus)


def sum_of_devices(table: str, gpus: Sequence[int]) -> int:
    """Bytes of ``gpus`` in a table ``index, mebibytes``."""
    used: dict[int, int] = {}
    for line in table.splitlines():
        index, comma, mebibytes = line.partition(",")
        if comma and index.strip().isdecimal() and mebibytes.strip().isdecimal():
            used[int(index)] = int(mebibytes) * MIB
    if missing := sorted(set(gpus) - used.keys()):
        raise UnconfirmedError(f"nvidia-smi says nothing of devices {missing}: {table.strip()!r}.")
    return sum(used[gpu] for gpu in gpus)
