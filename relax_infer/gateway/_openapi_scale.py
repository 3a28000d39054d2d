"""The operator's routes in the OpenAPI description."""

from typing import Any

from pydantic.json_schema import models_json_schema

from relax_infer.contracts.scale import ScaleStatus
from relax_infer.discovery import Role
from relax_infer.gateway.operator import OPERATION_ID, ScaleBody

_Json = dict[str, Any]
_REF = "#/components/schemas/{model}"
_DIRECTIONS = {"out": "More replicas of a model", "in": "Fewer replicas of a model"}
_ERRORS = {
    400: "Not a request to scale, or the role refuses it",
    401: "The operator's token was not shown",
    404: "No such operation is remembered, or the gateway was given no operator's token",
    409: "Another operation is at work, or the id was used for something else",
    413: "The request body is too large",
    431: "The request head is too large",
    503: "The role does not answer",
}


def scale_paths(role: Role) -> dict[str, _Json]:
    """Both directions, and how an operation stands."""
    paths: dict[str, _Json] = {}
    for direction, summary in _DIRECTIONS.items():
        name = f"{role}_scale_{direction}"
        path = f"/{role}/scale_{direction}"
        body = {"application/json": {"schema": {"$ref": "#/components/schemas/ScaleBody"}}}
        paths[path] = {
            "post": _operation(role, name, summary)
            | {
                "requestBody": {"required": True, "content": body},
                "responses": {
                    "200": _answer("Ended, or what would be done", "Operation"),
                    "202": _answer("Taken in", "Operation"),
                    **_errors(400, 401, 404, 409, 413, 431, 503),
                },
            }
        }
        operation_id = {
            "name": "request_id",
            "in": "path",
            "required": True,
            "schema": {"type": "string", "pattern": f"^{OPERATION_ID}$"},
        }
        paths[f"{path}/{{request_id}}"] = {
            "get": _operation(role, f"{name}_status", "How an operation stands")
            | {
                "parameters": [operation_id],
                "responses": {
                    "200": _answer("As it stands, or ended", "Operation"),
                    **_errors(400, 401, 404, 431, 503),
                },
            }
        }
    return paths


def scale_schemas() -> dict[str, _Json]:
    """The body, and the status of an operation as it is told."""
    models = [(ScaleBody, "validation"), (ScaleStatus, "serialization")]
    _, document = models_json_schema(models, ref_template=_REF)  # type: ignore[arg-type]
    schemas: dict[str, _Json] = dict(document["$defs"])
    told = schemas.pop("ScaleStatus")
    names = {"operation_id": "request_id", "state": "status"}
    told["properties"] = {names.get(k, k): v for k, v in told["properties"].items()}
    told["required"] = [names.get(name, name) for name in told["required"]]
    refused = told | {
        "properties": told["properties"] | {"detail": {}},
        "required": [*told["required"], "detail"],
    }
    return schemas | {"Operation": told, "Rejected": refused}


def _operation(role: Role, name: str, summary: str) -> _Json:
    security = [{"operator": list[str]()}]
    return {"operationId": name, "tags": [role.value], "summary": summary, "security": security}


def _errors(*statuses: int) -> _Json:
    answers = {str(status): _answer(_ERRORS[status], "Error") for status in statuses}
    if "401" in answers:
        answers["401"]["headers"] = {"WWW-Authenticate": {"schema": {"type": "string"}}}
    if "400" in answers and "409" in answers:
        either = [{"$ref": f"#/components/schemas/{name}"} for name in ("Error", "Rejected")]
        answers["400"]["content"] = {"application/json": {"schema": {"oneOf": either}}}
    return answers


def _answer(description: str, schema: str) -> _Json:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {"description": description, "content": content}
