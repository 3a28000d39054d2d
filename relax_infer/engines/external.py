"""An SGLang server that somebody else started, over its public address.

It has no fence of ours: it may be called, loaded and ended by others at any time. So what it holds
is read before it is called, and again and again while it is.
"""

import asyncio
import math
from typing import Any

import aiohttp

from relax_infer.contracts.external import (
    ADDRESS,
    ExternalAsk,
    ExternalReport,
    ExternalWatch,
)
from relax_infer.contracts.failures import PermanentError, RelaxError, TransientError
from relax_infer.engines.canary import PROMPT

LOOK_SECONDS = 2.0
"""Between two looks."""
_READ_SECONDS = 10.0
_IDLE_SECONDS = 0.5


async def check(ask: ExternalAsk) -> ExternalReport:
    """Whether it answers and, where ``ask.digest`` says what is right, whether it is: other weights
    are loaded first where ``ask.weights`` names them, then digest, version and a canary are read.
    What fails is told, not raised."""
    if not ADDRESS.fullmatch(ask.url):
        return ExternalReport(url=ask.url, answers=False, error="it is no http://host:port")
    answers = False
    try:
        async with _session() as session:
            engine = _External(session, ask.url)
            await engine.healthy()
            version = await engine.version()
            answers = True
            if ask.digest is None:
                return ExternalReport(url=ask.url, answers=True, weight_version=version)
            digest = await engine.digest(ask.timeout)
            weights = ask.weights
            if weights is not None and (digest, version) != (ask.digest, weights.version):
                await engine.load(weights.uri, weights.version, ask.timeout)
                digest, version = await engine.digest(ask.timeout), await engine.version()
            told = ExternalReport(
                url=ask.url, answers=True, weight_version=version, weights_digest=digest
            )
            if digest != ask.digest:
                why = f"it holds weights {digest[:12]}, its siblings {ask.digest[:12]}"
                return told.model_copy(update={"error": why})
            if weights is not None and version != weights.version:
                why = f"it says version {version} after {weights.version} was loaded"
                return told.model_copy(update={"error": why})
            await engine.canary(ask.timeout)
            return told.model_copy(update={"right": True})
    except RelaxError as error:
        return ExternalReport(url=ask.url, answers=answers, error=str(error))


async def wait_idle(url: str, timeout: float) -> int:
    """Requests that it still works on, its other callers' too; 0 as soon as none is, else after
    ``timeout`` seconds.

    Raises:
        TransientError: it does not say.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + timeout
    async with _session() as session:
        engine = _External(session, url)
        while left := await engine.requests():
            if clock() >= deadline:
                break
            await asyncio.sleep(_IDLE_SECONDS)
        return left


async def watch(asked: ExternalWatch) -> dict[str, str]:
    """Return when one does not answer for ``asked.patience`` seconds, or says another version."""
    clock = asyncio.get_running_loop().time
    answered = dict.fromkeys(asked.versions, clock())
    async with _session() as session:

        async def look(url: str, version: int | None) -> str | None:
            try:
                now = await _External(session, url).version()
            except RelaxError as error:
                return str(error) if clock() - answered[url] >= asked.patience else None
            answered[url] = clock()
            if asked.compares and now != version:
                return f"somebody else loaded version {now} over {version}"
            return None

        while True:
            told = await asyncio.gather(*(look(url, v) for url, v in asked.versions.items()))
            lost = dict(zip(asked.versions, told, strict=True))
            if any(lost.values()):
                return {url: why for url, why in lost.items() if why is not None}
            await asyncio.sleep(LOOK_SECONDS)


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession()


class _External:
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self.url = session, url.rstrip("/")

    async def healthy(self) -> None:
        await self._call("GET", "/health", None, _READ_SECONDS)

    async def version(self) -> int | None:
        told = await self._call("GET", "/model_info", None, _READ_SECONDS)
        if isinstance(told, dict) and "model_path" in told and "weight_version" not in told:
            raise PermanentError(
                f"{self.url} does not say which weights it holds, as a guard or a fence hides it.",
                cure="Name the address of the engine itself.",
            )
        text = str(_field(told, "weight_version", self.url))
        return int(text) if text.isdecimal() else None

    async def digest(self, timeout: float) -> str:
        told = await self._call("POST", "/weights_checker", {"action": "checksum"}, timeout)
        ranks = _field(told, "ranks", self.url)
        one = len(ranks) == 1
        return str(ranks[0]["per_gpu_checksum"] if one else told["per_engine_checksum"])

    async def load(self, uri: str, version: int, timeout: float) -> None:
        body = {
            "model_path": uri.removeprefix("file://"),
            "weight_version": str(version),
            "flush_cache": True,
            "abort_all_requests": True,
        }
        await self._call("POST", "/update_weights_from_disk", body, timeout)

    async def canary(self, timeout: float) -> None:
        body = {
            "input_ids": list(PROMPT),
            "sampling_params": {"temperature": 0, "max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        told = await self._call("POST", "/generate", body, timeout)
        try:
            rows = [row[0] for row in told["meta_info"]["input_token_logprobs"][1:]]
        except (KeyError, TypeError, IndexError) as error:
            raise PermanentError(f"{self.url} gave no log-probs: {error!r}") from error
        if len(rows) != len(PROMPT) - 1 or not all(_finite(each) for each in rows):
            raise PermanentError(f"{self.url} gave {rows} where {len(PROMPT) - 1} numbers were due")

    async def requests(self) -> int:
        told = await self._call("GET", "/v1/loads", None, _READ_SECONDS)
        loads = _field(told, "loads", self.url)
        return sum(
            int(load.get("num_running_reqs", 0)) + int(load.get("num_waiting_reqs", 0))
            for load in loads
        )

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None, timeout: float
    ) -> Any:
        try:
            async with self._session.request(
                method,
                f"{self.url}{path}",
                json=body,
                timeout=aiohttp.ClientTimeout(total=timeout),
                allow_redirects=False,
            ) as answer:
                text = await answer.text()
                if answer.status != 200:
                    raise PermanentError(
                        f"{method} {self.url}{path} answered {answer.status}: {text[:200]}"
                    )
                return await answer.json() if answer.content_type == "application/json" else text
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise TransientError(
                f"{method} {self.url}{path}: no answer within {timeout:g} s"
                f" ({type(error).__name__} {error})"
            ) from error


def _field(told: Any, name: str, url: str) -> Any:
    if not isinstance(told, dict) or name not in told:
        raise PermanentError(f"{url} does not answer as SGLang does: {name} is missing")
    return told[name]  # pyright: ignore[reportUnknownVariableType]


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
