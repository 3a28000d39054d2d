"""The committed description against a running gateway: no 500, no status that is not in it.

What is tried follows from the description, so a route or status that it does not name is found.
"""

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from aiohttp import web
from schemathesis.checks import CHECKS, load_all_checks, not_a_server_error

from relax_infer.discovery import Role
from relax_infer.gateway._asgi import App
from relax_infer.gateway.operator import with_operator_routes
from relax_infer.security import Caller, Callers
from tests.gateway.asking import ask
from tests.gateway.in_thread import InThread, running
from tests.gateway.test_judge import TEMPLATE, save_tokenizer
from tests.gateway.test_operator import TOKEN, Roles

DESCRIPTION = Path(__file__).parents[2] / "docs" / "openapi.json"
load_all_checks()
NAMES = (
    *("status_code_conformance", "content_type_conformance", "response_schema_conformance"),
    *("response_headers_conformance", "unsupported_method", "allow_header_conformance"),
)
RULES = [not_a_server_error, *(CHECKS.get_one(name) for name in NAMES)]
schema = schemathesis.openapi.from_path(str(DESCRIPTION))


async def answer(request: web.Request, payload: dict[str, Any]) -> web.StreamResponse:
    if payload.get("stream") is True:
        return web.Response(text="data: [DONE]\n\n", content_type="text/event-stream")
    return web.json_response({"text": "yes"})


def operated(app: App) -> App:
    roles = Roles()
    return with_operator_routes(
        app, token="secret", ask=roles.ask, look=roles.look, recover=roles.recover
    )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InThread]:
    folder = tmp_path_factory.mktemp("judge")
    save_tokenizer(folder, TEMPLATE)
    with running(answer, tokenizers={"m": str(folder)}, wrap=operated) as front:
        yield front


def caller(name: str, *roles: str, rate: float | None = None) -> Caller:
    digest = hashlib.sha256(f"token-of-{name}".encode()).digest()
    return Caller(name, digest, frozenset(roles), rate)


@pytest.fixture(scope="module")
def guarded() -> Iterator[InThread]:
    """It asks for tokens: ``rollout``'s is of another role than the routes', ``slow``'s has had its
    one request of the day."""
    every = [role.value for role in Role]
    known = [caller(role, *{*every} - {role}) for role in every]
    slow = caller("slow", *every, rate=1e-5)
    slow.wait(time.monotonic())
    with running(answer, {}, wrap=operated, callers=Callers([*known, slow])) as front:
        yield front


OPERATIONS = [
    (path, method, operation)
    for path, methods in json.loads(DESCRIPTION.read_text())["paths"].items()
    for method, operation in methods.items()
]


@pytest.mark.parametrize(("path", "method", "operation"), OPERATIONS, ids=lambda v: str(v)[:40])
async def test_who_is_turned_away_is_told_as_the_description_says(
    path: str, method: str, operation: dict[str, Any], guarded: InThread
) -> None:
    named = operation["responses"]
    role = path.split("/")[1]
    url = guarded.url + path.replace("{request_id}", "monday")
    expected: dict[str, dict[str, str]] = {}
    if path != "/healthz":
        expected["401"] = {}
    if "operator" not in operation.get("tags", ()) and role in list(Role):
        expected["403"] = {"authorization": f"Bearer token-of-{role}"}
        if method == "post":
            expected["429"] = {"authorization": "Bearer token-of-slow"}
    for status, headers in expected.items():
        given = await ask(method.upper(), url, {"text": "x"} if method == "post" else None, headers)
        assert (str(given.status), status in named) == (status, True)
        assert set(given.json) == {"detail"}
        for header, what in named[status].get("headers", {}).items():
            assert what["schema"]["type"] == "string"
            assert given.headers[header]
    assert {"401", "403", "429"} & set(named) == set(expected)


@schema.parametrize()
@hypothesis.settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
def test_whatever_the_description_allows_or_forbids_is_answered_as_it_says(
    case: Any, served: InThread
) -> None:
    follows(case, served)


def follows(case: Any, served: InThread) -> None:
    answer = case.call_and_validate(base_url=served.url, checks=RULES, headers=TOKEN)
    # "default" stands for errors of a backend, and this backend makes none.
    named = case.operation.definition.raw["responses"].keys() - {"default"}
    assert str(answer.status_code) in named | {"405"}, answer.text


@pytest.mark.wide
@pytest.mark.timeout(1800)
@schema.parametrize()
@hypothesis.settings(
    max_examples=700,
    deadline=None,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
def test_a_thousand_times_each_operation(case: Any, served: InThread) -> None:
    follows(case, served)
