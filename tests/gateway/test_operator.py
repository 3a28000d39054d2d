"""Who may scale over HTTP, what is answered, and that nothing else of the gateway changes."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from relax_infer.contracts.lease import RoleResult
from relax_infer.contracts.scale import ScaleRequest, ScaleStatus
from relax_infer.discovery import Role
from relax_infer.gateway._asgi import App, Receive, Scope, Send, reply
from relax_infer.gateway.operator import ScaleRefused, with_operator_routes
from relax_infer.machines import ScaleState
from tests.gateway.asking import by_hand, status_of
from tests.gateway.fakes import gateway, until

TOKEN = {"authorization": "Bearer secret"}


class Roles:
    """In the place of the run's role workflows."""

    def __init__(self) -> None:
        self.asked: list[tuple[Role, ScaleRequest]] = []
        self.answer: dict[str, Any] = {"state": ScaleState.PENDING}
        self.error: Exception | None = None
        self.recoveries: list[tuple[Role, str, float]] = []
        self.recovered: RoleResult | None = RoleResult(state="READY")

    async def ask(self, role: Role, request: ScaleRequest) -> ScaleStatus:
        self.asked.append((role, request))
        if self.error is not None:
            raise self.error
        return self._status(role, request.operation_id)

    async def look(self, role: Role, operation_id: str) -> ScaleStatus | None:
        return self._status(role, operation_id) if operation_id == "known" else None

    async def recover(self, role: Role, request_id: str, seconds: float) -> RoleResult | None:
        self.recoveries.append((role, request_id, seconds))
        if self.error is not None:
            raise self.error
        return self.recovered

    def _status(self, role: Role, operation_id: str) -> ScaleStatus:
        document = {"operation_id": operation_id, "run": "r", "role": role, "model": "m"}
        return ScaleStatus.model_validate({**document, **self.answer})


async def plain(scope: Scope, receive: Receive, send: Send) -> None:
    await reply(send, 418, {"detail": "the gateway itself"})


@pytest.fixture
def roles() -> Roles:
    return Roles()


@pytest.fixture
def client(roles: Roles) -> httpx.AsyncClient:
    app = with_operator_routes(
        plain, token="secret", ask=roles.ask, look=roles.look, recover=roles.recover
    )
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=transport, base_url="http://gateway")


async def test_a_request_is_taken_in_and_its_id_is_told(client: httpx.AsyncClient, roles: Roles):
    body = {"num_replicas": 3, "request_id": "monday", "timeout": 30}
    answer = await client.post("/rollout/scale_out", json=body, headers=TOKEN)
    assert answer.status_code == 202
    assert answer.json()["request_id"] == "monday"
    assert answer.json()["status"] == "PENDING"
    ((role, request),) = roles.asked
    assert (role, request.direction, request.num_replicas) == (Role.ROLLOUT, "out", 3)
    assert (request.provision_timeout, request.drain_timeout) == (30, None)
    await client.post("/genrm/scale_in", json={"num_replicas": 1, "timeout": 9}, headers=TOKEN)
    role, request = roles.asked[-1]
    assert (role, request.direction, request.drain_timeout) == (Role.GENRM, "in", 9)
    assert request.operation_id


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ({"state": ScaleState.NOOP, "ended": True}, 200),
        ({"state": ScaleState.REJECTED, "ended": True, "why": "below"}, 400),
        ({"state": ScaleState.CREATING}, 202),
    ],
)
async def test_the_status_says_how_far_it_is(
    client: httpx.AsyncClient, roles: Roles, answer: dict[str, Any], status: int
):
    roles.answer = answer
    got = await client.post("/rollout/scale_out", json={"num_replicas": 3}, headers=TOKEN)
    assert got.status_code == status


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ScaleRefused("CONFLICT: operation one is at work"), 409),
        (ScaleRefused("operation one asked for something else"), 409),
        (ScaleRefused("rollout shares its GPUs"), 400),
        (RuntimeError("nobody is there"), 503),
    ],
)
async def test_a_refusal_has_its_reason(
    client: httpx.AsyncClient, roles: Roles, error: Exception, status: int
):
    roles.error = error
    got = await client.post("/rollout/scale_in", json={"num_replicas": 3}, headers=TOKEN)
    assert got.status_code == status
    assert str(error) in got.json()["detail"]


@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer other"}, {"authorization": "secret"}]
)
async def test_without_the_token_nobody_is_asked(
    client: httpx.AsyncClient, roles: Roles, headers: dict[str, str]
):
    for method, path in (("POST", "/rollout/scale_out"), ("GET", "/rollout/scale_in/known")):
        got = await client.request(method, path, headers=headers)
        assert got.status_code == 401
        assert got.headers["www-authenticate"] == "Bearer"
    assert roles.asked == []


