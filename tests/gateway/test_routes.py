"""Contract 4.5, 4.6 and 4.10: which routes there are, and what the read routes answer."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from relax_infer.discovery import InferenceRegistry, ModelSnapshot, ReplicaSnapshot, Role
from relax_infer.gateway import openapi
from relax_infer.gateway.routes import routes_of
from tests.gateway.asking import ask, get
from tests.gateway.fakes import engine, gateway, registry
from tests.gateway.test_gateway import echo

DATA = ("/generate", "/chat/completions", "/v1/chat/completions")
READS = ("/v1/models", "/engines", "/health")
PUBLIC = {
    *((role, "POST", path) for role in Role for path in DATA),
    *((role, "GET", path) for role in Role for path in READS),
    (Role.GENRM, "GET", "/metrics"),
}
CONTROL = (
    *(
        "/activate",
        "/offload",
        "/onload",
        "/commit",
        "/abort_request",
        "/release_memory_occupation",
    ),
    *("/update_weights_from_disk", "/registry", "/flush_cache"),
)


def test_the_table_has_the_contract_s_routes_and_no_others() -> None:
    table = {(role, route.method, route.path) for role in Role for route in routes_of(role)}
    assert table == PUBLIC


async def test_every_route_answers_its_method_and_refuses_the_others() -> None:
    async with gateway() as front, engine(echo) as upstream:
        for role in Role:
            front.publish(role, upstream.url, served_model_name="served")
        for role, method, path in sorted(PUBLIC):
            url = f"{front.url}/{role}{path}"
            payload = {"text": "x"} if path == "/generate" else {"messages": []}
            answer = await ask(method, url, payload if method == "POST" else None)
            assert answer.status == 200, (role, path, answer.body)
            for other in {"GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"} - {method}:
                refused = await ask(other, url)
                assert refused.status == 405
                assert method in refused.headers["Allow"]
            if method == "GET":
                head = await ask("HEAD", url)
                assert (head.status, head.body) == (200, b"")
                if path != "/metrics":
                    assert head.headers["Content-Length"] == answer.headers["Content-Length"]


async def test_there_is_no_public_way_to_onload_offload_or_commit() -> None:
    async with gateway() as front:
        for role, path, method in itertools.product(Role, CONTROL, ("GET", "POST", "PUT")):
            assert (await ask(method, f"{front.url}/{role}{path}")).status == 404
        for path in ("/generate", "//rollout/generate", "/rollout/generate/", "/worker/generate"):
            assert (await ask("POST", front.url + path, {"text": "x"})).status == 404


async def test_a_gateway_of_one_role_serves_no_other() -> None:
    async with gateway(roles=["teacher"]) as front:
        assert (await get(f"{front.url}/rollout/health")).status == 404
        assert (await get(f"{front.url}/teacher/health")).status == 200
        paths = (await get(f"{front.url}/openapi.json")).json["paths"]
        assert {path.split("/")[1] for path in paths} == {
            *("teacher", "healthz", "metrics", "openapi.json"),
        }


async def test_the_description_is_the_committed_file_and_names_every_route() -> None:
    committed = json.loads((Path(__file__).parents[2] / "docs" / "openapi.json").read_text())
    async with gateway() as front:
        assert (await get(f"{front.url}/openapi.json")).json == committed
    described = {
        (method.upper(), path) for path, entry in committed["paths"].items() for method in entry
    }
    process = {("GET", path) for path in ("/healthz", "/metrics", "/openapi.json")}
    scaling = {
        (method, f"/{role}/scale_{direction}{operation}")
        for role in Role
        for direction in ("out", "in")
        for method, operation in (("POST", ""), ("GET", "/{request_id}"))
    } | {("POST", "/rollout/recover_rollout_engines")}
    public = {(method, f"/{role}{path}") for role, method, path in PUBLIC}
    assert described == public | process | scaling
    assert openapi.document() == committed


async def test_models_lists_every_model_also_those_that_sleep() -> None:
    models = [
        ModelSnapshot(model_id=name, state=state, route_mode="DIRECT")
        for name, state in (("b", "SLEEPING"), ("a", "READY"))
    ]
    async with gateway() as front:
        unknown = await get(f"{front.url}/teacher/v1/models")
        assert (unknown.status, unknown.headers["Retry-After"]) == (503, "1")
        front.intake.offer("teacher", 1, InferenceRegistry("teacher", "e").publish(models))
        listed = await get(f"{front.url}/teacher/v1/models")
    assert listed.json == {
        "object": "list",
        "data": [
            {"id": name, "object": "model", "created": 0, "owned_by": "teacher"} for name in "ab"
        ],
    }


@pytest.mark.parametrize("role", Role)
async def test_engines_without_a_registry_is_503_and_an_unknown_schema_400(role: Role) -> None:
    async with gateway() as front:
        url = f"{front.url}/{role}/engines"
        assert (await get(url)).status == 503
        for query in ("schema=3", "schema=", "schema=2&schema=1", "schema=two"):
            refused = await get(f"{url}?{query}")
            assert (refused.status, refused.detail) == (400, "Unsupported discovery schema")
        many = "&".join(f"x{n}=1" for n in range(200))
        assert (await get(f"{url}?{many}")).status == 400


async def test_only_rollout_has_the_old_discovery() -> None:
    async with gateway() as front:
        for role in Role:
            front.publish(role, "http://engine:1")
            status = (await get(f"{front.url}/{role}/engines?schema=1")).status
            assert status == (200 if role is Role.ROLLOUT else 400)


async def test_the_old_discovery_names_rank_status_and_url_and_nothing_else() -> None:
    engines = [
        ReplicaSnapshot(engine_id="m/group-0/replica-0", base_url="http://a:1", state="READY",
                        direct_eligible=False),
        ReplicaSnapshot(engine_id="m/group-0/replica-1", base_url=None, state="STARTING",
                        direct_eligible=False),
        ReplicaSnapshot(engine_id="m/group-0/replica-2", base_url="http://c:1", state="FAILED",
                        direct_eligible=False),
    ]  # fmt: skip
    async with gateway() as front:
        front.publish("rollout", engines=engines, route_mode="SGLANG_ROUTER")
        document = (await get(f"{front.url}/rollout/engines?schema=1")).json
    listed = [
        {"rank": 0, "status": "active", "url": "http://a:1"},
        {"rank": 2, "status": "dead", "url": "http://c:1"},
    ]
    assert document["total_engines"] == 2
    assert document["models"]["m"]["total_engines"] == 2
    assert document["models"]["m"]["engine_groups"] == [
        {"worker_type": "regular", "engines": listed}
    ]


async def test_engines_is_not_sent_again_to_whoever_has_it() -> None:
    async with gateway() as front:
        front.publish("genrm", "http://engine:1")
        url = f"{front.url}/genrm/engines?schema=2"
        first = await get(url)
        tag = first.headers["ETag"]
        assert tag == '"epoch-1"'
        for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
            same = await get(url, {"If-None-Match": known})
            assert (same.status, same.body, same.headers["ETag"]) == (304, b"", tag)
        for other in ('"epoch-0"', '"epoch"', "epoch-1", ""):
            assert (await get(url, {"If-None-Match": other})).status == 200
        newer = registry("genrm", "http://engine:2") | {"topology_revision": 2}
        front.intake.offer("genrm", 1, newer)
        after = await get(url, {"If-None-Match": tag})
        assert (after.status, after.headers["ETag"], after.json) == (200, '"epoch-2"', newer)
        assert (await get(f"{url}&model_name=x", {"If-None-Match": '"epoch-2"'})).status == 404


async def test_an_epoch_that_no_header_can_hold_still_makes_an_etag() -> None:
    document = registry("genrm", "http://engine:1") | {"registry_epoch": 'a"b\nß%'}
    async with gateway() as front:
        front.intake.offer("genrm", 1, document)
        tag = (await get(f"{front.url}/genrm/engines")).headers["ETag"]
        assert tag == '"a%22b%0A%C3%9F%25-1"'
        again = await get(f"{front.url}/genrm/engines", {"If-None-Match": tag})
        assert again.status == 304


async def test_the_judge_s_old_health_is_the_default_and_the_new_one_is_asked_for() -> None:
    async with gateway() as front:
        url = f"{front.url}/genrm/health"
        assert (await get(url)).json == {"status": "unhealthy", "service": "genrm"}
        front.publish("genrm", "http://127.0.0.1:9")
        old = (await get(url)).json
        assert old == {"status": "healthy", "service": "genrm"}
        assert (await get(f"{url}?schema=1")).json == old
        assert (await get(f"{url}?schema=2")).json["schema_version"] == 2
        refused = await get(f"{url}?schema=3")
        assert (refused.status, refused.detail) == (400, "Unsupported health schema")
        models = [
            ModelSnapshot(model_id=n, state=s, route_mode="DIRECT", engines=[_ready(n)])
            for n, s in (("a", "READY"), ("b", "SLEEPING"))
        ]
        front.intake.offer("genrm", 2, InferenceRegistry("genrm", "f").publish(models))
        assert (await get(url)).json == {
            "status": "unhealthy",
            "service": "genrm",
            "instances": {"a": {"status": "healthy"}, "b": {"status": "unhealthy"}},
        }


def _ready(name: str) -> ReplicaSnapshot:
    return ReplicaSnapshot(
        engine_id=name, base_url="http://127.0.0.1:9", state="READY", direct_eligible=True
    )


@pytest.mark.parametrize("role", ["rollout", "teacher"])
async def test_the_other_roles_have_one_health(role: str) -> None:
    async with gateway() as front:
        assert (await get(f"{front.url}/{role}/health")).json["role"] == role
        assert (await get(f"{front.url}/{role}/health?schema=1")).status == 400


async def test_reads_contact_no_engine() -> None:
    async def fail(request: Any, payload: Any) -> Any:
        raise AssertionError

    async with gateway() as front, engine(fail) as upstream:
        front.publish("genrm", upstream.url)
        for path in ("/health", "/health?schema=2", "/engines", "/v1/models", "/metrics"):
            assert (await get(f"{front.url}/genrm{path}")).status == 200
        assert upstream.gets == []


async def test_a_policy_of_affinity_does_not_fail_health() -> None:
    document = registry("teacher", "http://engine:1")
    document["routing"]["policy"] = "affinity"
    async with gateway() as front:
        front.intake.offer("teacher", 1, document)
        health = (await get(f"{front.url}/teacher/health")).json
        assert health["ready"] is True
        refused = await ask("POST", f"{front.url}/teacher/generate", {"text": "x"})
        assert (refused.status, "affinity key" in refused.detail) == (400, True)
