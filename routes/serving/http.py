"""Connects Robyn with the handlers: one wrapper for password, limits, CORS, errors and metrics.

Handlers run on Robyn's event loop and never block it. No other module uses Robyn's types.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any
from urllib.parse import unquote, unquote_plus

from robyn import Headers, Request, Response, Robyn, StreamingResponse

from routes.context import Context
from routes.request.form_body import MULTIPART, URLENCODED, fields_of_form, parse_form
from routes.request.jobs import offload_if_large
from routes.request.json_body import parse_json
from routes.request.validation import report_query
from routes.request_context import REQUEST_ID, RequestContext, current_request, request_id, set_current_request
from routes.response.http_response import (
    ErrorFormat,
    HandlerResponse,
    HttpResponse,
    StreamedResponse,
    error_response,
    in_accepted_coding,
)
from routes.route import Route, Upload, model_context, response_or_error, validated_body, with_defaults_applied
from routes.serving.access import (
    CLIENT_CLOSED_REQUEST,
    CLIENT_DISCONNECTED,
    DONE,
    MAX_ANONYMOUS_BYTES,
    ClientIdentity,
    Grant,
    anonymous_grant,
    grant,
    header_grant,
    unauthorized,
)
from routes.serving.active_requests import KEY_REMOVED, ActiveRequest, RobynChunks, report
from routes.serving.browser import BrowserRules
from routes.serving.connections import Connection, cancelled_if_left, find, start_request
from routes.serving.fallback import LAST_PARAMETER, Fallback
from rwkv_batch.errors import ErrorKind, ServiceError

METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS")
UNKNOWN_ROUTE = "other"
"""Name of unknown paths in metrics."""
OTHER_IDS = ("Request-Id", "X-Trace-Id")
"""The names of REQUEST_ID for Anthropic's and DeepL's clients."""

RobynReply = Response | StreamingResponse
RobynHandler = Callable[[Request], Awaitable[RobynReply]]


def _headers(request_context: RequestContext) -> dict[str, str]:
    """Return the headers of every answer: request id and CORS."""
    headers = {"Vary": "Origin", **dict.fromkeys((REQUEST_ID, *OTHER_IDS), request_context.request_id)}
    if request_context.allowed_origin:
        headers["Access-Control-Allow-Origin"] = request_context.allowed_origin
        headers["Access-Control-Expose-Headers"] = f"Retry-After, X-Should-Retry, {REQUEST_ID}"
    return headers


def _full_response(request_context: RequestContext, answer: HttpResponse) -> Response:
    headers = _headers(request_context) | {"Content-Type": answer.content_type, **answer.headers}
    return Response(status_code=answer.status, headers=Headers(headers), description=answer.body)


def _streaming_response(
    stream: StreamedResponse, active_request: ActiveRequest, connection: Connection | None, error_format: ErrorFormat
) -> StreamingResponse:
    headers = _headers(active_request.request_context) | {"Content-Type": stream.content_type, **stream.headers}
    chunks: Any = RobynChunks(stream, active_request, connection, error_format)  # Robyn iterates any iterator
    return StreamingResponse(chunks, headers=Headers(headers), media_type=stream.content_type)


def _body_bytes(request: Request, limit: int, flag: str = "--max-body-mb") -> bytes:
    """Return the complete body. Raises ServiceError above the limit that `flag` sets."""
    raw = request.body
    body = raw.encode() if isinstance(raw, str) else bytes(raw)
    length = max(_length(request), len(body))
    _check_length(length, limit, flag)
    if len(body) < length:
        is_form = (request.headers.get("content-type") or "").lower().startswith("multipart/")
        form = "the body is a form, which this route does not read; send the file or text alone"
        cut = f"the body ended after {len(body)} of the {length} announced bytes"
        raise ServiceError(ErrorKind.NOT_JSON, form if is_form else cut)
    return body


def _check_length(length: int, limit: int, flag: str) -> None:
    """Raise ServiceError above the limit of a body's bytes that `flag` sets."""
    if length > limit:
        message = f"the body has {length} bytes, the limit is {limit} ({flag})"
        raise ServiceError(ErrorKind.BODY_TOO_LARGE, message)


