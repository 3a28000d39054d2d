"""No path, header or method from outside reaches a weight, memory or pause call of an engine.

Every route of the installed SGLang, in every spelling, to the fence itself and through a gateway,
over real HTTP; behind the fence is an engine that would do all of it and notes what reached it.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.engines.fake_engine import FencedFake, WillingEngine, fenced_fake
from tests.engines.sglang_routes import CHANGING_PATHS, listed_routes
from tests.engines.walking import METHODS, OVERRIDES, Walker, spelled
from tests.gateway.fakes import Gateway, gateway

REACHABLE = {
    *(("POST", "/generate"), ("POST", "/v1/chat/completions"), ("POST", "/v1/completions")),
    *(("POST", "/close_session"), ("GET", "/v1/models")),
    *(("GET", "/server_info"), ("GET", "/model_info"), ("GET", "/health")),
}
"""Of the engine, by its own names: contract 5.2. Written down here again on purpose. Of
``/abort_request`` the fence does itself what a caller may ask for."""
THROUGH_THE_GATEWAY = {("POST", "/generate"), ("POST", "/v1/chat/completions")}

ROUTES = listed_routes()
PATHS = sorted(
    {route.path for route in ROUTES} | CHANGING_PATHS | {"/_fence/open", "/_fence/close"}
)
HARMFUL = {
    *("/update_weights_from_disk", "/release_memory_occupation", "/pause_generation"),
    *("/continue_generation", "/flush_cache", "/load_lora_adapter", "/set_internal_state"),
    *("/weights_checker", "/v1/realtime", "/openapi.json", "/v1/loads"),
}


@pytest.fixture(params=["in the engine", "as a proxy"])
async def fenced(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[FencedFake]:
    async with fenced_fake(tmp_path, WillingEngine(), remote=request.param == "as a proxy") as (
        made,
        _,
    ):
        yield made


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


async def walk(port: int, paths: list[str], prefix: str = "") -> int:
    """Every method on every path and every spelling of it, and where it would do harm with every
    header as well; how many were answered."""
    answered = 0
    async with Walker(port) as walker:
        for path in paths:
            for method in METHODS:
                answered += await walker.ask(method, prefix + path) > 0
            for spelling in spelled(path):
                target = spelling if "://" in spelling else prefix + spelling
                answered += await walker.ask("POST", target) > 0
                if path in HARMFUL:
                    answered += await walker.ask("GET", target) > 0
            for header in OVERRIDES if path in HARMFUL else ():
                line = header.format(method="POST", path=path)
                for at in (path, "/generate", "/v1/models"):
                    answered += await walker.ask("GET", prefix + at, [line]) > 0
    return answered


def by_itself(fenced: FencedFake) -> set[tuple[str, str]]:
    """A proxy aborts by a request of its own what is left behind."""
    return set() if fenced.remote is None else {("POST", "/abort_request")}


def test_the_list_of_routes_is_the_real_server_s() -> None:
    """Were it read wrongly, the walks below would prove nothing."""
    paths = {route.path for route in ROUTES}
    assert len(paths) > 70
    assert HARMFUL - {"/openapi.json"} <= paths
    assert {path for _, path in REACHABLE} <= paths
    assert all("PUT" in route.methods for route in ROUTES if route.path == "/generate")


@pytest.mark.timeout(600)
async def test_of_all_routes_in_all_spellings_only_the_allowlist_reaches_the_engine(
    fenced: FencedFake,
) -> None:
    answered = await walk(port_of(fenced.url), PATHS)
    assert answered > 40 * len(PATHS)
    seen = set(fenced.engine.seen) - by_itself(fenced)
    assert seen <= REACHABLE
    # The walk did get through where it may, so that "not seen" means refused.
    assert seen == REACHABLE


@pytest.mark.timeout(600)
@pytest.mark.parametrize("prefix", ["", "/rollout"])
async def test_through_a_gateway_nothing_but_a_request_for_tokens_reaches_the_engine(
    fenced: FencedFake, prefix: str
) -> None:
    async with gateway() as front:
        front.publish("rollout", fenced.url)
        paths = sorted({*PATHS, *HARMFUL})
        assert await walk(front.port, paths, prefix) > 40 * len(paths)
        below = [f"/generate{path}" for path in sorted(HARMFUL)]
        await walk(front.port, below, "/rollout")
        await reaches(front)
    assert set(fenced.engine.seen) == THROUGH_THE_GATEWAY


async def reaches(front: Gateway) -> None:
    """What may get through does, after all that."""
    async with Walker(front.port) as walker:
        assert await walker.ask("POST", "/rollout/generate", body=b'{"text": "x"}') == 200
        chat = b'{"messages": []}'
        assert await walker.ask("POST", "/rollout/v1/chat/completions", body=chat) == 200


@pytest.mark.parametrize("through_gateway", [False, True])
async def test_a_request_within_a_request_s_body_is_a_body(
    fenced: FencedFake, through_gateway: bool
) -> None:
    hidden = b"POST /update_weights_from_disk HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(hidden), hidden)
    async with gateway() as front:
        front.publish("rollout", fenced.url)
        port = front.port if through_gateway else port_of(fenced.url)
        path = "/rollout/generate" if through_gateway else "/generate"
        async with Walker(port) as walker:
            for headers, body in (
                ([], hidden),
                (["Content-Length: 0"], hidden),
                (["Transfer-Encoding: chunked"], chunks),
                (["Transfer-Encoding: identity, chunked"], chunks),
                (["Transfer-Encoding: xchunked"], hidden),
                (["Transfer-Encoding : chunked"], chunks),
                (["Expect: 100-continue"], b'{"text": "x"}'),
                (["Upgrade: websocket", "Connection: Upgrade"], hidden),
            ):
                await walker.ask("POST", path, headers, body)
    assert set(fenced.engine.seen) - by_itself(fenced) <= {("POST", "/generate")}


async def test_a_closed_gate_lets_no_spelling_of_a_generation_through(fenced: FencedFake) -> None:
    fenced.fence.gate.close()
    async with Walker(port_of(fenced.url)) as walker:
        for path in ("/generate", "/v1/chat/completions", "/chat/completions", "/v1/completions"):
            for spelling in spelled(path):
                for method in ("POST", "PUT"):
                    assert await walker.ask(method, spelling) in (0, 400, 404, 503)
    assert {path for _, path in fenced.engine.seen} <= {"/v1/models", "/health"}
