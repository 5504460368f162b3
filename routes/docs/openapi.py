"""Builds the OpenAPI document from the routes and their pydantic models."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from routes.request.bodies import Fields
from routes.response.http_response import FILE, JSON, NO_CONTENT, SSE, ErrorFormat
from routes.response.response_models import AnthropicError, DeepLError, Error, OpenAIError, WithWarnings
from routes.route import Route
from rwkv_batch.errors import ErrorKind

_ERRORS = {
    ErrorKind.NOT_JSON: "The body is not valid JSON, or incomplete.",
    ErrorKind.UNAUTHORIZED: "Wrong or missing password or API key.",
    ErrorKind.FORBIDDEN: "The host or origin is not allowed.",
    ErrorKind.NOT_FOUND: "The path does not exist.",
    ErrorKind.MODEL_NOT_FOUND: "The model is not served.",
    ErrorKind.SESSION_NOT_FOUND: "The session or dialogue does not exist, or was deleted.",
    ErrorKind.SESSION_BUSY: "Another turn of the session is running, and `wait` is false.",
    ErrorKind.SESSION_UNUSABLE: "The session belongs to another model, or is damaged.",
    ErrorKind.STATE_NOT_FOUND: "The tuned state is not loaded.",
    ErrorKind.ADAPTER_NOT_FOUND: "The adapter is not loaded.",
    ErrorKind.NAME_TAKEN: "The name is taken.",
    ErrorKind.BODY_TOO_LARGE: "The body is too large.",
    ErrorKind.UNSUPPORTED_MEDIA_TYPE: "A browser sent another content type.",
    ErrorKind.INVALID_FIELD: "A field is invalid.",
    ErrorKind.OVERLOADED: "Overloaded, or an API key's limit is reached. See Retry-After.",
    ErrorKind.STORAGE_FAILED: "The disk is full or failed. Retry later.",
    ErrorKind.DRAINING: "The service is shutting down.",
    ErrorKind.ENGINE_LOST: "The engine is not available. Retry later.",
    ErrorKind.TIMEOUT: "The time limit was reached.",
}
_ERROR_MODELS: dict[str, type[BaseModel]] = {
    one.__name__: one for one in (Error, OpenAIError, AnthropicError, DeepLError)
}
FORM = "x-form"
"""Key of an operation's example of a form. OpenAPI has no such field if the body may also be JSON."""
_FILE = {"type": "string", "format": "binary"}
_SCHEMAS_WITHOUT_MODEL = {JSON: {"type": ["object", "array"]}, FILE: _FILE}
"""Schemas of successful answers without a model, by content type. Others are text."""
_FILE_ERRORS = (ErrorKind.NOT_JSON, ErrorKind.BODY_TOO_LARGE, ErrorKind.UNSUPPORTED_MEDIA_TYPE)
_BODY_ERRORS = (*_FILE_ERRORS, ErrorKind.INVALID_FIELD)
_GENERATION_ERRORS = (
    ErrorKind.STATE_NOT_FOUND,
    ErrorKind.ADAPTER_NOT_FOUND,
    ErrorKind.OVERLOADED,
    ErrorKind.DRAINING,
    ErrorKind.ENGINE_LOST,
)


class _Schemas(GenerateJsonSchema):
    """Like pydantic's, but keeps JSON defaults as they are: pydantic would build a type adapter for each."""

    def encode_default(self, dft: Any) -> Any:
        return dft if dft is None or type(dft) in (bool, int, float, str) else super().encode_default(dft)


def openapi_document(routes: Iterable[Route]) -> dict[str, Any]:
    """Return an OpenAPI 3.1 document."""
    routes = tuple(routes)
    models: set[type[BaseModel]] = {*_ERROR_MODELS.values(), WithWarnings}
    for route in routes:
        models.update(model for model in (route.body, route.answer, *route.events) if model is not None)
    _, schemas = models_json_schema(
        [(model, "validation") for model in sorted(models, key=lambda model: model.__name__)],
        ref_template="#/components/schemas/{model}",
        schema_generator=_Schemas,
    )
    warnings = schemas["$defs"].pop(WithWarnings.__name__)["properties"]
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if route.answer is not None and (route.body is not None or route.query is not None):
            schemas["$defs"][route.answer.__name__]["properties"] |= warnings
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "RWKV-7 batch inference", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"password": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route) -> dict[str, Any]:
    formats = _error_formats(route)
    error_models = [_ERROR_MODELS[one.schema] for one in formats]
    success: dict[str, Any] = {"description": "Success."}
    if route.status != NO_CONTENT:
        success["content"] = _success_content(route, error_models)
    responses: dict[str, Any] = {str(route.status): success}
    for status, text in _errors(route, formats).items():
        responses[status] = {"description": text, "content": {JSON: {"schema": _one_of(*error_models)}}}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "description": route.description or inspect.getdoc(route.handle) or "",
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
    if route.form is not None:
        operation[FORM] = route.form
    if (query := route.query or (route.body if "{" in route.path else None)) is not None:
        fields = _parameters(route.path, query, route.example or {})
        operation["parameters"] = [one for one in fields if route.query is not None or one["in"] == "path"]
    if route.uploads:
        operation["requestBody"] = {"required": True, "content": {route.uploads: {"schema": _FILE}}}
    return operation


