"""Routes as data, and the runner of their handlers.

The runner turns errors into answers. Route data serves registration, metrics and the OpenAPI document. HTTP requests
and batch files share the runner.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, get_args

from pydantic import BaseModel

from routes.context import Context
from routes.request.bodies import Body, Fields, GenerationBody, with_mixture_weights
from routes.request.decode_defaults import with_defaults
from routes.request.fields import error_value, has_chat_only_fields
from routes.request.jobs import offload_if_large
from routes.request.model_names import means_model, model_not_found, parse_model_id, requested_state
from routes.request.validation import validated
from routes.request_context import current_request, warn
from routes.response.generate import call_engine
from routes.response.http_response import (
    JSON,
    NATIVE_ERRORS,
    ErrorFormat,
    HandlerResponse,
    HttpResponse,
    StreamedResponse,
    error_response,
)
from rwkv_batch.calls import ListStates, StateInfo
from rwkv_batch.errors import ErrorInfo, ErrorKind, ServiceError

SESSION_ERRORS = (ErrorKind.SESSION_NOT_FOUND, ErrorKind.SESSION_BUSY, ErrorKind.SESSION_UNUSABLE)
Handler = Callable[..., Awaitable[HandlerResponse]]
"""Gets the context, and the validated body or query if the route has one."""
Handled = TypeVar("Handled", bound=Handler)
Query = TypeVar("Query", bound=Fields)
_MAX_SEARCHED = 65536
"""Length of a body's beginning in which its prompt's key is searched, if it is no JSON or was not parsed."""
_PROMPT_KEY = re.compile(r'"(messages|contents)"\s*:')
_CHAT = {"messages"}
_PROMPT_FORMS = ("messages", "contents", "prefix", "suffix")
"""Fields of a native body's prompt."""


@dataclass(frozen=True, slots=True)
class Upload(Generic[Query]):
    """A validated query and the bytes of the request's file."""

    query: Query
    content: bytes