def _query(request: Request) -> dict[str, str]:
    """Return the query's fields, and the path's parameter if it has one."""
    given = request.query_params.to_dict()
    query = {unquote_plus(name): unquote_plus(values[-1]) for name, values in given.items() if values}
    return query | _path_parameters(request)


def _path_parameters(request: Request) -> dict[str, str]:
    return {name: unquote(value) for name, value in request.path_params.items()}


def _early_grant(context: Context, route: Route, request: Request) -> Grant | None:
    """Return what a client may do by its headers and query, before the body is read."""
    access = header_grant(context, request.headers.get) or anonymous_grant(context)
    if access is None and route.secret_field in route.ignored_query:
        given = _query(request).get(route.secret_field)
        access = grant(context, given) if given else None
    return access


async def _request_data(context: Context, route: Route, request: Request) -> object:
    """Authenticate the request and return its data. Raises ServiceError."""
    access = Grant() if route.is_public else _early_grant(context, route, request)
    is_authorized = access is not None and (access.is_admin or not route.is_admin)
    data = None
    is_large = _length(request) > MAX_ANONYMOUS_BYTES
    if not is_authorized and (is_large or route.uploads):  # a file has no field for a password
        raise unauthorized(access, has_large_body=is_large)
    if not route.uploads and (route.body is not None or not is_authorized):
        try:
            data = await _body_data(context, route, request, is_authorized)
        except ServiceError:
            if not is_authorized:  # nothing is said about the body
                raise unauthorized(access) from None
            raise
    if not is_authorized:
        given = data.get(route.secret_field) if isinstance(data, dict) else None
        access = (grant(context, given) if isinstance(given, str) else None) or access
    if access is None or (route.is_admin and not access.is_admin):
        raise unauthorized(access)
    if not route.is_public and (connection := find(request.ip_addr)) is not None:
        connection.is_trusted = True
    request_context = current_request()
    request_context.is_admin = access.is_admin
    if access.key is not None:
        request_context.client, request_context.limits = access.key.name, access.key.limits
        request_context.owner = "" if access.is_admin else access.key.name
        request_context.key_digest = access.key.digest
    if route.body is not None:
        return {**data, **_path_parameters(request)} if isinstance(data, dict) else data
    is_form = route.form_lists is not None and request.body
    return _query(request) | (_fields_of_form(context, route, request) if is_form else {})


async def _body_data(context: Context, route: Route, request: Request, is_authorized: bool) -> object:
    """Return the data of the body: of a form, with or without a file, or of JSON. Raises ServiceError."""
    if route.takes_form and _is_form(request):
        fields = _form_data(context, request, is_authorized)
        is_named = route.body is not None and "filename" in route.body.model_fields
        return fields if is_named else {name: value for name, value in fields.items() if name != "filename"}
    content_type = (request.headers.get("content-type") or "").lower()
    if route.form_lists is not None and (content_type.startswith(URLENCODED) or _is_form(request)):
        return _fields_of_form(context, route, request)
    return await _json_data(context, request)


def _fields_of_form(context: Context, route: Route, request: Request) -> dict[str, Any]:
    """Return the fields of a form without a file. Raises ServiceError."""
    lists = route.form_lists or ()
    if _is_form(request):
        return fields_of_form(request.form_data, lists)
    return parse_form(_body_bytes(request, context.config.max_body_bytes), lists)


def _length(request: Request) -> int:
    """Return the body's length, the larger of announced and received."""
    announced = request.headers.get("content-length") or ""
    return max(int(announced) if announced.isdecimal() else 0, len(request.body))


def _is_form(request: Request) -> bool:
    """Return whether Robyn has parsed the body as a form. Raises ServiceError if it should have, but has not."""
    content_type = request.headers.get("content-type") or ""
    if not content_type.lower().startswith(MULTIPART):
        return False
    if MULTIPART not in content_type:
        message = f"the Content-Type {content_type[:50]!r} is not known; write {MULTIPART} in small letters"
        raise ServiceError(ErrorKind.NOT_JSON, message)
    return True


