"""`--otlp-endpoint`: the spans that a small collector on this machine receives."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from programs.settings.values import SettingsError, otlp_endpoint
from test.harness import make_request, run, started_engine
from test.programs.batch.runs import fake_service
from test.serving import wait_for

pytestmark = pytest.mark.slow

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.paths: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.paths.add(self.path)
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    for scope in resource.scope_spans:
                        collector.spans.extend(scope.spans)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]


@pytest.fixture
def collector() -> Iterator[Collector]:
    running = Collector()
    try:
        yield running
    finally:
        running.close()


def attributes(span: Any) -> dict[str, Any]:
    values = {one.key: one.value for one in span.attributes}
    return {key: value.string_value or value.int_value for key, value in values.items()}


def test_a_request_is_a_span_with_its_parts(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    service = fake_service(tmp_path, "--otlp-endpoint", collector.url, "--http-workers", "1")
    path = "/openai/v1/completions"
    try:
        traced = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        body = {"prompt": "say One.", "max_tokens": 4}
        assert service.post(path, body, headers=traced).status_code == 200
        stream = service.post(path, {**body, "stream": True}).text
        assert stream.endswith("[DONE]\n\n")
        assert service.post(path, {"max_tokens": 1}).status_code == 400
        assert service.get("/healthz").status_code == 200
        wait_for(lambda: len(collector.named(f"POST {path}")) == 3, 20, "the spans arrive")
    finally:
        service.close()
    answered, streamed, refused = collector.named(f"POST {path}")
    assert collector.paths == {"/v1/traces"} and not collector.named("GET /healthz")
    assert (answered.trace_id.hex(), answered.parent_span_id.hex()) == (TRACE, PARENT)
    assert not streamed.parent_span_id and streamed.trace_id != answered.trace_id
    known = attributes(answered)
    assert known["http.response.status_code"] == 200 and known["gen_ai.usage.output_tokens"] > 0
    assert attributes(refused)["http.response.status_code"] == 400
    for whole in (answered, streamed):
        parts = [span for span in collector.spans if span.parent_span_id == whole.span_id]
        assert [span.name for span in parts] == ["queue", "prefill", "decode"]
        times = [whole.start_time_unix_nano, *(span.start_time_unix_nano for span in parts)]
        assert times == sorted(times) and parts[-1].end_time_unix_nano == whole.end_time_unix_nano
        ends = [span.end_time_unix_nano for span in parts]
        assert ends[:2] == [span.start_time_unix_nano for span in parts[1:]]
    assert not [span for span in collector.spans if span.parent_span_id == refused.span_id]


def test_a_row_knows_how_long_its_prefill_took(tiny_model: Path) -> None:
    with started_engine(tiny_model) as engine:
        finishes = run(engine, make_request("a long prompt " * 50, max_tokens=3)).finishes
    assert finishes[0].prefill_s > 0


def test_a_wrong_endpoint_is_refused() -> None:
    for wrong in ("localhost:4318", "grpc://localhost:4317", "http://a b"):
        with pytest.raises(SettingsError, match="must be a collector's URL like http://localhost:4318"):
            otlp_endpoint(wrong)
    assert otlp_endpoint("") == "" and otlp_endpoint("https://otel.example:4318/x") == "https://otel.example:4318/x"
