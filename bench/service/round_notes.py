"""What is noted beside rounds: gaps of streams, what processes meet on their cores, the scheduler's events."""

from __future__ import annotations

import argparse
import json
import math
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.service.coming_models import Service
from bench.service.core_watch import around, samples, watch
from bench.service.gap_clients import Beside, Receiver, address, receive, receive_from_engine
from bench.service.gaps import Span, figures, longest
from bench.service.scheduler_events import Buffers
from bench.tools.http_load import Load

MAX_TOKENS = 60_000
"""Of a stream: none ends before the run does."""
TRACED_GAPS = 6
NOTED_S = 0.3
"""So often a gap that is to be traced is looked for."""


class Notes:
    """What is noted beside the streams: their gaps, what processes meet on their cores, the scheduler's events."""

    def __init__(self, served: Service, load: Load, folder: Path, args: argparse.Namespace) -> None:
        self._args, self._folder = args, folder
        self.client = Receiver(receive, folder / "gaps", load, *address(served.url))
        while served.status()["running_rows"] < args.streams:
            time.sleep(0.1)
        self.direct = Receiver(receive_from_engine, folder / "engine-gaps", served.engine, MAX_TOKENS)
        workers = served.status()["processes"]["http_workers"]
        self._names = {served.engine: "engine", **{w["pid"]: w["name"] for w in workers if w["name"] != "bench"}}
        self._watch = Beside(watch, folder / "cores", list(self._names))
        self.buffers: Buffers | None = None
        self._end = threading.Event()

    def trace(self, buffers: Buffers, above_s: float) -> None:
        """From now on keep the scheduler's events of the longest gaps among those that are longer."""

        since = time.monotonic()

        def look() -> None:
            while not self._end.wait(NOTED_S):
                new = [gap for one in (self.client, self.direct) for gap in one.look()]
                long = [gap for gap in new if gap[2] > above_s and gap[1] - gap[2] > since]
                if long:
                    buffers.keep(longest(long, [(since, math.inf)], TRACED_GAPS))

        self.buffers = buffers
        threading.Thread(target=look, daemon=True).start()

    def long_s(self, spans: Sequence[Span]) -> float:
        """From how long on a gap is to be traced: one and a half of the longest but one of a hundred of that time."""
        self.client.look()
        found = sorted(gap for _, at, gap in self.client.gaps if any(b <= at < e for b, e in spans))
        return 1.5 * found[int(0.99 * (len(found) - 1))]

    def stop(self) -> None:
        """Nothing is noted any more."""
        self._end.set()
        if self.buffers is not None:
            self.buffers.stop()
        self.client.stop()
        self.direct.stop()
        self._watch.end()

    def told(self, alone: Sequence[Span], in_rounds: Sequence[Span]) -> dict[str, Any]:
        """Figures of all gaps by now."""
        self.client.look()
        self.direct.look()
        direct = figures(self.direct.gaps, alone, in_rounds, self._args.period_s)
        return {**figures(self.client.gaps, alone, in_rounds, self._args.period_s), "engine_stream": direct}

    def longest(self, spans: Sequence[Span]) -> list[dict[str, Any]]:
        """The longest gaps of that time, and what was noted then."""
        noted, log = samples(self._folder / "cores"), (self._folder / "service.log").read_text(errors="replace")
        told = []
        for begin, end in longest(self.client.gaps, spans, self._args.longest):
            direct = [gap for _, at, gap in self.direct.gaps if begin <= at and at - gap <= end]
            found: dict[str, Any] = {
                "ended_s": round(end, 3),
                "at_s": round(begin - spans[0][0], 2),
                "ms": _ms(end - begin),
            }
            found |= {"engine_stream_ms": _ms(max(direct, default=0.0)), "collections": collections(log, begin, end)}
            told.append(found | around(noted, begin, end, self._names))
        return told

    def traced(self) -> list[dict[str, Any]]:
        """What the scheduler says of the longest gaps."""
        if self.buffers is None:
            return []
        threads = {}
        for pid, name in self._names.items():
            for task in Path(f"/proc/{pid}/task").iterdir():
                threads[int(task.name)] = name
        return self.buffers.told(threads, Path(self._args.trace))


def collections(log: str, begin: float, end: float) -> list[str]:
    """Collections of garbage in that time (monotonic s), by the log of all processes."""
    found = []
    for what in _COLLECTION.finditer(log):
        told = json.loads(what[2])
        if begin <= told["at_s"] + told["ms"] / 1e3 and told["at_s"] <= end:
            found.append(f"{what[1]} generation {told['generation']} {told['ms']} ms")
    return found


_COLLECTION = re.compile(r"(\S+) +DEBUG +collection (\{.*?\})")
"""A process's name and what it tells; lines of several processes may be one."""


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)
