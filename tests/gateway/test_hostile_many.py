"""Many hostile requests, and large ones, against a gateway process: its memory stays flat."""

import asyncio
import io
import json
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from pathlib import Path

import aiohttp
import psutil
import pytest

from tests.gateway.asking import ask, by_hand, get, status_of
from tests.gateway.fakes import Engine, engine, registry, until
from tests.gateway.hostile import BODIES, GOOD, HEADS, Hostile, hostile
from tests.gateway.test_gateway import echo

FEW, MANY = 400, 10_000
FLAT = 12 << 20
"""Bytes by which the process may be larger than after the first quarter; it was 1.4 MB."""
GROWTH = 48 << 20
"""Bytes by which the process may be larger after 100 MB were sent to it."""


@pytest.fixture
async def upstream() -> AsyncIterator[Engine]:
    async with engine(echo) as made:
        yield made


@pytest.fixture
def process(tmp_path: Path) -> Iterator[tuple[psutil.Process, int, Path]]:
    """A gateway of its own, and the file that it serves from."""
    from tests.gateway.test_standalone import started

    file = tmp_path / "registry.json"
    file.write_text(json.dumps({"genrm": registry("genrm", "http://127.0.0.1:9")}))
    with started(file) as (running, url):
        yield psutil.Process(running.pid), int(url.rpartition(":")[2]), file


async def bombard(process: tuple[psutil.Process, int, Path], upstream: Engine, count: int) -> None:
    gateway_process, port, file = process
    file.write_text(json.dumps({"genrm": registry("genrm", upstream.url)}))
    url = f"http://127.0.0.1:{port}"

    async def good() -> int:
        return (await ask("POST", f"{url}/genrm/generate", GOOD)).status

    async with asyncio.timeout(20):
        while await good() != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    requests = hostile(random.Random(count))
    seen: defaultdict[str, Counter[int]] = defaultdict(Counter)
    allowed: dict[str, frozenset[int]] = {}
    gate = asyncio.Semaphore(16)

    async def one(asked: Hostile) -> None:
        async with gate:
            raw = await by_hand(port, asked.sent, finish=asked.leaves)
        allowed[asked.kind] = asked.statuses
        seen[asked.kind][status_of(raw) if raw.startswith(b"HTTP/1.1 ") else 0] += 1

    warm = count // 4
    await asyncio.gather(*map(one, islice(requests, warm)))
    sizes = [gateway_process.memory_info().rss]
    for _ in range(warm, count, 100):
        await asyncio.gather(*map(one, islice(requests, 100)))
        assert await good() == 200
        sizes.append(gateway_process.memory_info().rss)
    for kind, statuses in seen.items():
        assert statuses.keys() <= allowed[kind], (kind, statuses)
    assert seen.keys() == allowed.keys() >= BODIES.keys() | HEADS.keys()
    assert seen["bytes that are others"][400] > 0
    told = Counter[int]()
    for statuses in seen.values():
        told.update(statuses)
    grown = [size - sizes[0] for size in sizes]
    print(f"{count} requests of {len(seen)} kinds: {dict(sorted(told.items()))};", end=" ")
    print(f"grown by {max(grown) / 1e6:.1f} MB at most, {grown[-1] / 1e6:.1f} MB at the end")
    assert max(grown) < FLAT
    assert gateway_process.num_fds() < 64


async def test_some_hundred_hostile_requests(
    process: tuple[psutil.Process, int, Path], upstream: Engine
) -> None:
    await bombard(process, upstream, FEW)


@pytest.mark.wide
@pytest.mark.timeout(1800)
async def test_ten_thousand_hostile_requests(
    process: tuple[psutil.Process, int, Path], upstream: Engine
) -> None:
    await bombard(process, upstream, MANY)


async def test_a_hundred_megabytes_are_refused_and_not_kept(
    process: tuple[psutil.Process, int, Path],
) -> None:
    gateway_process, port, _ = process
    url = f"http://127.0.0.1:{port}/genrm/generate"
    before = gateway_process.memory_info().rss

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * (1 << 20)

    assert (await ask("POST", url, io.BytesIO(b" " * (100 << 20)))).status == 413
    async with aiohttp.ClientSession() as session:
        for _ in range(3):
            try:
                async with session.post(url, data=endless()) as answer:
                    assert answer.status == 413
            except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
                pass  # hung up on while sending
    assert (await get(f"http://127.0.0.1:{port}/healthz")).status == 200
    await until(lambda: gateway_process.memory_info().rss - before < GROWTH)
