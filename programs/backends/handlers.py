"""Calls the service's own handlers without HTTP."""

from __future__ import annotations

from typing import Any

import msgspec

from programs.backends.backend import Reply
from routes.context import Context
from routes.request_context import RequestContext, set_current_request
from routes.route import Route, full_response
from routes.table import ROUTES
from rwkv_batch.request import ClientLimits, Priority

BY_PATH: dict[str, Route] = {route.path: route for route in ROUTES if route.method == "POST" and route.body}


async def call_handler(
    context: Context,
    path: str,
    body: dict[str, Any],
    *,
    client: str,
    owner: str = "",
    limits: ClientLimits | None = None,
    priority: Priority = Priority.BATCH,
) -> Reply:
    """Returns the answer of the route at `path` for this client. Runs in its own task."""
    request_context = RequestContext(
        method="POST", route=path, client=client, limits=limits, owner=owner, priority=priority
    )
    set_current_request(request_context)
    answer = await full_response(context, BY_PATH[path], body)
    wait = answer.headers.get("Retry-After")
    value = msgspec.json.decode(answer.body)
    return Reply(
        answer.status,
        value,
        float(wait) if wait else None,
        request_context.prompt_tokens,
        request_context.completion_tokens,
    )
