"""The OpenAPI document, made from the route table and the bodies' pydantic models."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from pydantic.json_schema import models_json_schema

from routes.bodies import Body
from routes.reply import JSON, SSE
from routes.route import Route

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {"type": "string", "description": "Names the field, the limit, the value and the remedy."},
        "field": {"type": "string"},
        "given": {"description": "The value that was refused."},
    },
}
_BODY_ERRORS = {
    "400": "The body is not JSON, or not whole.",
    "413": "The body is too large.",
    "422": "A field is wrong.",
}
_WORK_ERRORS = {"429": "Overloaded; see Retry-After.", "503": "Draining, or the engine is away.", "504": "Timed out."}


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
            "schemas": {**schemas.get("$defs", {}), "Error": _ERROR},
            "securitySchemes": {"password": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route) -> dict[str, Any]:
    good: dict[str, Any] = {JSON: {}} if route.path != "/metrics" else {"text/plain": {}}
    if route.streams:
        good[SSE] = {"schema": {"type": "string", "description": 'With "stream": true; ends with data: [DONE].'}}
    responses: dict[str, Any] = {"200": {"description": "Success.", "content": good}}
    for status, text in _errors(route).items():
        schema = {"$ref": "#/components/schemas/Error"}
        responses[status] = {"description": text, "content": {JSON: {"schema": schema}}}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "description": inspect.getdoc(route.handle) or "",
        "operationId": f"{route.method.lower()}{route.path.replace('/', '_').replace('.', '_')}",
        "responses": responses,
    }
    if not route.is_public:
        operation["security"] = [{"password": []}, {}]
    if route.body is not None:
        schema = {"$ref": f"#/components/schemas/{route.body.__name__}"}
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    return operation


def _errors(route: Route) -> dict[str, str]:
    errors = {} if route.is_public else {"401": "Wrong or missing password."}
    if route.body is not None:
        errors |= _BODY_ERRORS
    if route.is_work:
        errors |= _WORK_ERRORS
    elif route.path in ("/readyz", "/status", "/metrics"):
        errors["503"] = "The engine is away."
    return errors
