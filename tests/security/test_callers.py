"""Who may call the gateway: tokens, roles, rates, and what is never told."""

import asyncio
import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from relax_infer.contracts.failures import PermanentError
from relax_infer.security import Callers, Refused, gateway_headers, load_callers
from tests.gateway.asking import Reply, ask, get
from tests.gateway.fakes import Gateway, engine, gateway
from tests.gateway.test_gateway import echo

RUN, JUDGE = "run-token-0123456789abcdef", "judge-token-0123456789abcdef"


def file_of(folder: Path, text: str, mode: int = 0o600) -> dict[str, str]:
    path = folder / "callers.yaml"
    path.write_text(text)
    path.chmod(mode)
    return {"RELAX_GATEWAY_TOKENS": str(path)}


def callers(folder: Path, text: str = "", **clock: Any) -> Callers:
    text = (
        text
        or f"""
callers:
  judge-box:
    token_sha256: {hashlib.sha256(JUDGE.encode()).hexdigest()}
    roles: [genrm]
    requests_per_second: 0.5
    burst: 2
    concurrency: 2
"""
    )
    loaded = load_callers({**file_of(folder, text), "RELAX_GATEWAY_TOKEN": RUN})
    assert loaded is not None
    return Callers(loaded._callers, **clock) if clock else loaded


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def generate(front: Gateway, role: str, token: str | None, **payload: object) -> Reply:
    headers = bearer(token) if token else {}
    return await ask("POST", f"{front.url}/{role}/generate", {"text": "x", **payload}, headers)


async def test_without_a_known_token_nothing_is_answered_and_no_engine_hears_of_it(tmp_path: Path):
    async with gateway(callers=callers(tmp_path)) as front, engine(echo) as upstream:
        front.publish("genrm", upstream.url)
        none = await generate(front, "genrm", None)
        wrong = await generate(front, "genrm", "wrong-token-0123456789abcdef")
        basic = await get(front.url + "/genrm/engines", {"Authorization": f"Basic {RUN}"})
        for reply in (none, wrong, basic):
            assert reply.status == 401
        assert none.headers["WWW-Authenticate"] == 'Bearer realm="relax-infer"'
        assert wrong.headers["WWW-Authenticate"].endswith('error="invalid_token"')
        for path in ("/genrm/engines", "/genrm/v1/models", "/genrm/health", "/metrics"):
            assert (await get(front.url + path)).status == 401
            assert (await get(front.url + path, bearer(RUN))).status == 200
        assert (await get(front.url + "/healthz")).status == 200
        assert upstream.posts == []
        for token in ({}, bearer(RUN)):  # which routes there are is no secret
            assert (await get(front.url + "/genrm/nothing", token)).status == 404
            assert (await get(front.url + "/genrm/generate", token)).status == 405


async def test_a_caller_may_ask_its_roles_only_and_the_engine_never_sees_its_token(tmp_path: Path):
    async with gateway(callers=callers(tmp_path)) as front, engine(echo) as upstream:
        front.publish("genrm", upstream.url)
        front.publish("teacher", upstream.url)
        assert (await generate(front, "teacher", JUDGE)).status == 403
        assert (await get(front.url + "/teacher/engines", bearer(JUDGE))).status == 403
        assert (await generate(front, "genrm", JUDGE)).status == 200
        assert (await generate(front, "teacher", RUN)).status == 200
        assert len(upstream.posts) == 2
        assert all("Authorization" not in headers for headers, _ in upstream.posts)


async def test_a_caller_that_asks_too_often_is_told_when_to_come_back(tmp_path: Path):
    now = 100.0
    known = callers(tmp_path, clock=lambda: now)
    async with gateway(callers=known) as front, engine(echo) as upstream:
        front.publish("genrm", upstream.url)
        statuses = [(await generate(front, "genrm", JUDGE)).status for _ in range(2)]
        refused = await generate(front, "genrm", JUDGE)
        assert (statuses, refused.status) == ([200, 200], 429)
        assert refused.headers["Retry-After"] == "2"
        assert (await generate(front, "genrm", RUN)).status == 200
        now = 102.0
        assert (await generate(front, "genrm", JUDGE)).status == 200
        assert len(upstream.posts) == 4
        families = text_string_to_metric_families(
            (await get(front.url + "/metrics", bearer(RUN))).body.decode()
        )
        counted = {
            (s.labels["caller"], s.labels["reason"]): s.value
            for family in families
            for s in family.samples
            if s.name == "relax_gateway_refused_total"
        }
        assert counted == {("judge-box", "rate"): 1.0}


