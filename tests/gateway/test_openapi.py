"""The committed description against a running gateway: no 500, no status that is not in it.

What is tried follows from the description, so a route or status that it does not name is found.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from aiohttp import web
from schemathesis.checks import CHECKS, load_all_checks, not_a_server_error

from relax_infer.gateway._asgi import App
from relax_infer.gateway.operator import with_operator_routes
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


@pytest.mark.slow
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
