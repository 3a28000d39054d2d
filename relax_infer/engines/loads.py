"""How many requests an SGLang server works on, in its own words."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

Ask = Callable[[str, str], Awaitable[tuple[int, bytes]]]
"""Method and path to status and body; status 0: no answer."""


async def requests_of(ask: Ask) -> int | None:
    """Running and waiting ones over all its ranks; None: it does not say.

    ``/v1/loads`` of today, ``/get_load`` and ``/get_server_info`` of earlier versions, the last in
    tokens: 0 of them means the same.
    """
    for path, read in _SAYS.items():
        status, body = await ask("GET", path)
        if status == 404:
            continue
        if status != 200:
            return None
        try:
            rows = read(json.loads(body))
        except (ValueError, KeyError, TypeError):
            continue
        return sum(rows) if rows else None
    return None


def _today(told: Any) -> list[int]:
    return [int(row["num_running_reqs"]) + int(row["num_waiting_reqs"]) for row in told["loads"]]


def _earlier(told: Any) -> list[int]:
    return [int(row["num_reqs"]) for row in told]


def _first(told: Any) -> list[int]:
    loads = [state["load"] for state in told["internal_states"]]
    return [int(load["num_reqs"] if isinstance(load, dict) else load) for load in loads]


_SAYS: dict[str, Callable[[Any], list[int]]] = {
    "/v1/loads": _today,
    "/get_load": _earlier,
    "/get_server_info": _first,
}
