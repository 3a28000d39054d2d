"""What the gateway costs: ``python -m tests.bench.gateway [ROUNDS] [SECONDS]``.

The same requests go directly to an upstream that answers at once, through an sglang-router, and
through the gateway, one after the other, again and again, in one run: so what else the machine does
meets all alike. Two further ways are an ASGI app that answers at once and the same app behind an
engine's fence: what is between them is what admission costs in the engine. Printed are medians over
the rounds, and medians of each way's share of the router's requests per second and processor time
in the same round. On a machine with other work, the time that a way waited for a processor is
counted against it, more so for one thread than for the router's many; its processor time is not.
Upstream and load are a small C program (``wire.c``), compiled here, since one in Python would be
what is measured.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from relax_infer.engines.router import router_command
from tests.gateway.fakes import free_port, registry

HERE = Path(__file__).parent
CASES = (
    *(("small", 1), ("small", 32), ("small", 128)),
    *(("64 KB", 1), ("64 KB", 32), ("64 KB", 128)),
)
WAYS = ("direct", "sglang-router", "gateway", "app", "fenced app")
AIMS = {
    **{("small", 1): 1.0, ("small", 32): 1.0, ("small", 128): 0.5},
    **{("64 KB", 1): 4.0, ("64 KB", 32): 4.0, ("64 KB", 128): 4.0},
}
"""Of the router's requests per second."""
ADDED = 0.15
"""Milliseconds that a lone small request may take longer at the median, by the gateway and an
engine's fence together."""


class Measured(NamedTuple):
    rate: float
    """Answers per second."""
    p50: float
    p99: float
    """Milliseconds."""
    cpu: float
    """Microseconds of processor time of what stands in the middle, per answer."""


@dataclass
class Target:
    name: str
    port: int
    path: str
    process: psutil.Process


def bodies(folder: Path) -> dict[str, Path]:
    """Files with a payload of 0.7 KB and one of 64 KB, as a rollout sends them."""
    made: dict[str, Path] = {}
    for name, tokens in (("small", 90), ("64 KB", 9100)):
        payload = {
            "model": "m",
            "input_ids": [10_000 + n % 140_000 for n in range(tokens)],
            "sampling_params": {"temperature": 0.7, "max_new_tokens": 64},
            "return_logprob": True,
            "stream": False,
            "rid": "0123456789abcdef",  # the load puts another one there each time
        }
        made[name] = folder / f"{tokens}.json"
        made[name].write_text(json.dumps(payload))
    return made


@contextmanager
def started(command: list[str], port: int, path: str, log: Path) -> Iterator[psutil.Process]:
    """A server that answers a POST to ``path``."""
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        deadline = time.monotonic() + 90
        while not _answers(port, path):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{command[:4]} does not answer:\n{log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield psutil.Process(process.pid)
    finally:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait()


def _answers(port: int, path: str) -> bool:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=b'{"text": "x"}',
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=2) as answer:
            return answer.status == 200
    except (OSError, urllib.error.HTTPError):
        return False


@contextmanager
def targets(folder: Path, wire: Path) -> Iterator[list[Target]]:
    """Three ways to one upstream, and two engines that answer themselves."""
    upstream, router, metrics, gateway, plain, fenced = (free_port() for _ in range(6))
    log = folder / "log"
    file = folder / "registry.json"
    file.write_text(json.dumps({"teacher": registry("teacher", f"http://127.0.0.1:{upstream}")}))
    engine = (sys.executable, "-m", "tests.bench.fenced")
    own = "from relax_infer.cli import main; main()"
    with ExitStack() as stack:

        def up(name: str, command: list[str], port: int, path: str) -> Target:
            process = stack.enter_context(started(command, port, path, log))
            return Target(name, port, path, process)

        yield [
            up("direct", [str(wire), "serve", str(upstream)], upstream, "/generate"),
            up(
                "sglang-router",
                [
                    *router_command(router, metrics),
                    *("--worker-urls", f"http://127.0.0.1:{upstream}"),
                ],
                router,
                "/generate",
            ),
            up(
                "gateway",
                [
                    *(sys.executable, "-c", own, "gateway", "--port", str(gateway)),
                    *("--registry", str(file)),
                ],
                gateway,
                "/teacher/generate",
            ),
            *(
                up(name, [*engine, str(port), *more], port, "/generate")
                for name, port, more in (("app", plain, ()), ("fenced app", fenced, ("fence",)))
            ),
        ]


