"""sglang-router in front of a role's engines: its command line and its list of workers."""

import asyncio
import sys
import time
from collections.abc import Iterable
from typing import Any

import aiohttp

from relax_infer.contracts.failures import PermanentError, TransientError

POLL_SECONDS = 0.1
OTHERS_SECONDS = 10.0
"""For the router to hold engines of others for healthy."""


def router_command(
    port: int,
    prometheus_port: int,
    *,
    host: str = "127.0.0.1",
    policy: str = "round_robin",
    python: str | None = None,
    request_timeout: int = 1800,
) -> list[str]:
    """Command line of one router without workers.

    It never sends a POST twice (``--disable-retries``; its default is five times) and never shuts
    an engine out for its answers (``--disable-circuit-breaker``; the fence answers 503 while an
    engine is closed, which is no fault). Which workers it has is decided by
    :class:`RouterAdapter` alone. ``request_timeout`` is in seconds.
    """
    return [
        python or sys.executable,
        "-m",
        "sglang_router.launch_router",
        *("--host", host, "--port", str(port)),
        *("--prometheus-host", host, "--prometheus-port", str(prometheus_port)),
        *("--policy", policy),
        *("--request-timeout-secs", str(request_timeout)),
        "--disable-retries",
        "--disable-circuit-breaker",
        # /health of a fenced engine answers in milliseconds; three misses in a row are a death.
        *("--health-check-interval-secs", "2", "--health-check-timeout-secs", "5"),
        *("--health-failure-threshold", "3", "--health-success-threshold", "1"),
        *("--worker-startup-check-interval", "1", "--worker-startup-timeout-secs", "30"),
        *("--log-level", "warn"),
    ]


class RouterAdapter:
    """The workers of one running router, changed only with confirmation.

    The router answers 202 to every change, also to one that will come to nothing, so each change
    is polled until the router shows it.
    """

    def __init__(self, url: str, *, timeout: float = 60.0) -> None:
        """``timeout``: seconds for one whole change, confirmation included."""
        self.url = url.rstrip("/")
        self._timeout = timeout

    async def workers(self) -> dict[str, bool]:
        """Addresses of the router's workers, and whether it holds each for healthy."""
        async with aiohttp.ClientSession() as session:
            return {w["url"].rstrip("/"): bool(w["is_healthy"]) for w in await self._list(session)}

    async def set_workers(self, urls: Iterable[str], others: Iterable[str] = ()) -> None:
        """Make the router hold exactly ``urls``, all healthy; a repeat changes nothing.

        Args:
            others: it may hold these besides. They are waited for :data:`OTHERS_SECONDS` and no
                longer: whoever runs them owes us nothing.

        Raises:
            TransientError: the router did not answer, or did not show the change in time.
            PermanentError: the router refused the change.
        """
        wanted = {url.rstrip("/") for url in urls}
        named = wanted | {url.rstrip("/") for url in others}
        began = time.monotonic()
        deadline = began + self._timeout
        asked: set[str] = set()
        async with aiohttp.ClientSession() as session:
            while True:
                listed = await self._list(session)
                held = {w["url"].rstrip("/"): bool(w["is_healthy"]) for w in listed}
                waits = time.monotonic() < began + OTHERS_SECONDS
                well = {url for url, healthy in held.items() if healthy}
                if held.keys() <= named and well >= (named if waits else wanted):
                    return
                for worker in listed:
                    identity = worker["id"]
                    if worker["url"].rstrip("/") not in named and identity not in asked:
                        asked.add(identity)
                        await self._call(session, "DELETE", f"/workers/{identity}")
                for url in sorted(named - held.keys() - asked):
                    asked.add(url)
                    await self._call(session, "POST", "/workers", {"url": url})
                if time.monotonic() > deadline:
                    raise TransientError(
                        f"router {self.url} holds {held or 'no worker'} (address: healthy) after"
                        f" {self._timeout:.0f} s, asked for {sorted(wanted)}.",
                        cure="Look whether each engine's /health answers; then set them again.",
                    )
                await asyncio.sleep(POLL_SECONDS)

    async def keep_only(self, urls: Iterable[str]) -> None:
        """Make the router hold nothing but ``urls``, well or not; adds nothing. Confirmed.

        Raises:
            TransientError: the router did not answer, or did not show the change in time.
            PermanentError: the router refused the change.
        """
        kept = tuple(urls)
        deadline = time.monotonic() + self._timeout
        while strays := await self.drop_strays(kept):
            if time.monotonic() > deadline:
                raise TransientError(
                    f"router {self.url} still holds {sorted(strays)} after {self._timeout:.0f} s.",
                    cure="Ask again.",
                )
            await asyncio.sleep(POLL_SECONDS)

    async def drop_strays(self, wanted: Iterable[str]) -> set[str]:
        """Have the router let go of every worker that is not ``wanted``; their addresses.

        The router goes on with an addition for a while after it was given up: the worker can
        appear when nobody waits for it any more. Not confirmed: look again later.

        Raises:
            TransientError: the router did not answer.
            PermanentError: the router refused the change.
        """
        kept = {url.rstrip("/") for url in wanted}
        async with aiohttp.ClientSession() as session:
            strays = {
                w["id"]: w["url"].rstrip("/")
                for w in await self._list(session)
                if w["url"].rstrip("/") not in kept
            }
            for identity in strays:
                await self._call(session, "DELETE", f"/workers/{identity}")
        return set(strays.values())

    async def _list(self, session: aiohttp.ClientSession) -> list[dict[str, Any]]:
        answer = await self._call(session, "GET", "/workers")
        workers = answer.get("workers")
        if not isinstance(workers, list):
            raise PermanentError(f"GET {self.url}/workers answered without a list: {answer}")
        return workers

    async def _call(
        self,
        session: aiohttp.ClientSession,
        method: str,
        path: str,
        body: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        try:
            async with session.request(
                method, self.url + path, json=body, timeout=aiohttp.ClientTimeout(total=10)
            ) as response:
                if response.status == 404 and method == "DELETE":  # gone already
                    return {}
                text = await response.text()
                if response.status >= 500:
                    raise TransientError(f"{method} {self.url}{path}: {response.status} {text}")
                if response.status >= 400:
                    raise PermanentError(f"{method} {self.url}{path}: {response.status} {text}")
                return await response.json() if text else {}
        except (aiohttp.ClientError, TimeoutError) as error:
            raise TransientError(
                f"{method} {self.url}{path}: {type(error).__name__} {error}"
            ) from error