def _error_formats(route: Route) -> list[ErrorFormat]:
    formats = [route.error_format, route.conversation_error_format]
    return [one for one in formats if one is not None]


def _one_of(*models: type[BaseModel]) -> dict[str, Any]:
    references = [{"$ref": f"#/components/schemas/{model.__name__}"} for model in models]
    return references[0] if len(references) == 1 else {"anyOf": references}


def _of_both(route: Route, models: Callable[[Route], Iterable[type[BaseModel]]]) -> list[type[BaseModel]]:
    """Return a route's models and those of the route that serves its conversations."""
    other = route.conversation_route
    return list(dict.fromkeys((*models(route), *(models(other) if other is not None else ()))))


def _success_content(route: Route, error_models: list[type[BaseModel]]) -> dict[str, Any]:
    """Return the content of a successful answer. A generation may still fail after it has started."""
    if route.answer is None:
        return {route.content_type: {"schema": _SCHEMAS_WITHOUT_MODEL.get(route.content_type, {"type": "string"})}}
    answers = _of_both(route, lambda one: () if one.answer is None else (one.answer,))
    good = {route.content_type: {"schema": _one_of(*answers, *(error_models if route.is_generation else ()))}}
    if route.events:
        good[route.error_format.stream.content_type] = {"schema": _event_schema(route, error_models)}
    return good


def _event_schema(route: Route, error_models: list[type[BaseModel]]) -> dict[str, Any]:
    """Return the schema of one event of a stream."""
    events = _of_both(route, lambda one: one.events)
    value, stream = _one_of(*events, *error_models), route.error_format.stream
    if stream.content_type != SSE:
        return {"description": "One line of a stream.", "contentMediaType": JSON, "contentSchema": value}
    values: list[dict[str, Any]] = [{"contentMediaType": JSON, "contentSchema": value}]
    last = ""
    if stream.end:
        values.append({"const": "[DONE]"})
        last = " The last one is [DONE]."
    return {
        "type": "object",
        "description": f"One event of a stream.{last}",
        "required": ["data"],
        "properties": {"data": {"type": "string", "anyOf": values}},
    }


def _parameters(path: str, query: type[Fields], example: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the fields of a query and a path as OpenAPI parameters."""
    schema = query.model_json_schema()
    return [
        {
            "name": name,
            "in": "path" if f"{{{name}}}" in path else "query",
            "required": f"{{{name}}}" in path or name in schema.get("required", []),
            "description": field_schema.get("description", ""),
            "schema": field_schema,
            **({"example": example[name]} if name in example else {}),
        }
        for name, field_schema in schema["properties"].items()
    ]


def _errors(route: Route, formats: list[ErrorFormat]) -> dict[str, str]:
    """Return the route's error statuses with their meanings, in ascending order."""
    kinds = [*route.errors, *(() if route.is_public else (ErrorKind.UNAUTHORIZED, ErrorKind.FORBIDDEN))]
    kinds += _BODY_ERRORS if route.body is not None else ()
    kinds += (ErrorKind.INVALID_FIELD,) if route.query is not None else ()
    kinds += _FILE_ERRORS if route.uploads else ()
    kinds += _GENERATION_ERRORS if route.is_generation else ()
    texts: dict[int, list[str]] = {}
    for kind in (kind for kind in _ERRORS if kind in kinds):
        for status in {one.statuses[kind] for one in formats}:
            texts.setdefault(status, []).append(_ERRORS[kind])
    return {str(status): " ".join(sentences) for status, sentences in sorted(texts.items())}
