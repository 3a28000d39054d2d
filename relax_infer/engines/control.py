"""The management side of one engine: its fence and SGLang's own controls, over the socket."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import aiohttp

from relax_infer.contracts.failures import PermanentError, UnconfirmedError
from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.weights import Seat, TensorPlan
from relax_infer.engines.fence import TOKEN_HEADER

CHANGING = "changing"
"""Version that an engine names while its weights are neither the last nor the next."""


class OvertakenError(PermanentError):
    """The engine has seen a later or a rival token: it is another grant's now."""


class EngineControl:
    """Calls to one engine. Each raises :class:`UnconfirmedError` when no answer came (the call
    may or may not have had its effect) and :class:`PermanentError` when the engine refused, which
    is an :class:`OvertakenError` where the token was the reason."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket

    async def status(self) -> dict[str, Any]:
        """``ready inflight backend_drained abandoned fence engine_idle silent_for rids``."""
        return await self._json("GET", "/_fence/status", timeout=10)

    async def open(self, token: FenceToken) -> None:
        await self._json("POST", "/_fence/open", token=token)

    async def close(self, token: FenceToken, drain_for: float = 0.0, timeout: float = 60.0) -> None:
        """Admit nobody and abort what runs: at once, or what is left in ``drain_for`` seconds. It
        may take a moment to end."""
        query = {"mode": "drain", "deadline": f"{drain_for:g}"} if drain_for > 0 else None
        await self._json("POST", "/_fence/close", query=query, token=token, timeout=timeout)

    async def confirm_drained(self, token: FenceToken, timeout: float = 60.0) -> None:
        """Refused while anything is in flight, in the tokenizer's table or in the scheduler."""
        await self._json("POST", "/_fence/confirm_drained", token=token, timeout=timeout)

    async def requests(self, prefix: str) -> list[str]:
        """Ids beginning with ``prefix`` of requests in the fence or in the engine."""
        return (await self._json("GET", "/_fence/requests", query={"prefix": prefix}))["rids"]

    async def abort(self, prefix: str, token: FenceToken, timeout: float = 60.0) -> list[str]:
        """Abort every request whose id begins with ``prefix``; they may take a moment to end."""
        query = {"prefix": prefix}
        answer = await self._json(
            "POST", "/_fence/abort", query=query, token=token, timeout=timeout
        )
        return answer["rids"]

    async def alive(self) -> bool:
        status, _ = await self._call("GET", "/health", timeout=10)
        return status == 200

    async def pause(self, token: FenceToken, timeout: float) -> None:
        await self._json(
            "POST", "/pause_generation", {"mode": "abort"}, token=token, timeout=timeout
        )

    async def continue_generation(self, token: FenceToken) -> None:
        await self._json("POST", "/continue_generation", {}, token=token)

    async def flush_cache(self, timeout: float = 60.0) -> bool:
        """False: the scheduler is busy."""
        status, text = await self._call("POST", "/flush_cache", timeout=timeout)
        if status not in (200, 400):
            raise PermanentError(f"/flush_cache on {self.socket} answered {status}: {text}")
        return status == 200

    async def release(self, tags: Sequence[str], token: FenceToken, timeout: float) -> None:
        body = {"tags": list(tags)}
        await self._json("POST", "/release_memory_occupation", body, token=token, timeout=timeout)

    async def resume(self, tags: Sequence[str], token: FenceToken, timeout: float) -> None:
        body = {"tags": list(tags)}
        await self._json("POST", "/resume_memory_occupation", body, token=token, timeout=timeout)

    async def load(self, folder: Path, version: int, token: FenceToken, timeout: float) -> None:
        """Replace the resident weights by those of a Hugging Face folder."""
        body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
        await self._json("POST", "/update_weights_from_disk", body, token=token, timeout=timeout)

    async def begin_update(self, token: FenceToken, timeout: float) -> None:
        """Weights may be changed from here to :meth:`end_update`; refused while one is open."""
        await self._json("POST", "/begin_weight_update", {}, token=token, timeout=timeout)

    async def end_update(self, token: FenceToken, timeout: float) -> None:
        await self._json("POST", "/end_weight_update", {}, token=token, timeout=timeout)

    async def update_from_tensors(
        self, handles: Sequence[str], token: FenceToken, timeout: float
    ) -> None:
        """Load one bucket; ``handles`` are those of a ``SharedBucket``, one for each rank."""
        body = {"serialized_named_tensors": list(handles), "flush_cache": False}
        path = "/update_weights_from_tensor"
        await self._json("POST", path, body, token=token, timeout=timeout)

    async def join_group(self, seat: Seat, backend: str, token: FenceToken, timeout: float) -> None:
        """Its ranks join a process group; answers when every rank of the group is there."""
        body = {
            "master_address": seat.host,
            "master_port": seat.port,
            "rank_offset": seat.rank_offset,
            "world_size": seat.world,
            "group_name": seat.group,
            "backend": backend,
        }
        await self._json("POST", "/init_weights_update_group", body, token=token, timeout=timeout)

    async def update_from_group(
        self, seat: Seat, bucket: Sequence[TensorPlan], token: FenceToken, timeout: float
    ) -> None:
        """Load one bucket that rank 0 of the group broadcasts as one tensor of bytes."""
        body = {
            "names": [each.name for each in bucket],
            "dtypes": [each.dtype for each in bucket],
            "shapes": [list(each.shape) for each in bucket],
            "group_name": seat.group,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        path = "/update_weights_from_distributed"
        await self._json("POST", path, body, token=token, timeout=timeout)

    async def leave_group(self, seat: Seat, token: FenceToken, timeout: float) -> None:
        """Refused where its ranks have not joined."""
        body = {"group_name": seat.group}
        path = "/destroy_weights_update_group"
        await self._json("POST", path, body, token=token, timeout=timeout)

    async def name_weights(self, version: int | None, token: FenceToken, timeout: float) -> None:
        """What it is to say of its weights from now on; None: that they are being changed."""
        name = CHANGING if version is None else str(version)
        body = {"new_version": name, "abort_all_requests": False}
        await self._json("POST", "/update_weight_version", body, token=token, timeout=timeout)

    async def weight_version(self) -> int | None:
        """The version that the engine was last told; None when it was told none."""
        text = str((await self._json("GET", "/model_info"))["weight_version"])
        return int(text) if text.isdecimal() else None

    async def weights_digest(self, timeout: float) -> str:
        """Digest of the resident weights: the one rank's, or the one over all ranks'."""
        answer = await self._json(
            "POST", "/weights_checker", {"action": "checksum"}, timeout=timeout
        )
        ranks = answer["ranks"]
        return ranks[0]["per_gpu_checksum"] if len(ranks) == 1 else answer["per_engine_checksum"]

    async def log_probs(self, tokens: Sequence[int], timeout: float) -> list[float]:
        """Log-prob of every token but the first, by one prefill; works behind a closed gate."""
        body = {
            "input_ids": list(tokens),
            "sampling_params": {"temperature": 0, "max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = await self._json("POST", "/generate", body, timeout=timeout)
        try:
            rows = answer["meta_info"]["input_token_logprobs"]
            return [math.nan if row[0] is None else float(row[0]) for row in rows[1:]]
        except (KeyError, TypeError, IndexError) as error:
            raise PermanentError(
                f"/generate on {self.socket} gave no log-probs: {error!r}"
            ) from error

    async def _json(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        token: FenceToken | None = None,
        timeout: float = 60.0,
    ) -> Any:
        status, answer = await self._call(
            method, path, body, query=query, token=token, timeout=timeout
        )
        if status != 200:
            stale = isinstance(answer, dict) and cast("dict[str, Any]", answer).get("stale") is True
            refused = OvertakenError if stale else PermanentError
            raise refused(f"{method} {path} on {self.socket} answered {status}: {answer}")
        return answer

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        token: FenceToken | None = None,
        timeout: float = 60.0,
    ) -> tuple[int, Any]:
        headers = {} if token is None else {TOKEN_HEADER: str(token)}
        connector = aiohttp.UnixConnector(path=str(self.socket))
        try:
            async with (
                aiohttp.ClientSession(connector=connector) as session,
                session.request(
                    method,
                    f"http://engine{path}",
                    params=query,
                    json=body,
                    headers=headers,
                    timeout=aiohttp.ClientTimeout(total=timeout),
                ) as response,
            ):
                text = await response.text()
                if response.content_type == "application/json" and text:
                    return response.status, await response.json()
                return response.status, text
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnconfirmedError(
                f"{method} {path} on {self.socket}: no answer within {timeout:g} s"
                f" ({type(error).__name__} {error}).",
                cure="It may or may not have had its effect.",
            ) from error
