"""How long one interactive request waits beside bulk requests that never end: the engine alone, clients of its own.

    python -m bench.engine.fairness --bulk 0,1,3,30 --max-running 32 [--model-path FILE] [--seconds 20]

Each bulk request has `--rows` rows that draw without end; `--bulk-clients` clients send them. One interactive client at
a time asks for 16 tokens, again as soon as it is answered. Measured: its time to the first token (chunks of one token)
and to the last, at the median and the 99th of a hundred, and the same counted in steps of the engine, which no other
load of the machine changes. What bounds it: the step that is under way when a request comes, and the steps it takes
part in, each with all the rows that have a place; not the number of bulk requests. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.tools.origin import origin
from rwkv_batch.engine import Engine
from rwkv_batch.request import GenerateRequest, Job, JobEvents, Priority
from sampling.params import SamplingParams
from settings import parse_settings
from settings.model_file import with_model

ANSWER_TOKENS = 16
ENDLESS = 10**9
PROMPT = (300, 301, 302)
WAIT_S = 600.0


def row(max_tokens: int, chunk_size: int) -> GenerateRequest:
    """A short prompt and so many tokens."""
    return GenerateRequest(
        prompt=list(PROMPT),
        max_tokens=max_tokens,
        sampling=SamplingParams(seed=max_tokens),
        ignore_eos=True,
        chunk_size=chunk_size,
    )


class Asked:
    """One interactive request, from submission to its end; seconds, and steps of the engine."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._ended = threading.Event()
        self.first_s = 0.0
        self.first_steps = 0
        self._steps = engine.speed.steps
        self._started = time.perf_counter()
        job = Job(job_id=name, rows=[row(ANSWER_TOKENS, 1)], client="interactive", priority=Priority.INTERACTIVE)
        engine.submit(job, self._sink, _refused)

    def _sink(self, events: JobEvents) -> None:
        if events.deltas and not self.first_s:
            self.first_s = time.perf_counter() - self._started
            self.first_steps = self._engine.speed.steps - self._steps
        if events.done:
            self.whole_s = time.perf_counter() - self._started
            self.whole_steps = self._engine.speed.steps - self._steps
            self._ended.set()

    def wait(self) -> Asked:
        """Until it is answered."""
        if not self._ended.wait(WAIT_S):
            raise RuntimeError(f"an interactive request was not answered within {WAIT_S:.0f} s")
        return self


def _refused(refusal: Any) -> None:
    if refusal is not None:
        raise RuntimeError(f"refused: {refusal}")


def bulk(engine: Engine, requests: int, clients: int, rows: int) -> list[threading.Event]:
    """Begin so many endless bulk requests; their ends."""
    ends = []
    for number in range(requests):
        ended = threading.Event()
        ends.append(ended)

        def sink(events: JobEvents, ended: threading.Event = ended) -> None:
            if events.done:
                ended.set()

        job = Job(job_id=f"bulk{number}", rows=[row(ENDLESS, 64)] * rows, client=f"bulk{number % clients}")
        engine.submit(job, sink, _refused)
    return ends


def figures(values: list[float], scale: float = 1e3) -> dict[str, float]:
    """Median and the 99th of a hundred."""
    cuts = statistics.quantiles(values, n=100) if len(values) > 1 else [values[0]] * 99
    return {"p50": round(cuts[49] * scale, 1), "p99": round(cuts[98] * scale, 1), "max": round(max(values) * scale, 1)}


def measure(engine: Engine, requests: int, args: argparse.Namespace) -> dict[str, Any]:
    """One line: interactive requests one after another beside so many bulk requests."""
    ends = bulk(engine, requests, args.bulk_clients, args.rows)
    Asked(engine, "warm").wait()
    deadline = time.perf_counter() + args.seconds
    asked: list[Asked] = []
    while time.perf_counter() < deadline:
        asked.append(Asked(engine, f"hi{len(asked)}").wait())
    for number in range(requests):
        engine.cancel(f"bulk{number}")
    for ended in ends:
        ended.wait(WAIT_S)
    return {
        "bulk_requests": requests,
        "requests": len(asked),
        "first_token_ms": figures([one.first_s for one in asked]),
        "whole_ms": figures([one.whole_s for one in asked]),
        "first_token_steps": figures([one.first_steps for one in asked], 1),
        "whole_steps": figures([one.whole_steps for one in asked], 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bulk", default="0,1,3,30", help="numbers of bulk requests, one line each")
    parser.add_argument("--bulk-clients", type=int, default=1)
    parser.add_argument("--rows", type=int, default=200, help="rows of a bulk request")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each line")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    parser.add_argument("--commit", default="", help="to be written down where git is not at hand")
    args, rest = parser.parse_known_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--state-db", str(Path(folder) / "s.db"), "--max-waiting-rows", "1000000", *rest]
        settings = with_model(
            parse_settings(
                flags, {"RWKV_MAX_RUNNING": "32", "RWKV_MAX_WAITING_ROWS_PER_CLIENT": "1000000", **os.environ}
            )
        )
        engine = Engine(settings.engine)
        engine.start()
        try:
            lines = [measure(engine, int(number), args) for number in args.bulk.split(",")]
            shape = {"max_running": engine.machine.limits.max_running, "devices": engine.machine.device_names()}
        finally:
            engine.stop()
    for line in lines:
        print(json.dumps(line))
    result = json.dumps({"bench": "fairness", **origin(args.commit), **shape, "rows": args.rows, "lines": lines})
    if args.out is not None:
        args.out.write_text(result + "\n")
    print(result)


if __name__ == "__main__":
    main()
