"""The operator's routes, for the OpenAPI description."""

from collections.abc import Iterable
from typing import Any

from relax_infer.discovery import Role

_Json = dict[str, Any]

_ID = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"}
_SECONDS = {"type": "number", "exclusiveMinimum": 0}
_ERRORS = {
    400: "The request is at fault, or the role refuses it; the detail says why",
    401: "The operator's token is needed",
    404: "No such operation is remembered",
    409: "Another operation is at work, or the id was used for something else",
    413: "The request body is too large",
    431: "The request head is too large",
    503: "The role does not answer",
}


def operator_paths(roles: Iterable[Role]) -> _Json:
    """Of a gateway whose environment names a token; without one they answer 404."""
    paths: _Json = {}
    for role in roles:
        for direction in ("out", "in"):
            path = f"/{role}/scale_{direction}"
            paths[path] = {"post": _scale(role, direction)}
            paths[f"{path}/{{request_id}}"] = {"get": _look(role, direction)}
        if role is Role.ROLLOUT:
            paths["/rollout/recover_rollout_engines"] = {"post": _recover()}
    return paths


def operator_schemas() -> _Json:
    urls = {"type": "array", "items": {"type": "string"}, "maxItems": 64}
    scale = {
        "request_id": _ID,
        "model": {"type": ["string", "null"]},
        "num_replicas": {"type": ["integer", "null"], "minimum": 0},
        "engine_urls": urls,
        "on_partial": {"enum": ["keep", "rollback_all"]},
        "force": {"type": "boolean"},
        "dry_run": {"type": "boolean"},
        "timeout": _SECONDS,
    }
    waits = {"type": "number", "minimum": 0, "maximum": 600}
    text = {"type": ["string", "null"]}
    operation = {
        "request_id": _ID,
        "status": {"type": "string"},
        "ended": {"type": "boolean"},
        "why": text,
        "replicas": {"type": "array", "items": {"type": "object"}},
    }
    recovered = {
        "request_id": _ID,
        "role": {"type": "string"},
        "status": {"type": "string"},
        "why": text,
    }
    return {
        "Scale": _object(scale, closed=True),
        "ScaleOperation": _object(operation) | {"required": ["request_id", "status", "ended"]},
        "Recover": _object({"request_id": _ID, "timeout": waits}, closed=True),
        "Recovered": _object(recovered, closed=True) | {"required": [*recovered]},
    }


SECURITY: _Json = {"operator": {"type": "http", "scheme": "bearer"}}


def _scale(role: Role, direction: str) -> _Json:
    ended = _answer("It has ended", "ScaleOperation")
    taken = _answer("It was taken in, or is at work", "ScaleOperation")
    return {
        **_head(f"{role}_scale_{direction}", f"Scale {role} {direction}"),
        "requestBody": _body("Scale"),
        "responses": {"200": ended, "202": taken, **_errors(400, 401, 409, 413, 431, 503)},
    }


def _look(role: Role, direction: str) -> _Json:
    name = {"name": "request_id", "in": "path", "required": True, "schema": _ID}
    return {
        **_head(f"{role}_scale_{direction}_look", f"How a scale_{direction} of {role} stands"),
        "parameters": [name],
        "responses": {
            "200": _answer("The operation", "ScaleOperation"),
            **_errors(400, 401, 404, 431, 503),
        },
    }


def _recover() -> _Json:
    summary = "Give policy engines that were given up another try"
    return {
        **_head("rollout_recover_rollout_engines", summary),
        "requestBody": _body("Recover"),
        "responses": {
            "200": _answer("How the engines are now", "Recovered"),
            "202": _answer("It is at work; the same request_id waits for it again", "Recovered"),
            **_errors(400, 401, 409, 413, 431, 503),
        },
    }


def _head(name: str, summary: str) -> _Json:
    return {
        "operationId": name,
        "tags": ["operator"],
        "summary": summary,
        "security": [{"operator": []}],
    }


def _body(schema: str) -> _Json:
    return {"content": {"application/json": {"schema": _ref(schema)}}}


def _answer(description: str, schema: str) -> _Json:
    return {
        "description": description,
        "content": {"application/json": {"schema": _ref(schema)}},
    }


def _errors(*statuses: int) -> _Json:
    return {str(status): _answer(_ERRORS[status], "Error") for status in statuses}


def _ref(name: str) -> _Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(properties: _Json, *, closed: bool = False) -> _Json:
    made: _Json = {"type": "object", "properties": properties}
    return made | {"additionalProperties": False} if closed else made
