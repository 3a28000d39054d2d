"""New weights into one real engine, by each transport: ``python -m tests.bench.weights [MB ...]``.

10 and 100 MB unless told otherwise. Counted is the transport alone, from its first call to the
engine to the last, without drain and read-back; beside it a plain copy of the file, and a plain
broadcast of as many bytes between two processes by ``torch.distributed``. Medians.
"""

import asyncio
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from relax_infer.contracts.weights import SeatAsk, WeightTransport
from relax_infer.engines.control import EngineControl
from relax_infer.engines.weight_change import WeightChange
from relax_infer.machines import ReplicaState
from relax_infer.training.torch_group import TorchGroup
from relax_infer.training.weight_sender import WeightSender
from tests.engines.real_engine import RealEngine, real_engine

TIMES = 7
LAYER_MB = 10.5
"""Of a layer of the sizes below, in float32."""
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
_BROADCAST = """
import sys, time, torch, torch.distributed as d
rank, port, size, times = map(int, sys.argv[1:])
torch.set_num_threads(1)
d.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
data = torch.zeros(size, dtype=torch.uint8)
for _ in range(times + 1):
    d.barrier()
    began = time.perf_counter()
    d.broadcast(data, 0)
    d.barrier()
    if rank == 0:
        print(time.perf_counter() - began)
d.destroy_process_group()
"""


def broadcasts(size: int) -> list[float]:
    """Seconds of each; the first is not counted."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", _BROADCAST]
    rest = [str(port), str(size), str(TIMES)]
    other = subprocess.Popen([*command, "1", *rest])
    told = subprocess.run([*command, "0", *rest], capture_output=True, text=True, check=True)
    other.wait()
    return [float(line) for line in told.stdout.split()][1:]


def copies(file: Path) -> list[float]:
    found: list[float] = []
    for _ in range(TIMES):
        began = time.perf_counter()
        shutil.copyfile(file, file.with_suffix(".copy"))
        found.append(time.perf_counter() - began)
    return found


class Clock:
    """Seconds that the transports' own calls take."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def around(self, owner: type, method: str, name: str) -> None:
        called: Callable[..., Awaitable[Any]] = getattr(owner, method)

        async def timed(*args: Any, **more: Any) -> Any:
            began = time.perf_counter()
            result = await called(*args, **more)
            self.seconds[name].append(time.perf_counter() - began)
            return result

        setattr(owner, method, timed)


def group(ask: SeatAsk, world: int) -> TorchGroup:
    return TorchGroup("127.0.0.1", ask.backend, world, ask.timeout, 0)


async def load(engine: RealEngine, transport: str) -> None:
    weights = WeightTransport.model_validate({"transport": transport})
    engine.spec = engine.spec.model_copy(update={"weights": weights})
    for k in range(TIMES + 1):
        report = (await engine.operate("load_weights", (k + 1) % 2)).report
        assert (report.state, report.error, report.note) == (ReplicaState.READY, None, None)


async def measure(megabytes: float, clock: Clock) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sender = WeightSender("127.0.0.1", group)
        layers = max(1, round(megabytes / LAYER_MB))
        sizes = {**SIZES, "num_hidden_layers": layers}
        async with real_engine(Path(folder), sender, **sizes) as engine:
            file = engine.folder / "version-0" / "model.safetensors"
            size = file.stat().st_size
            await engine.ready(0)
            clock.seconds.clear()
            for transport in ("disk", "tensor", "process_group"):
                await load(engine, transport)
            rows = {name: seconds[1:] for name, seconds in clock.seconds.items()}
            rows["file copy"] = copies(file)
            rows["broadcast"] = broadcasts(size)
    print(f"\n{size / 1e6:.0f} MB in {layers} layers")
    median = {name: statistics.median(seconds) for name, seconds in rows.items()}
    for name, seconds in median.items():
        beside = [
            f"{seconds / median[plain]:.1f} x {plain}" for plain in ("file copy", "broadcast")
        ]
        print(f"{name:14} {seconds:8.3f} s {size / 1e6 / seconds:8.0f} MB/s  {', '.join(beside)}")


def main() -> None:
    clock = Clock()
    clock.around(EngineControl, "load", "disk")
    clock.around(WeightChange, "from_tensors", "tensor")
    clock.around(WeightChange, "from_group", "process_group")
    for megabytes in map(float, sys.argv[1:] or ("10", "100")):
        asyncio.run(measure(megabytes, clock))


if __name__ == "__main__":
    main()
