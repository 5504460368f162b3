"""The access log with one line per request, and request ids in all other log lines."""

from __future__ import annotations

import logging
import time
from typing import Any

from routes.request_context import RequestContext, current_request

logger = logging.getLogger("access")

DONE, CLIENT_DISCONNECTED = "done", "client_left"
"""Outcomes of requests, in addition to the error kinds."""
PROBES = frozenset({"/healthz", "/readyz", "/health", "/metrics"})
"""Polled every few seconds, so they are logged at level debug."""


class RequestIds(logging.Filter):
    """Adds the id of the logging thread's request."""

    def filter(self, record: logging.LogRecord) -> bool:
        """See logging.Filter. Never drops a record."""
        if current_request().request_id and not hasattr(record, "fields"):
            record.fields = {"request_id": current_request().request_id}
        return True


def add_request_ids() -> None:
    """Add request ids to all log lines of this process."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(RequestIds())


def log_access(request_context: RequestContext, status: int, outcome: str) -> None:
    """Log a finished request. `outcome` is DONE, CLIENT_DISCONNECTED or the error kind."""
    level = logging.DEBUG if request_context.route in PROBES else logging.INFO
    if logger.isEnabledFor(level):
        extra = {"fields": _fields(request_context, status, outcome)}
        logger.log(level, "%s %s %d", request_context.method, request_context.route, status, extra=extra)


def _fields(request_context: RequestContext, status: int, outcome: str) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "request_id": request_context.request_id,
        "client": request_context.client,
        "method": request_context.method,
        "route": request_context.route,
        "status": status,
        "outcome": outcome,
        "total_s": round(time.monotonic() - request_context.started, 4),
    }
    if request_context.rows:
        fields |= {
            "rows": request_context.rows,
            "prompt_tokens": request_context.prompt_tokens,
            "completion_tokens": request_context.completion_tokens,
        }
    if request_context.queue_s is not None:
        fields["queue_s"] = round(request_context.queue_s, 4)
    if request_context.is_stream and request_context.first_byte_s:
        fields["ttft_s"] = round(request_context.first_byte_s, 4)
    return fields
