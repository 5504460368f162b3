"""Between Robyn and the handlers: one wrapper around every route, for password, limits, CORS, errors and figures.

Handlers run on Robyn's event loop and never block it. Nothing else in the tree knows Robyn's types.
"""

from __future__ import annotations

import hmac
import logging
import re
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from urllib.parse import unquote, unquote_plus

from robyn import Headers, Request, Response, Robyn, StreamingResponse

from routes.context import Context
from routes.openai.errors import PREFIX, openai_error
from routes.request.bodies import validate
from routes.request.generate_requests import off_loop
from routes.request.json_body import parse_json
from routes.response.generate import BLANK, HEARTBEAT
from routes.response.reply import Answer, Chunks, ErrorBody, Reply, Stream, error_answer, native_error
from routes.route import Route, Upload
from routes.serving.client_identity import ClientIdentity
from routes.serving.thread_states import keep_state
from rwkv_batch.errors import ErrorInfo, ErrorKind, ServiceError
from rwkv_batch.ipc.wire import Observe

logger = logging.getLogger(__name__)

METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS")
OFF_TABLE = "other"
"""The route's name in figures for paths that do not exist."""
_UNAUTHORIZED = ErrorInfo(kind=ErrorKind.UNAUTHORIZED, message="Unauthorized: invalid or missing password")
_INTERNAL = ErrorInfo(kind=ErrorKind.INTERNAL, message="internal error; the server's log says more")
_SIGNS_OF_LIFE = (HEARTBEAT, BLANK)
_LAST_PARAMETER = re.compile(r"\{(\w+)\}$")

RobynReply = Response | StreamingResponse
RobynHandler = Callable[[Request], Awaitable[RobynReply]]


class Exchange:
    """One request under way: holds its place in the gate until the last byte, then reports it."""

    def __init__(self, context: Context, route: Route, client: str) -> None:
        self._context = context
        self._route = route
        self._client = client
        self._started = time.monotonic()
        self._first_byte_s = 0.0
        context.gate.enter(route.is_work, client)

    def wrote(self) -> None:
        """The first byte of the answer's text is there."""
        if not self._first_byte_s:
            self._first_byte_s = time.monotonic() - self._started

    def end(self, status: int) -> None:
        """Leave; called once."""
        self._context.gate.leave(self._client)
        seconds = time.monotonic() - self._started
        self._context.engine.observe(Observe(self._route.path, status, seconds, self._first_byte_s))


class OutgoingChunks:
    """A stream as Robyn drives it. Robyn drops it when its client is gone, which ends the work behind it."""

    def __init__(self, chunks: Chunks, exchange: Exchange) -> None:
        self._chunks = chunks
        self._exchange = exchange

    def __iter__(self) -> OutgoingChunks:
        return self

    def __next__(self) -> bytes:
        keep_state()
        chunk = next(self._chunks)
        if chunk not in _SIGNS_OF_LIFE:
            self._exchange.wrote()
        return chunk

    def __del__(self) -> None:
        self._chunks.close()
        self._exchange.end(200)


def cors_headers(context: Context) -> dict[str, str]:
    """What every answer bears, so that web pages of other origins may read it."""
    return {"Access-Control-Allow-Origin": context.config.cors_origin, "Access-Control-Expose-Headers": "Retry-After"}


def _to_robyn(context: Context, reply: Reply, exchange: Exchange | None) -> RobynReply:
    headers = cors_headers(context)
    if isinstance(reply, Stream) and exchange is not None:
        headers["Content-Type"] = reply.content_type
        return StreamingResponse(
            OutgoingChunks(reply.chunks, exchange),  # type: ignore[arg-type]  # it iterates any iterator
            headers=Headers(headers),
            media_type=reply.content_type,
        )
    if isinstance(reply, Stream):
        raise TypeError("a stream needs an exchange that ends with it")
    headers |= {"Content-Type": reply.content_type, **reply.headers}
    return Response(status_code=reply.status, headers=Headers(headers), description=reply.body)


def _body_bytes(request: Request, limit: int, flag: str = "--max-body-mb") -> bytes:
    """The body, whole and within the limit that `flag` sets. Raises ServiceError."""
    raw = request.body
    body = raw.encode() if isinstance(raw, str) else bytes(raw)
    announced = request.headers.get("content-length")
    length = int(announced) if announced and announced.isdecimal() else len(body)
    if max(length, len(body)) > limit:
        raise ServiceError(
            ErrorKind.BODY_TOO_LARGE,
            f"the body has {max(length, len(body))} bytes, the limit is {limit} ({flag})",
        )
    if len(body) < length:
        raise ServiceError(ErrorKind.NOT_JSON, f"the body ended after {len(body)} of the {length} bytes announced")
    return body


def _same(given: str, password: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), password.encode("utf-8", "surrogatepass"))


def _is_printable(password: str) -> bool:
    return password.isascii() and password.isprintable()


def _bearer_is_right(request: Request, password: str) -> bool:
    scheme, _, token = (request.headers.get("authorization") or "").partition(" ")
    if scheme.lower() != "bearer":
        return False
    # Robyn drops header values beyond printable ASCII: such a password comes percent-encoded.
    return _same(token.strip() if _is_printable(password) else unquote(token.strip()), password)


def _query(request: Request) -> dict[str, str]:
    """What the query says, and the path where it has a parameter."""
    given = request.query_params.to_dict()
    query = {unquote_plus(name): unquote_plus(values[-1]) for name, values in given.items() if values}
    return query | {name: unquote(value) for name, value in request.path_params.items()}


