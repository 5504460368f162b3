"""The service's own handlers, called without HTTP: what own_engine and the batch runner ask."""

from __future__ import annotations

from typing import Any

import msgspec

from bulk.backends.backend import Reply
from routes.context import Context
from routes.dispatch import whole_answer
from routes.exchange import Exchange, work_on
from routes.route import Route
from routes.table import ROUTES
from rwkv_batch.request import ClientLimits, Priority

BY_PATH: dict[str, Route] = {route.path: route for route in ROUTES if route.method == "POST" and route.body}


async def ask_handler(
    context: Context,
    path: str,
    body: dict[str, Any],
    *,
    client: str,
    owner: str = "",
    limits: ClientLimits | None = None,
    priority: Priority = Priority.BATCH,
) -> Reply:
    """The answer of the route at `path`, in the client's name. In a task of its own."""
    exchange = Exchange(method="POST", route=path, client=client, limits=limits, owner=owner, priority=priority)
    work_on(exchange)
    answer = await whole_answer(context, BY_PATH[path], body)
    wait = answer.headers.get("Retry-After")
    value = msgspec.json.decode(answer.body)
    return Reply(
        answer.status, value, float(wait) if wait else None, exchange.prompt_tokens, exchange.completion_tokens
    )
