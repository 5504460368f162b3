"""Answers to requests that no route serves: preflights, 405 on a known path, 404."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from routes.request_context import REQUEST_ID, current_request
from routes.response.http_response import (
    DEEPL_ERRORS,
    NATIVE_ERRORS,
    OPENAI_ERRORS,
    PREFIX,
    ErrorFormat,
    HttpResponse,
    error_response,
)
from routes.route import Route
from rwkv_batch.errors import ErrorInfo, ErrorKind

LAST_PARAMETER = re.compile(r"\{(\w+)\}$")
_DEEPL_PATH = re.compile(r"/v[23]/(?!chat/)")
"""Paths of DeepL's API. Its clients also try those that are not served."""


class Fallback:
    """The paths of all routes, with the methods and error formats of each."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._formats: dict[str, dict[str, ErrorFormat]] = defaultdict(dict)
        for route in routes:
            self._formats[route.path][route.method] = route.error_format

    def route_of(self, path: str) -> str | None:
        """Return the route of `path`, if need be one whose path ends with a parameter."""
        if path in self._formats:
            return path
        starts = ((LAST_PARAMETER.split(one)[0], one) for one in self._formats if LAST_PARAMETER.search(one))
        return next((one for start, one in starts if path.startswith(start)), None)

    def other_route(self, method: str, path: str) -> str | None:
        """Return the route of `path`, if it has other methods. A path may be spelt differently than its route."""
        route = self.route_of(path)
        return None if route is None or method in self._formats[route] else route

    def answer(self, route: str | None, method: str, path: str) -> HttpResponse:
        """Return the answer to the current request. `route`: its `other_route`."""
        return self._not_found(path) if route is None else _not_allowed(self._formats[route], method, path)

    def _not_found(self, path: str) -> HttpResponse:
        openai_path = f"{PREFIX}v1{path.removeprefix(PREFIX.rstrip('/')).removeprefix('/v1')}"
        is_openai_path = self.route_of(openai_path) is not None
        remedy = f"it is {openai_path[:200]} here" if is_openai_path else "/openapi.json lists all paths"
        error_format = DEEPL_ERRORS if _DEEPL_PATH.match(path) else NATIVE_ERRORS
        if is_openai_path or path.startswith(PREFIX):
            error_format = OPENAI_ERRORS
        return _error(ErrorKind.NOT_FOUND, f"no such path: {path[:200]}; {remedy}", error_format)


def _not_allowed(formats: dict[str, ErrorFormat], method: str, path: str) -> HttpResponse:
    allowed = ", ".join(sorted({*formats, "OPTIONS"} | ({"HEAD"} if "GET" in formats else set())))
    if method == "OPTIONS":
        return _preflight(allowed)
    message = f"{method} is not allowed on {path}, only {allowed}"
    answer = _error(ErrorKind.METHOD_NOT_ALLOWED, message, next(iter(formats.values())))
    answer.headers["Allow"] = allowed
    return answer


def _error(kind: ErrorKind, message: str, error_format: ErrorFormat) -> HttpResponse:
    info = ErrorInfo(kind=kind, message=message)
    current_request().error_kind, current_request().refusal = kind, info
    return error_response(info, error_format)


def _preflight(allowed: str) -> HttpResponse:
    headers = {
        "Allow": allowed,
        "Access-Control-Allow-Methods": allowed,
        "Access-Control-Allow-Headers": f"Authorization, Content-Type, {REQUEST_ID}, *",
        "Access-Control-Max-Age": "86400",
    }
    return HttpResponse(b"", 204, "text/plain", headers)
