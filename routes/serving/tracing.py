"""OpenTelemetry's spans of requests (--otlp-endpoint): each has its queue, prefill and decode as children.

Loads OpenTelemetry's SDK. Its variables OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER, OTEL_BSP_... and
OTEL_EXPORTER_OTLP_HEADERS apply.
"""

from __future__ import annotations

import os
import threading
import time

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from routes.request_context import RequestContext
from rwkv_batch.version import __version__

TRACES_PATH = "/v1/traces"
EXPORT_TIMEOUT_S = 5.0
_NS = 1e9


class RequestTracer:
    """Sends finished requests as spans. A thread of the SDK sends them; at most 2,048 wait, the rest is dropped."""

    def __init__(self, endpoint: str) -> None:
        """endpoint: URL of a collector, without /v1/traces"""
        name = os.environ.get("OTEL_SERVICE_NAME", "rwkv-batch")
        resource = Resource.create({"service.name": name, "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint.rstrip("/") + TRACES_PATH, timeout=EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("rwkv_batch", __version__)

    def record(self, request: RequestContext, status: int, outcome: str) -> None:
        """Send a request that ends now. `outcome`: see `log_access`."""
        now, monotonic = time.time_ns(), time.monotonic()
        start = now - int((monotonic - request.started) * _NS)
        parent = TraceContextTextMapPropagator().extract({"traceparent": request.traceparent})
        attributes: dict[str, str | int] = {
            "http.request.method": request.method,
            "http.route": request.route,
            "http.response.status_code": status,
            "rwkv.request_id": request.request_id,
            "rwkv.outcome": outcome,
        }
        if request.rows:
            attributes |= {
                "rwkv.rows": request.rows,
                "gen_ai.usage.input_tokens": request.prompt_tokens,
                "gen_ai.usage.output_tokens": request.completion_tokens,
            }
        span = self._tracer.start_span(
            f"{request.method} {request.route}", parent, SpanKind.SERVER, attributes, start_time=start
        )
        if status >= 500 or request.error_kind:
            span.set_status(Status(StatusCode.ERROR, outcome))
        if request.first_byte_s:
            span.add_event("first byte", timestamp=min(start + int(request.first_byte_s * _NS), now))
        if request.queue_s is not None:
            inside = set_span_in_context(span)
            begin = start + int(request.submitted_s * _NS)
            for name, seconds in (("queue", request.queue_s), ("prefill", request.prefill_s), ("decode", None)):
                end = now if seconds is None else min(begin + int(seconds * _NS), now)
                self._tracer.start_span(name, inside, start_time=begin).end(end)
                begin = end
        span.end(now)

    def close(self, timeout_s: float) -> None:
        """Send the spans that wait, for at most `timeout_s` seconds."""
        thread = threading.Thread(target=self._provider.force_flush, name="flush-spans", daemon=True)
        thread.start()
        thread.join(timeout_s)