@pytest.mark.parametrize(
    "body", ["{", "[]", '{"replicas": 3}', '{"num_replicas": -1}', '{"request_id": "a b"}']
)
async def test_a_body_that_says_something_else_is_refused(
    client: httpx.AsyncClient, roles: Roles, body: str
):
    got = await client.post("/rollout/scale_out", content=body, headers=TOKEN)
    assert got.status_code == 400, got.text
    assert got.json()["detail"]
    assert roles.asked == []


async def test_a_body_that_is_too_long_is_refused(client: httpx.AsyncClient, roles: Roles):
    body = json.dumps({"engine_urls": ["http://x" * 10_000]})
    got = await client.post("/rollout/scale_in", content=body, headers=TOKEN)
    assert got.status_code == 413


async def test_an_operation_is_looked_up_by_its_id(client: httpx.AsyncClient, roles: Roles):
    known = await client.get("/teacher/scale_out/known", headers=TOKEN)
    assert (known.status_code, known.json()["request_id"]) == (200, "known")
    assert (await client.get("/rollout/scale_in/other", headers=TOKEN)).status_code == 404


async def test_other_routes_and_methods_are_as_they_were(client: httpx.AsyncClient):
    assert (await client.get("/rollout/generate")).status_code == 418
    assert (await client.post("/other/scale_out", headers=TOKEN)).status_code == 418
    wrong = await client.get("/rollout/scale_out", headers=TOKEN)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert (await client.post("/rollout/scale_out/known", headers=TOKEN)).status_code == 405


def test_an_empty_token_is_no_token(roles: Roles):
    with pytest.raises(ValueError, match="may not be empty"):
        with_operator_routes(plain, token="", ask=roles.ask, look=roles.look, recover=roles.recover)


RECOVER = "/rollout/recover_rollout_engines"


async def test_given_up_engines_get_another_try(client: httpx.AsyncClient, roles: Roles):
    done = await client.post(RECOVER, json={"request_id": "one", "timeout": 5}, headers=TOKEN)
    assert (done.status_code, done.json()["status"]) == (200, "READY")
    assert roles.recoveries == [(Role.ROLLOUT, "one", 5.0)]
    roles.recovered = None
    slow = await client.post(RECOVER, headers=TOKEN)
    assert (slow.status_code, slow.json()["status"]) == (202, "RECOVERING")
    assert slow.json()["request_id"] == roles.recoveries[-1][1]


@pytest.mark.parametrize(
    ("error", "status"), [(ScaleRefused("it is stopped"), 409), (RuntimeError("nobody"), 503)]
)
async def test_engines_that_cannot_be_tried_again_say_why(
    client: httpx.AsyncClient, roles: Roles, error: Exception, status: int
):
    roles.error = error
    got = await client.post(RECOVER, headers=TOKEN)
    assert got.status_code == status
    assert str(error) in got.json()["detail"]


async def test_only_the_operator_recovers_engines_and_only_with_a_body_that_is_known(
    client: httpx.AsyncClient, roles: Roles
):
    assert (await client.post(RECOVER)).status_code == 401
    assert (await client.get(RECOVER, headers=TOKEN)).status_code == 405
    for body in ({"force": True}, {"timeout": -1}, {"request_id": "a b"}):
        assert (await client.post(RECOVER, json=body, headers=TOKEN)).status_code == 400
    long = {"request_id": "x" * 70_000}
    assert (await client.post(RECOVER, json=long, headers=TOKEN)).status_code == 413
    assert roles.recoveries == []


@pytest.mark.parametrize("path", ["/rollout/scale_out", RECOVER])
async def test_a_body_that_does_not_come_is_408_and_one_that_leaves_is_nobodys(
    roles: Roles, path: str, caplog: pytest.LogCaptureFixture
):
    def guarded(app: App) -> App:
        return with_operator_routes(
            app,
            token="secret",
            ask=roles.ask,
            look=roles.look,
            recover=roles.recover,
            body_timeout=0.2,
        )

    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer secret\r\n"
    begun = head.encode() + b"content-length: 20\r\n\r\n{"
    async with gateway(wrap=guarded) as front:
        raw = await by_hand(front.port, begun)
        assert (status_of(raw), b"connection: close" in raw) == (408, True)
        _, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(begun)
        await until(lambda: len(front.connections) == 1)
        writer.transport.abort()
        await until(lambda: not front.connections)
    assert (roles.asked, roles.recoveries) == ([], [])
    assert "does not answer" not in caplog.text
    assert not [record for record in caplog.records if path in record.getMessage()]
