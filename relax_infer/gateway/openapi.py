"""The OpenAPI description of the public routes: ``python -m relax_infer.gateway.openapi FILE``.

Written from the route table. A test fails when the committed file differs, and another asks a
running gateway everything that the file allows.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from relax_infer.discovery import Role
from relax_infer.gateway._operator_openapi import SECURITY, operator_paths, operator_schemas
from relax_infer.gateway.routes import (
    ENGINES_SCHEMAS,
    HEALTH_SCHEMAS,
    Kind,
    RoleRoute,
    routes_of,
)

_Json = dict[str, Any]

_SUMMARIES: dict[Kind, str] = {
    "generate": "One request to the engine's own /generate, or messages to a judge",
    "chat": "One OpenAI chat request",
    "models": "Every model of the registry, also those that sleep",
    "engines": "The role's discovery document",
    "health": "Which models could be called now; contacts no engine",
    "metrics": "The role's counters, for Prometheus",
}
_ERRORS = {
    400: "The request is at fault; no backend was asked",
    401: "With tokens: none was shown, or one that is not known",
    403: "With tokens: this caller may not ask this role",
    404: "No such model",
    408: "The request did not come in time",
    413: "The request body is too large",
    429: "With tokens: more than this caller may; Retry-After says when to ask again",
    431: "The request head is too large",
    502: "The backend broke off, or answered something else than JSON",
    503: "Nothing may be called at the moment; Retry-After says when to ask again, and where it is"
    " not there, the gateway was stopped before the answer came",
    504: "The deadline passed; the backend was told to stop",
}
_AGAIN = {"Retry-After": {"schema": {"type": "string"}}}
_CHALLENGE = {"WWW-Authenticate": {"schema": {"type": "string"}}}
_TOKEN: list[_Json] = [{}, {"token": []}]
"""Asked for only where the gateway was given tokens."""
_HELD_BACK = ("x-request-id", "traceparent")


def document(roles: Iterable[Role] = tuple(Role)) -> _Json:
    """OpenAPI 3.1."""
    paths: dict[str, _Json] = {
        "/healthz": {"get": _process("health", "The process answers", _free_object())},
        "/metrics": {"get": _metrics("metrics", "All counters, for Prometheus")},
        "/openapi.json": {"get": _guarded(_process("openapi", "This document", _free_object()))},
    }
    roles = tuple(roles)
    for role in roles:
        for route in routes_of(role):
            operation = _operation(role, route) | {"security": _TOKEN}
            paths[f"/{role}{route.path}"] = {route.method.lower(): operation}
    paths |= operator_paths(roles)
    schemas = _schemas() | operator_schemas()
    security = {"token": {"type": "http", "scheme": "bearer"}} | SECURITY
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "relax-infer gateway",
            "version": "2",
            "description": "Rollout, GenRM and Teacher behind one address. A POST is sent to a"
            ' backend at most once; error answers are {"detail": ...}. The routes of an operator'
            " are there only where the gateway was given the operator's token.",
        },
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": security},
    }


def _operation(role: Role, route: RoleRoute) -> _Json:
    operation: _Json = {
        "operationId": f"{role}{route.path}".replace("/", "_"),
        "tags": [role.value],
        "summary": _SUMMARIES[route.kind],
    }
    match route.kind:
        case "generate":
            schema = "GenerateOrJudge" if role is Role.GENRM else "Generate"
            answer = {"oneOf": [_object(), {"type": "array"}]}
            return operation | _data(schema, answer)
        case "chat":
            return operation | _data("Chat", _object())
        case "models":
            responses = {"200": _json_answer("The list", _ref("Models")), **_errors(400, 401, 403)}
            return operation | {"responses": responses | _errors(431, 503)}
        case "engines":
            return operation | _engines(ENGINES_SCHEMAS[role])
        case "health":
            return operation | _health(HEALTH_SCHEMAS[role])
        case "metrics":
            counters = _metrics("", "")["responses"]
            return operation | {"responses": counters | _errors(403)}


def _data(schema: str, answer: _Json) -> _Json:
    streamed: _Json = {"text/event-stream": {}}
    ok = _json_answer("The backend's answer, unchanged", answer)
    ok["content"] |= streamed
    headers = [_header(name, "Passed on to the backend") for name in _HELD_BACK]
    affinity = _header("X-SMG-Routing-Key", "Requests with the same key go to the same replica")
    return {
        "parameters": [affinity, *headers],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _ref(schema)}},
        },
        "responses": {
            "200": ok,
            **_errors(400, 401, 403, 408, 413, 429, 431, 502, 503, 504),
            "default": _json_answer("An error status of the backend, kept", _ref("Error")),
        },
    }


def _engines(schemas: tuple[str, ...]) -> _Json:
    found = _ref("Registry") if len(schemas) == 1 else {"oneOf": [_ref("Registry"), _ref("Legacy")]}
    ok = _json_answer("The document", found)
    ok["headers"] = {"ETag": {"schema": {"type": "string"}}}
    named = _query("model_name", {"type": "string"}, "404 unless the registry has this model")
    known = _header("If-None-Match", "An ETag that the caller holds")
    return {
        "parameters": [_schema_query(schemas), named, known],
        "responses": {
            "200": ok,
            "304": {"description": "What the caller holds is current"},
            **_errors(400, 401, 403, 404, 431, 503),
        },
    }


def _health(schemas: tuple[str, ...]) -> _Json:
    found = _ref("Health") if len(schemas) == 1 else {"oneOf": [_ref("Health"), _ref("OldHealth")]}
    return {
        "parameters": [_schema_query(schemas)],
        "responses": {"200": _json_answer("Health", found), **_errors(400, 401, 403, 431)},
    }


def _process(name: str, summary: str, answer: _Json) -> _Json:
    responses = {"200": _json_answer(summary, answer), **_errors(400, 431)}
    return {"operationId": name, "tags": ["process"], "summary": summary, "responses": responses}


def _guarded(operation: _Json) -> _Json:
    """Asked for a token, if there are any."""
    return operation | {
        "security": _TOKEN,
        "responses": operation["responses"] | _errors(401),
    }


def _metrics(name: str, summary: str) -> _Json:
    text = {"text/plain": {"schema": {"type": "string"}}}
    responses = {"200": {"description": "Counters", "content": text}, **_errors(400, 431)}
    return _guarded(
        {"operationId": name, "tags": ["process"], "summary": summary, "responses": responses}
    )


def _errors(*statuses: int) -> _Json:
    answers = {str(status): _json_answer(_ERRORS[status], _ref("Error")) for status in statuses}
    for status in answers.keys() & {"429", "503"}:
        answers[status]["headers"] = _AGAIN
    if "401" in answers:
        answers["401"]["headers"] = _CHALLENGE
    return answers


def _json_answer(description: str, schema: _Json) -> _Json:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _schema_query(schemas: tuple[str, ...]) -> _Json:
    schema = {"type": "string", "enum": sorted(schemas), "default": schemas[0]}
    return _query("schema", schema, "Which document")


def _query(name: str, schema: _Json, description: str) -> _Json:
    return {"name": name, "in": "query", "schema": schema, "description": description}


def _header(name: str, description: str) -> _Json:
    schema = {"type": "string", "minLength": 1}
    return {"name": name, "in": "header", "schema": schema, "description": description}


def _ref(name: str) -> _Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(**properties: _Json) -> _Json:
    return {"type": "object", "properties": properties} if properties else {"type": "object"}


def _free_object() -> _Json:
    return {"type": "object", "additionalProperties": True}


def _closed(required: tuple[str, ...] = (), **properties: _Json) -> _Json:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required or properties),
        "additionalProperties": False,
    }


def _schemas() -> _Json:
    text, optional = {"type": "string"}, {"type": ["string", "null"], "minLength": 1}
    ids = {"oneOf": [text, {"type": "array", "items": text}]}
    selectors = {
        "model": optional,
        "route_key": optional,
        "rid": ids,
        "stream": {"type": "boolean"},
    }
    raw = _object(**selectors, input_ids={"type": "array"}, text=ids, sampling_params=_object())
    messages = {"type": "array", "items": _object()}
    judge = _object(
        **selectors | {"stream": {"const": False}},
        messages=messages,
        sampling_params={"type": ["object", "null"]},
    )
    either = {"anyOf": [{"required": ["input_ids"]}, {"required": ["text"]}]}
    generate = raw | either | {"not": {"required": ["messages"]}}
    whole = {"type": "integer", "minimum": 0}
    replica = _closed(
        engine_id=text,
        base_url=optional,
        state=text,
        direct_eligible={"type": "boolean"},
        generation=whole,
    )
    model = _closed(
        model_id=text,
        state=text,
        route_mode={"enum": ["DIRECT", "SGLANG_ROUTER"]},
        router_url=optional,
        engines={"type": "array", "items": replica},
        weight_source={"enum": ["STATIC", "ACTOR", "DCS"]},
        weight_version=optional,
        capabilities={"type": "array", "items": text},
        served_model_name=optional,
    )
    names = {"type": "object", "additionalProperties": text}
    routing = _closed(
        default_model=optional,
        route_key_map=names,
        aliases=names,
        policy={"enum": ["round_robin", "affinity"]},
        policy_revision=whole,
    )
    old_engine = _closed(rank=whole, status={"enum": ["active", "dead"]}, url=text)
    old_group = _closed(
        worker_type={"const": "regular"},
        engines={"type": "array", "items": old_engine},
    )
    old_model = _closed(
        router_ip={"type": ["string", "null"]},
        router_port={"type": ["integer", "null"]},
        engine_groups={"type": "array", "items": old_group},
        total_engines=whole,
    )
    listed = _closed(id=text, object={"const": "model"}, created={"const": 0}, owned_by=text)
    word = {"enum": ["healthy", "unhealthy"]}
    return {
        "Error": _closed(detail={"description": "What is wrong, in words or as the backend said"}),
        "Generate": generate,
        "GenerateOrJudge": {"oneOf": [generate, judge | {"required": ["messages"], "not": either}]},
        "Chat": _object(**selectors, messages=messages) | {"required": ["messages"]},
        "Models": _closed(object={"const": "list"}, data={"type": "array", "items": listed}),
        "Registry": _closed(
            schema_version={"const": 2},
            role=text,
            registry_epoch=text,
            topology_revision=whole,
            routing=routing,
            models={"type": "object", "additionalProperties": model},
        ),
        "Legacy": _closed(
            models={"type": "object", "additionalProperties": old_model}, total_engines=whole
        ),
        "Health": _closed(
            schema_version={"const": 2},
            role=text,
            gateway_alive={"const": True},
            registry_available={"type": "boolean"},
            ready={"type": "boolean"},
            models={
                "type": "object",
                "additionalProperties": _closed(state=text, ready={"type": "boolean"}),
            },
        ),
        "OldHealth": _closed(
            ("status", "service"),
            status=word,
            service={"const": "genrm"},
            instances={"type": "object", "additionalProperties": _closed(status=word)},
        ),
    }


def page() -> str:
    """The committed file."""
    return json.dumps(document(), indent=1) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