def measure(wire: Path, target: Target, connections: int, seconds: float, body: Path) -> Measured:
    before = _cpu(target.process)
    ran = subprocess.run(
        [wire, "load", str(target.port), target.path, str(connections), str(seconds), body],
        capture_output=True,
        text=True,
        check=True,
        timeout=seconds + 30,
    )
    answers, bad, p50, p99 = map(float, ran.stdout.split())
    if bad or not answers:
        raise SystemExit(f"{target.name}: {bad:.0f} of {answers:.0f} answers were not 200")
    used = _cpu(target.process) - before
    return Measured(answers / seconds, p50 / 1e3, p99 / 1e3, used / answers * 1e6)


def _cpu(process: psutil.Process) -> float:
    times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def missed(case: tuple[str, int], rate: float, gateway: float, fence: float) -> list[str]:
    """The aims that one case does not meet, in words; none is good.

    Args:
        rate: requests per second through the gateway, of the router's.
        gateway: milliseconds that it adds at the median.
        fence: those that a fence adds to the engine behind it.
    """
    found: list[str] = []
    if rate < (aim := AIMS[case]):
        found.append(f"{case[0]}, {case[1]}: {rate:.2f} of the router's rate, not {aim}")
    if case == ("small", 1) and (added := gateway + fence) > ADDED:
        found.append(f"{case[0]}, {case[1]}: {added:.3f} ms added at p50, not {ADDED}")
    return found


def main(rounds: int = 5, seconds: float = 3.0) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wire = folder / "wire"
        subprocess.run(["cc", "-O2", "-o", wire, HERE / "wire.c"], check=True)
        files = bodies(folder)
        found: dict[tuple[str, int], dict[str, list[Measured]]]
        found = {case: {name: [] for name in WAYS} for case in CASES}
        with targets(folder, wire) as ways:
            for turn in range(rounds):
                for case in CASES:
                    for target in ways if turn % 2 else reversed(ways):
                        one = measure(wire, target, case[1], seconds, files[case[0]])
                        found[case][target.name].append(one)
    print(
        "| body, connections | way | req/s | p50 ms | p99 ms | CPU us | of the router | aim | CPU |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    failed: list[str] = []
    for case, rounds_of in found.items():
        router = rounds_of["sglang-router"]
        rates: dict[str, float] = {}
        for way, measured in rounds_of.items():
            m = Measured(*map(statistics.median, zip(*measured, strict=True)))
            pairs = list(zip(measured, router, strict=True))
            rates[way] = statistics.median(one.rate / other.rate for one, other in pairs)
            cpu = statistics.median(one.cpu / other.cpu for one, other in pairs)
            aim = AIMS[case] if way == "gateway" else ""
            print(
                f"| {case[0]}, {case[1]} | {way} | {m.rate:,.0f} | {m.p50:.3f} | {m.p99:.3f} |"
                f" {m.cpu:.0f} | {rates[way]:.2f} | {aim} | {cpu:.2f} |"
            )
        added: dict[str, float] = {}
        for way, without in (("gateway", "direct"), ("fenced app", "app")):
            pairs = list(zip(rounds_of[way], rounds_of[without], strict=True))
            added[way] = statistics.median(one.p50 - other.p50 for one, other in pairs)
            cpu = statistics.median(one.cpu - other.cpu for one, other in pairs)
            what = "the gateway adds" if way == "gateway" else "the fence adds"
            print(f"| {case[0]}, {case[1]} | {what} | | {added[way]:.3f} | | {cpu:.0f} | | | |")
        if case == ("small", 1):
            both = sum(added.values())
            print(f"| {case[0]}, 1 | both add | | {both:.3f} | | | | {ADDED} | |")
        failed += missed(case, rates["gateway"], added["gateway"], added["fenced app"])
    print("\n" + ("\n".join(f"missed: {each}" for each in failed) or "Every aim is met"))
    return 1 if failed else 0


if __name__ == "__main__":
    given = sys.argv[1:]
    sys.exit(main(*([int(given[0])] if given else []), *map(float, given[1:2])))