@dataclass(frozen=True, slots=True)
class Route:
    """One method on one path, and its handler."""

    method: str
    path: str
    """May end with a parameter, `{name}`, which `query` or `body` declares. Its value may contain slashes."""
    handle: Handler
    body: type[Body] | None = None
    summary: str = ""
    description: str = ""
    """Text of the documentation. Empty: the handler's docstring."""
    query: type[Fields] | None = None
    """Model of the query and the path's parameter."""
    ignored_query: tuple[str, ...] = ()
    """Names in the query that clients of a route with a body send and that mean nothing here."""
    uploads: str = ""
    """Content type of a body that is a file."""
    takes_form: bool = False
    """Whether the body may be a form (multipart/form-data). Its file becomes the body's field `content`.

    The OpenAPI document does not list the form: Robyn answers 500 to a malformed one.
    """
    form_lists: tuple[str, ...] | None = None
    """Fields that a form repeats. None: no form. Otherwise the body, also of GET, may be a form without a file."""
    secret_field: str = "password"  # noqa: S105 - a name
    """Field that may have the password or an API key: of the body, and of the query if `ignored_query` has it."""
    form: dict[str, str] | None = None
    """An example form for the documentation. `@` marks a file."""
    is_admin: bool = False
    """Requires --admin-password, or the password if there is none. API keys are refused."""
    is_about_models: bool = False
    """`model` in the request is the subject of the request. It does not select a context."""
    needs_known_model: bool = False
    """Refuses a `model` that is not served, also without --strict-model."""
    is_generation: bool = False
    """Refused while draining and above the limit of running answers."""
    ends_with_client: bool = False
    """Cancelled when its client leaves, like generation: the answer takes long and nobody else needs it."""
    waits_for_engine: bool = False
    """Waits for an engine that is loading or restarting (--engine-wait-s), although it does not generate."""
    answer: type[BaseModel] | None = None
    """Model of a successful JSON answer."""
    events: tuple[type[BaseModel], ...] = ()
    """Models of the stream's events, except errors. Empty if the route does not stream."""
    is_public: bool = False
    """Requires no password."""
    allows_any_origin: bool = False
    """Any web page and browser extension may use it, also without a password."""
    error_format: ErrorFormat = NATIVE_ERRORS
    conversation_route: Route | None = None
    """Serves bodies with `messages`: all if this route has no such field, else those with fields like tools."""
    conversation_error_format: ErrorFormat | None = None
    """Error format for a body with `messages` and without `contents`. None: as for others."""
    errors: tuple[ErrorKind, ...] = ()
    """Errors of this route, in addition to those that its other fields imply."""
    status: int = 200
    """Status of a successful answer."""
    content_type: str = JSON
    """Content type of a successful answer that is not streamed."""
    example: dict[str, Any] | None = None
    """A valid body or query, for the documentation."""

    def at(self, path: str, **changes: Any) -> Route:
        """Return the same route on another path."""
        return replace(self, path=path, **changes)

    def serving(self, data: object) -> Route:
        """Return the route that serves a body: `conversation_route` or this one. Raises ServiceError."""
        other = self.conversation_route
        takes_messages = self.body is not None and "messages" in self.body.model_fields
        if (
            other is not None
            and not takes_messages
            and isinstance(data, dict)
            and not {"messages", "prompt"} & data.keys()
        ):
            raise ServiceError(
                ErrorKind.INVALID_FIELD, "messages or prompt: one of them must be given", field="messages"
            )
        if other is None or not isinstance(data, dict) or {name for name in _PROMPT_FORMS if data.get(name)} != _CHAT:
            return self
        return self if takes_messages and not has_chat_only_fields(data) else other

    async def respond(self, context: Context, argument: Any) -> HandlerResponse:
        """Call the handler. Raises ServiceError."""
        has_argument = self.body is not None or self.query is not None
        return await (self.handle(context, argument) if has_argument else self.handle(context))

    def error_format_for(self, body: object) -> ErrorFormat:
        """Return the error format for a body: its JSON value, or its bytes, which may be no JSON."""
        if self.conversation_error_format is None:
            return self.error_format
        if isinstance(body, bytes | str):
            start = body[:_MAX_SEARCHED]
            keys = set(_PROMPT_KEY.findall(start if isinstance(start, str) else start.decode("utf-8", "replace")))
        else:
            keys = {"messages", "contents"} & body.keys() if isinstance(body, dict) else set()
        return self.conversation_error_format if keys == _CHAT else self.error_format


class Routes(list[Route]):
    """The routes of a group."""

    def __init__(self, *, errors: tuple[ErrorKind, ...] = (), **shared: Any) -> None:
        """`errors`, `shared`: of every route that `add` adds."""
        super().__init__()
        self._errors = errors
        self._shared = shared

    def add(
        self, method: str, path: str, summary: str, *, errors: tuple[ErrorKind, ...] = (), **fields: Any
    ) -> Callable[[Handled], Handled]:
        """Decorate a handler. The type of its second parameter is the body, the query, or an `Upload` of a query."""

        def register(handle: Handled) -> Handled:
            models = _argument_models(handle)
            errors_of_route = (*self._errors, *errors)
            self.append(
                Route(method, path, handle, summary=summary, errors=errors_of_route, **self._shared | models | fields)
            )
            return handle

        return register


def _argument_models(handle: Handler) -> dict[str, type[Fields]]:
    """Return the model of a handler's argument, as a field of its route."""
    _, *arguments = inspect.signature(handle, eval_str=True).parameters.values()
    if not arguments:
        return {}
    model = next(iter(get_args(arguments[0].annotation)), arguments[0].annotation)
    return {"body" if issubclass(model, Body) else "query": model}


logger = logging.getLogger(__name__)

_INTERNAL_ERROR = ErrorInfo(kind=ErrorKind.INTERNAL, message="internal error; the server's log has details")
_STREAM_NOT_ALLOWED = ErrorInfo(
    kind=ErrorKind.INVALID_FIELD,
    message="stream: must be false for an answer that is written to a file",
    field="stream",
    given=True,
)


