"""A route as data, for registration, metrics and the OpenAPI document."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from routes.context import Context
from routes.request.bodies import Body, Fields
from routes.response.http_response import JSON, NATIVE_ERRORS, ErrorFormat, HandlerResponse
from rwkv_batch.errors import ErrorKind

SESSION_ERRORS = (ErrorKind.SESSION_NOT_FOUND, ErrorKind.SESSION_BUSY, ErrorKind.SESSION_UNUSABLE)
Handler = Callable[[Context, Any], Awaitable[HandlerResponse]]


@dataclass(frozen=True, slots=True)
class Upload:
    """A validated query, and the file's bytes if the route takes a file."""

    query: Any
    content: bytes = b""


@dataclass(frozen=True, slots=True)
class Route:
    """One method on one path. The handler gets the validated body, or the query if `body` is None."""

    method: str
    path: str
    """May end with a parameter, `{name}`, which `query` declares. Its value may contain slashes."""
    handle: Handler
    body: type[Body] | None
    summary: str
    query: type[Fields] | None = None
    """Model of the query and the path's parameter. The handler gets an `Upload` with it."""
    uploads: str = ""
    """Content type of a body that is a file."""
    takes_form: bool = False
    """Whether the body may be a form (multipart/form-data). Its file becomes the body's field `content`.

    The OpenAPI document does not list the form: Robyn answers 500 to a malformed one.
    """
    form: dict[str, str] | None = None
    """An example form for the documentation. `@` marks a file."""
    is_admin: bool = False
    """Requires --admin-password, or the password if there is none. API keys are refused."""
    is_about_models: bool = False
    """`model` in the request is the subject of the request. It does not select a context."""
    is_generation: bool = False
    """Refused while draining and above the limit of running answers."""
    waits_for_engine: bool = False
    """Waits for an engine that is loading or restarting (--engine-wait-s), although it does not generate."""
    answer: type[BaseModel] | None = None
    """Model of a successful JSON answer."""
    events: tuple[type[BaseModel], ...] = ()
    """Models of the stream's events, except errors. Empty if the route does not stream."""
    is_public: bool = False
    """Requires no password."""
    error_format: ErrorFormat = NATIVE_ERRORS
    errors: tuple[ErrorKind, ...] = ()
    """Errors of this route, in addition to those that its other fields imply."""
    content_type: str = JSON
    """Content type of a successful answer that is not streamed."""
    example: dict[str, Any] | None = None
    """A valid body or query, for the documentation."""