async def test_a_caller_has_so_many_requests_under_way_and_each_gives_its_place_back(
    tmp_path: Path,
):
    go = asyncio.Event()

    async def wait(request: web.Request, payload: dict[str, Any]) -> web.Response:
        await go.wait()
        return web.json_response({})

    known = callers(tmp_path, clock=lambda: 0.0)
    async with gateway(callers=known) as front, engine(wait) as upstream:
        front.publish("genrm", upstream.url)
        (caller,) = [each for each in known._callers if each.name == "judge-box"]
        caller.burst = 100
        asked = [asyncio.create_task(generate(front, "genrm", JUDGE)) for _ in range(2)]
        async with asyncio.timeout(30):
            while len(upstream.posts) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        refused = await generate(front, "genrm", JUDGE)
        assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
        asked[0].cancel()
        await asyncio.wait([asked[0]])
        async with asyncio.timeout(30):
            while caller.in_flight > 1:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        go.set()
        assert (await asked[1]).status == 200
        assert (await generate(front, "genrm", JUDGE)).status == 200
        assert caller.in_flight == 0


def test_every_token_is_compared_in_constant_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    known = callers(tmp_path)
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr("hmac.compare_digest", compare)
    assert known.known(f"Bearer {RUN}".encode()).name == "run"
    with pytest.raises(Refused):
        known.known(b"Bearer nobody")
    assert [len(one) for one, _ in compared] == [32] * 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("callers: {a: {token: short}}", "callers.a.token: String should have at least 16"),
        ("callers: {a: {}}", "give either token or token_sha256"),
        ("callers: {a: {token: 0123456789abcdef, roles: [trainer]}}", "callers.a.roles.0"),
        ("callers: {a: {token: 0123456789abcdef, rate: 3}}", "callers.a.rate: Extra inputs"),
        ("callers: {}", "callers: Dictionary should have at least 1 item"),
        ("callers: [", "is not YAML"),
        (
            "callers: {a: {token: 0123456789abcdef}, b: {token: 0123456789abcdef}}",
            "Two callers of the gateway have the same token",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_without_telling_a_token(
    tmp_path: Path, text: str, says: str
):
    with pytest.raises(PermanentError) as refused:
        load_callers(file_of(tmp_path, text))
    assert says in str(refused.value)
    assert "0123456789abcdef" not in str(refused.value)


def test_a_file_that_others_may_read_is_refused(tmp_path: Path):
    given = file_of(tmp_path, "callers: {a: {token: 0123456789abcdef}}", 0o640)
    with pytest.raises(PermanentError, match=r"mode is 0640.*\n?.*chmod 600"):
        load_callers(given)


def test_the_runs_own_token_may_be_in_a_file_and_is_hidden_in_logs(tmp_path: Path):
    from relax_infer.telemetry import redacted

    path = tmp_path / "token"
    path.write_text("from-a-file-0123456789\n")
    path.chmod(0o600)
    given = {"RELAX_GATEWAY_TOKEN_FILE": str(path)}
    assert gateway_headers(given) == bearer("from-a-file-0123456789")
    assert "from-a-file" not in redacted("sent from-a-file-0123456789 to nobody")
    known = load_callers(given)
    assert known is not None
    assert known.names == ("run",)


@pytest.mark.parametrize("empty", ["", " "])
def test_a_file_of_callers_without_a_name_opens_nothing(empty: str):
    with pytest.raises(PermanentError, match="is set and names no file"):
        load_callers({"RELAX_GATEWAY_TOKENS": empty})


def test_nobody_is_asked_for_a_token_unless_somebody_said_so():
    assert load_callers({}) is None
    assert gateway_headers({}) == {}


def test_a_listener_that_others_can_reach_says_so_loudly(caplog: pytest.LogCaptureFixture):
    from relax_infer.gateway.serve import GatewayOptions, _warn_if_open
    from relax_infer.gateway.tls import Tls

    known = Callers(())
    with caplog.at_level(logging.WARNING):
        for quiet in ("127.0.0.1", "::1", "localhost"):
            _warn_if_open(quiet, GatewayOptions())
        _warn_if_open("10.0.0.7", GatewayOptions(callers=known, tls=Tls("c", "k")))
        assert caplog.records == []
        _warn_if_open("0.0.0.0", GatewayOptions())
    assert "ASKS NOBODY FOR A TOKEN" in caplog.text
    assert "WITHOUT TLS" in caplog.text


def test_the_process_list_of_a_gateway_has_no_token():
    """The token reaches the gateway by its environment, which only its user may read."""
    import inspect

    from relax_infer.gateway import _front_actor

    command = inspect.getsource(_front_actor.FrontActor._ensure_gateway)
    assert "TOKEN" not in command
    environ = Path(f"/proc/{os.getpid()}/environ")
    assert environ.stat().st_mode & 0o077 == 0
