"""What generation, judging, teaching and evaluation share: ask for what no shard holds.

A phase is run until it succeeds; each run is an *attempt*. An attempt first sees every request of
earlier attempts gone, then asks only for groups without a shard, stages each group when it is
whole, and at the end compacts the shards. A POST is never replayed: what was in flight at a crash
is asked again by the next attempt under a new request id.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import pyarrow as pa

from relax_infer.contracts.batch import PhaseResult
from relax_infer.contracts.failures import PermanentError, TransientError
from relax_infer.samples.store import StagingStore
from relax_infer.security import gateway_ssl
from relax_infer.telemetry.traces import trace_headers

T = TypeVar("T")
Settle = Callable[[str], Awaitable[int]]
"""Abort every request whose id begins with a prefix; returns how many, once they are gone."""
Beat = Callable[[int, int], None]
"""Told (groups done, groups in all) as the phase goes on."""

TRANSIENT_STATUSES = frozenset({429, 502, 503, 504})
REFUSED_STATUSES = frozenset({400, 413, 422})
"""It is this request that cannot be answered, for instance because it is too long."""
BUSY_STATUSES = frozenset({429, 503})
"""Nobody took the request: it may be asked again at once."""
_PAUSE = 0.25
"""Seconds before the first such time; doubled each time."""
ROUTER_LOST_ENGINE = b"call_upstream_request_error"
"""sglang-router says 500 with this code when its connection to an engine broke."""


class RefusedError(PermanentError):
    """The engine will not answer this request; others it may."""


class BusyError(TransientError):
    """Nobody took the request."""


@dataclass(frozen=True)
class Limits:
    """How hard a phase may press."""

    concurrency: int
    """Requests in flight at once."""
    timeout: float
    """Seconds for one request."""


class Asker:
    """POSTs of one attempt, each under its own request id and never twice."""

    def __init__(
        self, session: aiohttp.ClientSession, limits: Limits, prefix: str, attempt: int
    ) -> None:
        self._session = session
        self._slots = asyncio.Semaphore(limits.concurrency)
        self._timeout = aiohttp.ClientTimeout(total=limits.timeout)
        self._prefix = prefix
        self.attempt = attempt
        self.requested = 0

    def rid(self, group: int, sample: int, part: str = "") -> str:
        """``part`` tells several requests about one sample apart."""
        return f"{self._prefix}g{group}/s{sample}/a{self.attempt}{f'/{part}' if part else ''}"

    async def post(
        self,
        url: str,
        payload: dict[str, Any],
        group: int,
        sample: int,
        *,
        part: str = "",
        headers: dict[str, str] | None = None,
        retries: int = 0,
    ) -> Any:
        """The JSON answer to one request.

        Where nobody took it (429, 503) it is sent up to ``retries`` times more, under further
        request ids. Any other failure may have left a request in flight, and is not repeated.

        Raises:
            TransientError: no connection, no answer in time, or a status that says later.
            RefusedError: the engine will not answer this request.
            PermanentError: another status, or an answer that is not JSON.
        """
        for again in range(retries + 1):
            word = "/".join(filter(None, (part, f"r{again}" if again else "")))
            try:
                return await self._post(url, payload, group, sample, word, headers)
            except BusyError:
                if again == retries:
                    raise
                await asyncio.sleep(_PAUSE * 2**again)
        raise AssertionError("unreachable")

    async def _post(
        self,
        url: str,
        payload: dict[str, Any],
        group: int,
        sample: int,
        part: str,
        headers: dict[str, str] | None,
    ) -> Any:
        rid = self.rid(group, sample, part)
        where = f"group {group} sample {sample} ({rid} to {url})"
        async with self._slots:
            self.requested += 1
            try:
                async with self._session.post(
                    url,
                    json={**payload, "rid": rid},
                    timeout=self._timeout,
                    headers={**(headers or {}), **trace_headers()},
                ) as response:
                    body = await response.read()
                    if response.status != 200:
                        raise _refusal(where, response.status, body)
                    return await response.json()
            except (aiohttp.ContentTypeError, ValueError) as error:
                raise PermanentError(f"{where}: the answer is not JSON: {error}") from error
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                reason = str(error) or type(error).__name__
                raise TransientError(f"{where}: no answer: {reason}") from error


Work = Callable[[Asker, int], Awaitable[pa.Table]]
"""Ask for one group (its ordinal) and return its rows."""


async def run_phase(
    store: StagingStore,
    step: int,
    phase: str,
    groups: range,
    work: Work,
    limits: Limits,
    settle: Settle,
    beat: Beat,
    *,
    elsewhere: bool = False,
) -> PhaseResult:
    """One attempt at a phase.

    On the first failure no further group is begun, those at work are cancelled, what is whole
    stays staged, and the failure is raised.

    Args:
        elsewhere: somebody else serves what is asked: the certificates of our gateway say nothing
            of it, the system's do.
    """
    prefix = f"{store.run}/{step}/{phase}/"
    attempt = await asyncio.to_thread(store.claim_attempt, step, phase)
    settled = await settle(prefix) if attempt > 1 else 0
    held = await asyncio.to_thread(store.shards, step, phase)
    missing = [group for group in groups if group not in held]
    done = len(groups) - len(missing)
    beat(done, len(groups))
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=limits.concurrency, ssl=True if elsewhere else gateway_ssl()
        ),
        cookie_jar=aiohttp.DummyCookieJar(),
    ) as session:
        asker = Asker(session, limits, prefix, attempt)

        async def one(group: int) -> None:
            nonlocal done
            table = await work(asker, group)
            await _finished(store.write_shard, step, phase, group, attempt, table)
            done += 1
            beat(done, len(groups))

        await together(one(group) for group in missing)
    staged = await asyncio.to_thread(store.compact, step, phase)
    return PhaseResult(
        staged=staged,
        attempt=attempt,
        requested=asker.requested,
        reused_groups=len(groups) - len(missing),
        settled=settled,
    )


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; after the first failure the others are cancelled, awaited, and it is
    raised by itself (a permanent one before a transient one)."""
    try:
        async with asyncio.TaskGroup() as tasks:
            made = [tasks.create_task(each) for each in work]
    except* (TransientError, PermanentError) as failures:
        raise _first(failures.subgroup(PermanentError) or failures) from None
    return [task.result() for task in made]


async def _finished(write: Callable[..., object], *args: Any) -> None:
    """Run a write in a thread; a cancellation goes on only when the write has ended, so that an
    attempt that has failed leaves nothing behind that still writes."""
    writing = asyncio.ensure_future(asyncio.to_thread(write, *args))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait([writing])
        raise


def _first(failures: BaseExceptionGroup[Any]) -> BaseException:
    error: BaseException = failures
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _refusal(where: str, status: int, body: bytes) -> Exception:
    text = f"{where}: status {status}: {body[:300].decode(errors='replace')}"
    if status in REFUSED_STATUSES:
        return RefusedError(text)
    if status in BUSY_STATUSES:
        return BusyError(text)
    no_connection = status == 500 and ROUTER_LOST_ENGINE in body
    transient = status in TRANSIENT_STATUSES or no_connection
    return TransientError(text) if transient else PermanentError(text)
