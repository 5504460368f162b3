"""The OpenAPI document, made from the route table and the bodies' pydantic models."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any

from pydantic.json_schema import models_json_schema

from routes.bodies import Body, Fields
from routes.reply import JSON, SSE, native_error
from routes.route import Route
from rwkv_batch.errors import ErrorKind

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {"type": "string", "description": "Names the field, the limit, the value and the remedy."},
        "field": {"type": "string"},
        "given": {"description": "The value that was refused."},
    },
}
_EVENT = {
    "type": "object",
    "description": "One event of a stream; the last one's data is [DONE].",
    "required": ["data"],
    "properties": {"data": {"type": "string"}},
}
_OPENAI_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "description": "Names the field, the limit, the value and the remedy."},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field at fault."},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ERRORS = {
    ErrorKind.NOT_JSON: "The body is not JSON, or not whole.",
    ErrorKind.UNAUTHORIZED: "Wrong or missing password.",
    ErrorKind.MODEL_NOT_FOUND: "No model of that name is served.",
    ErrorKind.SESSION_NOT_FOUND: "No such session or dialogue, or it was deleted meanwhile.",
    ErrorKind.SESSION_BUSY: "Another turn of the session runs and `wait` is false.",
    ErrorKind.SESSION_UNUSABLE: "The session is of another model, or damaged.",
    ErrorKind.BODY_TOO_LARGE: "The body is too large.",
    ErrorKind.INVALID_FIELD: "A field is wrong.",
    ErrorKind.OVERLOADED: "Overloaded; see Retry-After.",
    ErrorKind.DRAINING: "The service is shutting down.",
    ErrorKind.ENGINE_LOST: "The engine is away; try again in a moment.",
    ErrorKind.TIMEOUT: "Timed out.",
}
_OF_BODIES = (ErrorKind.NOT_JSON, ErrorKind.BODY_TOO_LARGE, ErrorKind.INVALID_FIELD)
_OF_WORK = (ErrorKind.OVERLOADED, ErrorKind.DRAINING, ErrorKind.ENGINE_LOST)


def openapi_document(routes: Iterable[Route]) -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    routes = tuple(routes)
    bodies: list[type[Body]] = sorted({route.body for route in routes if route.body}, key=lambda body: body.__name__)
    _, schemas = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "RWKV-7 batch inference", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": {**schemas.get("$defs", {}), "Error": _ERROR, "OpenAIError": _OPENAI_ERROR},
            "securitySchemes": {"password": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route) -> dict[str, Any]:
    good: dict[str, Any] = {route.content_type: {}}
    if route.streams:
        good[SSE] = {"schema": _EVENT}
    responses: dict[str, Any] = {"200": {"description": "Success.", "content": good}}
    error = "Error" if route.error_body is native_error else "OpenAIError"
    for status, text in _errors(route).items():
        schema = {"$ref": f"#/components/schemas/{error}"}
        responses[status] = {"description": text, "content": {JSON: {"schema": schema}}}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "description": inspect.getdoc(route.handle) or "",
        "operationId": route.method.lower() + re.sub(r"[/.{}]+", "_", route.path).rstrip("_"),
        "responses": responses,
    }
    if not route.is_public:
        operation["security"] = [{"password": []}, {}]
    if route.body is not None:
        content: dict[str, Any] = {"schema": {"$ref": f"#/components/schemas/{route.body.__name__}"}}
        if route.example is not None:
            content["example"] = route.example
        operation["requestBody"] = {"required": True, "content": {JSON: content}}
    if route.query is not None:
        operation["parameters"] = _parameters(route.path, route.query, route.example or {})
    if route.uploads:
        file = {"schema": {"type": "string", "format": "binary"}}
        operation["requestBody"] = {"required": True, "content": {route.uploads: file}}
    return operation


def _parameters(path: str, query: type[Fields], example: dict[str, Any]) -> list[dict[str, Any]]:
    """A query's fields as OpenAPI parameters, and the path's."""
    schema = query.model_json_schema()
    return [
        {
            "name": name,
            "in": "path" if f"{{{name}}}" in path else "query",
            "required": name in schema.get("required", []),
            "description": one.get("description", ""),
            "schema": one,
            **({"example": example[name]} if name in example else {}),
        }
        for name, one in schema["properties"].items()
    ]


def _errors(route: Route) -> dict[str, str]:
    """Status -> what it means, in ascending order."""
    kinds = [*route.errors, *(() if route.is_public else (ErrorKind.UNAUTHORIZED,))]
    kinds += _OF_BODIES if route.body is not None else ()
    kinds += (ErrorKind.INVALID_FIELD,) if route.query is not None else ()
    kinds += (ErrorKind.NOT_JSON, ErrorKind.BODY_TOO_LARGE) if route.uploads else ()
    kinds += _OF_WORK if route.is_work else ()
    texts: dict[str, str] = {}
    for kind in sorted((kind for kind in _ERRORS if kind in kinds), key=lambda kind: kind.http_status):
        texts[str(kind.http_status)] = " ".join(filter(None, (texts.get(str(kind.http_status)), _ERRORS[kind])))
    return texts
