"""The access log: one line a request. And the request's id in every other line that is logged on its way."""

from __future__ import annotations

import logging
import time
from typing import Any

from routes.exchange import Exchange, current

logger = logging.getLogger("access")

DONE, CLIENT_LEFT = "done", "client_left"
"""Outcomes of requests, beside the kinds of errors."""
PROBES = frozenset({"/healthz", "/readyz", "/health", "/metrics"})
"""Asked every few seconds for ever: logged at level debug."""


class RequestIds(logging.Filter):
    """Adds the id of the request that the logging thread works on."""

    def filter(self, record: logging.LogRecord) -> bool:
        """See logging.Filter; lets everything through."""
        if current().request_id and not hasattr(record, "fields"):
            record.fields = {"request_id": current().request_id}
        return True


def name_requests() -> None:
    """Let every log line of this process say which request it belongs to."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(RequestIds())


def log_access(exchange: Exchange, status: int, outcome: str) -> None:
    """Log an ended request. `outcome` is DONE, CLIENT_LEFT or the kind of error."""
    level = logging.DEBUG if exchange.route in PROBES else logging.INFO
    if logger.isEnabledFor(level):
        extra = {"fields": _fields(exchange, status, outcome)}
        logger.log(level, "%s %s %d", exchange.method, exchange.route, status, extra=extra)


def _fields(exchange: Exchange, status: int, outcome: str) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "request_id": exchange.request_id,
        "client": exchange.client,
        "method": exchange.method,
        "route": exchange.route,
        "status": status,
        "outcome": outcome,
        "total_s": round(time.monotonic() - exchange.started, 4),
    }
    if exchange.rows:
        fields |= {
            "rows": exchange.rows,
            "prompt_tokens": exchange.prompt_tokens,
            "completion_tokens": exchange.completion_tokens,
        }
    if exchange.queue_s is not None:
        fields["queue_s"] = round(exchange.queue_s, 4)
    if exchange.is_stream and exchange.first_byte_s:
        fields["ttft_s"] = round(exchange.first_byte_s, 4)
    return fields