def _form_data(context: Context, request: Request, is_authorized: bool) -> dict[str, Any]:
    """Return the fields of a form, and its one file as `content`."""
    _check_length(_length(request), context.config.max_state_bytes, "--max-state-mb")
    files = list(request.files.values())
    if len(files) != 1 and is_authorized:
        message = f"content: a form must have exactly one file with a file name, got {len(files)}"
        raise ServiceError(ErrorKind.INVALID_FIELD, message, field="content")
    name = next(iter(request.files), "")
    return {"filename": name, **request.form_data, "content": bytes(files[0]) if files else b""}


async def _json_data(context: Context, request: Request) -> object:
    try:
        if _is_form(request):  # Robyn has parsed it and its bytes are lost
            raise ServiceError(ErrorKind.NOT_JSON, f"the body is a form ({MULTIPART}); send JSON")
        body = _body_bytes(request, context.config.max_body_bytes)
        return await offload_if_large(len(body), parse_json, body, context.config.max_request_tokens)
    except ServiceError as error:
        encoding = request.headers.get("content-encoding")
        if encoding and error.info.kind is ErrorKind.NOT_JSON:
            message = f"{error.info.message}; it has Content-Encoding {encoding[:50]}: send it uncompressed"
            raise ServiceError(ErrorKind.NOT_JSON, message) from None
        raise


def _not_modified_or(request: Request, answer: HttpResponse) -> HttpResponse:
    """Return the answer, or an empty 304 if the client's ETag matches."""
    etag = answer.headers.get("ETag")
    known = request.headers.get("if-none-match") or ""
    if etag is None or etag not in {one.strip().removeprefix("W/") for one in known.split(",")}:
        return answer
    return HttpResponse(b"", 304, answer.content_type, answer.headers)


async def _handler_argument(context: Context, route: Route, request: Request, data: object) -> object:
    """Return the handler's argument: the validated body, or query, or query and file. Raises ServiceError."""
    if route.query is not None:
        query = await validated_body(context, route, route.query, data, 0)
        limit = context.config.max_state_bytes
        return Upload(query, _body_bytes(request, limit, "--max-state-mb")) if route.uploads else query
    if route.body is None:
        if not route.is_public and isinstance(data, dict):
            unread = {name: given for name, given in data.items() if name != "model"}  # `model_context` has read it
            report_query(unread, is_strict=context.config.strict_fields)
        return data
    known = {*route.ignored_query, *request.path_params}
    query = {name: given for name, given in _query(request).items() if name not in known}
    report_query(query, is_strict=context.config.strict_fields)
    return await validated_body(context, route, route.body, data, len(request.body))


async def _run(context: Context, route: Route, rules: BrowserRules, request: Request) -> HandlerResponse:
    rules.check(route, request.headers.get)
    data = await _request_data(context, route, request)
    route = route.serving(data)
    with context.keys.cancelled_if_removed(current_request().key_digest if route.is_generation else ""):
        return await _handle(context, route, request, data)


async def _handle(context: Context, route: Route, request: Request, data: object) -> HandlerResponse:
    context = await model_context(context, route, data)
    argument = await _handler_argument(context, route, request, data)
    if route.is_generation or route.waits_for_engine:
        await context.readiness.wait_for_engine()
    if route.is_generation:
        context.limiter.check_draining()
    return await route.respond(context, await with_defaults_applied(context, argument))