async def _data(context: Context, route: Route, request: Request) -> object:
    """The request's data, once its password has been found right. Raises ServiceError."""
    password = context.config.password
    authorized = route.is_public or not password or _bearer_is_right(request, password)
    if route.body is None and authorized:
        return _query(request)
    if route.uploads:
        raise ServiceError.from_info(_UNAUTHORIZED)  # a file has no field for a password
    try:
        body = _body_bytes(request, context.config.max_body_bytes)
        data = await off_loop(len(body), parse_json, body)
    except ServiceError as error:
        # A stranger learns nothing of what is wrong with a body; its size is no secret.
        if authorized or error.info.kind is ErrorKind.BODY_TOO_LARGE:
            raise
        raise ServiceError.from_info(_UNAUTHORIZED) from None
    if not authorized:
        given = data.get("password") if isinstance(data, dict) else None
        if not (isinstance(given, str) and _same(given, password)):
            raise ServiceError.from_info(_UNAUTHORIZED)
    return _query(request) if route.body is None else data


def _upload(context: Context, route: Route, request: Request, query: object) -> Upload:
    """The validated query and the file. Raises ServiceError."""
    assert route.query is not None
    fields = validate(route.query, query)
    if not route.uploads:
        return Upload(fields)
    return Upload(fields, _body_bytes(request, context.config.max_state_bytes, "--max-state-mb"))


def _unless_known(request: Request, answer: Answer) -> Answer:
    """The answer, or 304 without a body if the client holds it already, by its ETag."""
    etag = answer.headers.get("ETag")
    known = request.headers.get("if-none-match") or ""
    if etag is None or etag not in {one.strip().removeprefix("W/") for one in known.split(",")}:
        return answer
    return Answer(b"", 304, answer.content_type, answer.headers)


async def _asked(context: Context, route: Route, request: Request) -> object:
    """What the handler gets: the validated body, the query and file, or the query as it is. Raises ServiceError."""
    data = await _data(context, route, request)
    if route.query is not None:
        return _upload(context, route, request, data)
    if route.body is None:
        return data
    return await off_loop(len(request.body), validate, route.body, data)


async def _run(context: Context, route: Route, request: Request) -> Reply:
    asked = await _asked(context, route, request)
    if route.is_work or route.waits_for_engine:
        await context.readiness.wait_for_engine()
    if route.is_work:
        context.gate.check_draining()
    return await route.handle(context, asked)


def wrap(context: Context, route: Route) -> RobynHandler:
    """The Robyn handler of a route."""

    identity = ClientIdentity(context.config)

    async def handler(request: Request) -> RobynReply:
        try:
            exchange = Exchange(context, route, identity.client(request.ip_addr, request.headers.get))
        except ServiceError as error:
            return _to_robyn(context, error_answer(error.info, route.error_body), None)
        try:
            reply = await _run(context, route, request)
        except ServiceError as error:
            reply = error_answer(error.info, route.error_body)
        except Exception:
            logger.exception("%s %s failed", route.method, route.path)
            reply = error_answer(_INTERNAL, route.error_body)
        if isinstance(reply, Answer):
            reply = _unless_known(request, reply)
            exchange.wrote()
            exchange.end(reply.status)
        return _to_robyn(context, reply, exchange)

    return handler


def _off_table(context: Context, routes: Iterable[Route]) -> RobynHandler:
    """The handler of everything else: preflights, 405 on a known path, 404."""
    table: dict[str, set[str]] = defaultdict(set)
    for route in routes:
        table[route.path].add(route.method)

    async def handler(request: Request) -> RobynReply:
        path = unquote_plus(request.url.path).rstrip("/") or "/"
        methods = table.get(path) or _with_parameter(table, path)
        if methods is None:
            info = ErrorInfo(kind=ErrorKind.NOT_FOUND, message=f"no such path: {path[:200]}; /openapi.json lists them")
            return _to_robyn(context, error_answer(info, _error_body(path)), None)
        allowed = ", ".join(sorted({*methods, "OPTIONS"} | ({"HEAD"} if "GET" in methods else set())))
        if request.method == "OPTIONS":
            return _to_robyn(context, _preflight(allowed), None)
        info = ErrorInfo(
            kind=ErrorKind.METHOD_NOT_ALLOWED, message=f"{request.method} is not allowed on {path}, only {allowed}"
        )
        answer = error_answer(info, _error_body(path))
        answer.headers["Allow"] = allowed
        return _to_robyn(context, answer, None)

    return handler


def _with_parameter(table: dict[str, set[str]], path: str) -> set[str] | None:
    """The methods of a route whose path ends with a parameter."""
    starts = ((_LAST_PARAMETER.split(known)[0], known) for known in table if _LAST_PARAMETER.search(known))
    return next((table[known] for start, known in starts if path.startswith(start)), None)


def _error_body(path: str) -> ErrorBody:
    """How failures are written that belong to no route."""
    return openai_error if path.startswith(PREFIX) else native_error


def _preflight(allowed: str) -> Answer:
    headers = {
        "Allow": allowed,
        "Access-Control-Allow-Methods": allowed,
        "Access-Control-Allow-Headers": "Authorization, Content-Type, *",
        "Access-Control-Max-Age": "86400",
    }
    return Answer(b"", 204, "text/plain", headers)


def register(app: Robyn, context: Context, routes: Iterable[Route]) -> None:
    """Put every route, and an answer for everything that is none, into the Robyn application."""
    routes = tuple(routes)
    for route in routes:
        handler = wrap(context, route)
        path = _LAST_PARAMETER.sub(r"*\1", route.path)
        app.add_route(route.method, path, handler)
        if route.method == "GET":
            app.add_route("HEAD", path, handler)
    fallback = _off_table(context, routes)
    taken = {(route.method, route.path) for route in routes}
    for method in METHODS:
        app.add_route(method, "/*rest", fallback)
        if (method, "/") not in taken and not (method == "HEAD" and ("GET", "/") in taken):
            app.add_route(method, "/", fallback)
