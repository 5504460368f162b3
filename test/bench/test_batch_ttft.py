"""What `bench.batch.ttft` says of slow requests, of what the service's log tells."""

from __future__ import annotations

import json
from pathlib import Path

from bench.batch.ttft import Asked, explained


def line(process: str, what: str, **fields: object) -> str:
    return f"07:20:11.585 {process:<10} DEBUG   {what} {json.dumps(fields)}\n"


def test_the_slowest_requests_are_told_with_what_the_service_did_meanwhile(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "07:20:11.585 engine-0   INFO    serving rwkv7\n"
        + line("engine-0", "prompts", at_s=99.99, ms=30.0, tokens=1024, batch_rows=40)
        + line("http-1", "collection", at_s=99.0, ms=5.0, generation=2)
        + line("http-1", "collection", at_s=100.02, ms=5.0, generation=1)
        + line("engine-0", "first token", at_s=100.002, first_token_ms=36.0, seated_ms=20.0, waited_ms=25.0)
    )
    requests = [Asked("idle", 60, 50.0, 0.008), Asked("96", 60, 90.0, 0.01), Asked("96", 60, 100.0, 0.04)]
    told = explained(requests, log, most=1)
    assert list(told) == ["idle, 60 words", "96, 60 words"]
    assert told["idle, 60 words"] == [{"first_ms": 8.0, "prompts": [], "collection": []}], "the log has nothing of it"
    (slow,) = told["96, 60 words"]
    parts = {"to_engine": 2.0, "seated": 20.0, "launched": 5.0, "read": 11.0, "to_client": 2.0}
    assert slow.items() >= ({"first_ms": 40.0} | parts).items()
    (step,), (collection,) = slow["prompts"], slow["collection"]
    assert (step["from_sending_ms"], step["tokens"]) == (-10.0, 1024)
    assert (collection["process"], collection["from_sending_ms"]) == ("http-1", 20.0)