def wrap(context: Context, route: Route) -> RobynHandler:
    identity, rules = ClientIdentity(context.config), BrowserRules(context.config)

    async def handler(request: Request) -> RobynReply:
        connection = start_request(request.ip_addr)
        address = identity.client(_peer(request, connection), request.headers.get)
        origin = rules.allowed_origin(request.headers.get, route.allows_any_origin)
        request_context = _start_request(request, route.path, address, origin)
        if context.config.otlp_endpoint:
            request_context.traceparent = request.headers.get("traceparent") or ""
        try:
            active_request = ActiveRequest(context, request_context, address, route.is_generation)
        except ServiceError as error:
            request_context.refusal = error.info
            refusal = error_response(error.info, route.error_format_for(request.body))
            report(context, request_context, refusal.status, error.info.kind)
            return _full_response(request_context, refusal)
        try:
            with cancelled_if_left.add_current(connection if route.is_generation or route.ends_with_client else None):
                reply = await response_or_error(route, _run(context, route, rules, request), lambda: request.body)
        except asyncio.CancelledError:
            if active_request.has_key_in_force:
                request_context.error_kind = CLIENT_DISCONNECTED
                reply = HttpResponse(b"", CLIENT_CLOSED_REQUEST)
            else:
                request_context.error_kind = KEY_REMOVED.kind
                reply = error_response(KEY_REMOVED, route.error_format_for(request.body))
        if isinstance(reply, StreamedResponse):
            error_format = route.error_format_for(request.body)  # the stream must not keep the body
            request_context.is_stream = reply.content_type == error_format.stream.content_type
            return _streaming_response(reply, active_request, connection, error_format)
        reply = _not_modified_or(request, in_accepted_coding(reply, request.headers.get("accept-encoding") or ""))
        request_context.mark_first_byte()
        active_request.release()
        active_request.report(reply.status, request_context.error_kind or DONE)
        return _full_response(request_context, reply)

    return handler


def _peer(request: Request, connection: Connection | None) -> str | None:
    """Return the address of the socket's peer."""
    return request.ip_addr if connection is None else connection.peer


def _start_request(request: Request, route: str, client: str, allowed_origin: str) -> RequestContext:
    """Create the request's context and make it the current one."""
    name = request_id(request.headers.get(REQUEST_ID.lower()))
    scheme = "https" if request.headers.get("x-forwarded-proto") == "https" else "http"
    base_url = f"{scheme}://{request.headers.get('host') or 'localhost'}"
    request_context = RequestContext(name, request.method, base_url, route, client, allowed_origin=allowed_origin)
    request_context.is_from_openai_sdk = request.headers.get("x-stainless-lang") is not None
    set_current_request(request_context)
    return request_context


def _fallback_handler(context: Context, routes: Sequence[Route]) -> RobynHandler:
    """Return the handler of all other requests: preflights, 405 on a known path, 404."""
    identity, rules = ClientIdentity(context.config), BrowserRules(context.config)
    open_paths = {route.path for route in routes if route.allows_any_origin}
    fallback = Fallback(routes)

    async def handler(request: Request) -> RobynReply:
        origin = rules.allowed_origin(request.headers.get, request.url.path in open_paths)
        client = identity.client(_peer(request, start_request(request.ip_addr)), request.headers.get)
        path = unquote_plus(request.url.path).rstrip("/") or "/"
        route = fallback.other_route(request.method, path)
        request_context = _start_request(request, route or UNKNOWN_ROUTE, client, origin)
        answer = fallback.answer(route, request.method, path)
        report(context, request_context, answer.status, request_context.error_kind or DONE)
        return _full_response(request_context, answer)

    return handler


def register(app: Robyn, context: Context, routes: Iterable[Route]) -> None:
    """Register every route with Robyn, and a fallback for all other paths."""
    routes = tuple(routes)
    for route in routes:
        handler = wrap(context, route)
        path = LAST_PARAMETER.sub(r"*\1", route.path)
        app.add_route(route.method, path, handler)
        if route.method == "GET":
            app.add_route("HEAD", path, handler)
    fallback = _fallback_handler(context, routes)
    known = {(route.method, route.path) for route in routes}
    for method in METHODS:
        app.add_route(method, "/*rest", fallback)
        if (method, "/") not in known and not (method == "HEAD" and ("GET", "/") in known):
            app.add_route(method, "/", fallback)