async def response_or_error(
    route: Route, response: Awaitable[HandlerResponse], body: Callable[[], object] = lambda: b""
) -> HandlerResponse:
    """Await the handler's answer. An error becomes an answer in the route's error format.

    body: returns the request's body, see `Route.error_format_for`
    """
    try:
        return await response
    except ServiceError as error:
        current_request().error_kind, current_request().refusal = error.info.kind, error.info
        return error_response(error.info, route.error_format_for(body()))
    except Exception:  # a bug becomes a 500 answer and does not end the worker
        logger.exception("%s %s failed", route.method, route.path)
        current_request().error_kind = _INTERNAL_ERROR.kind
        return error_response(_INTERNAL_ERROR, route.error_format_for(body()))


_FINE_TUNED = "ft:"
"""Beginning of OpenAI's names of fine-tuned models. Another model would give other answers."""


async def model_context(context: Context, route: Route, data: object) -> Context:
    """Return the context of the model that a request names. Raises ServiceError, also while the model loads.

    An unknown name becomes a warning: programs of one model send names of their own.
    """
    requested = data.get("model") if isinstance(data, dict) else None
    if not isinstance(requested, str) or route.is_about_models:
        return context
    context = await context.wait_for_model(requested)
    if parse_model_id(requested) is not None:
        current_request().tuned_model = requested
    served, reads_model = context.config.model_name, route.body is not None or route.query is not None
    if means_model(requested, served) or not reads_model:
        return context
    if route.needs_known_model or context.config.strict_model or requested.strip().lower().startswith(_FINE_TUNED):
        raise model_not_found(requested, [served], "; GET /v1/models lists all names")
    warn("model", f"model: {error_value(requested)!r} is not served; {served!r} answers (--strict-model refuses)")
    return context


async def validated_body(context: Context, route: Route, model: type[Fields], data: object, size: int) -> Any:
    """Return the request's body or query as `model`. Raises ServiceError. Unknown fields become warnings.

    size: length of `data` in bytes; a large body is validated on a thread
    """
    others = () if route.is_about_models else ("model",)  # `model_context` has read it
    is_strict = context.config.strict_fields
    return await offload_if_large(size, validated, model, data, others=others, is_strict=is_strict)


async def with_defaults_applied(context: Context, parsed: Any) -> Any:
    """Return the body with its missing decode parameters filled in.

    They come from its tuned state and model. Raises ServiceError.
    """
    if not isinstance(parsed, GenerationBody):
        return parsed
    name = "" if parsed.states else requested_state(parsed, context.config)
    states = await call_engine(context, ListStates()) if name else []
    state = next((info for info in states if info.name == name), StateInfo(name=""))
    if parsed.mrss_gatingweight:
        parsed = with_mixture_weights(parsed, state.mixture)
    return with_defaults(parsed, state.defaults, context.defaults)


async def full_response(context: Context, route: Route, data: object) -> HttpResponse:
    """Return the route's answer to a body not received by HTTP. Never a stream.

    `set_current_request` must have set the task's request context.
    """
    response = await response_or_error(route, run_handler(context, route, data), lambda: data)
    if isinstance(response, StreamedResponse):
        response.chunks.close()
        return error_response(_STREAM_NOT_ALLOWED, route.error_format_for(data))
    return response


async def run_handler(context: Context, route: Route, data: object, *, may_stream: bool = False) -> HandlerResponse:
    """Answer a body not received by HTTP. Raises ServiceError, also for a stream unless `may_stream`."""
    route = route.serving(data)
    assert route.body is not None
    if isinstance(data, dict) and data.get("stream") is True and not may_stream:
        raise ServiceError.from_info(_STREAM_NOT_ALLOWED)
    context = await model_context(context, route, data)
    body = await validated_body(context, route, route.body, data, 0)
    return await route.respond(context, await with_defaults_applied(context, body))
