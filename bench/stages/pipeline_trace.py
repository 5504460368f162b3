"""When each stage worked on each step, and what the host did meanwhile: a timeline for `bench.pipeline --trace`.

Events around every graph of every stage, on that stage's stream; the host's clock around what its loop does. Both cost
the host microseconds, so steps take longer while they are traced: shares and order count, not tokens/s. A stage that
"works" longer than its kernels take waits inside its graph. All times are in ms since the trace began.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from rwkv_batch.engine import Engine
from rwkv_batch.runner import links
from rwkv_batch.runner.stage_graphs import GraphStage

Span = tuple[float, float]


class StageSpan(NamedTuple):
    """One graph on one stage."""

    stage: int
    step: int
    kind: str
    """"d": rows that decode, "p": prompts, "m": both"""
    given: float
    """the stage had done all before it"""
    began: float
    """what the stage before has left was there"""
    ended: float


class HostSpan(NamedTuple):
    """One call on the engine's thread."""

    name: str
    step: int
    began: float
    ended: float


class Trace:
    """Follows an engine that runs graphs while the block lasts; made while it stands still."""

    def __init__(self, engine: Engine) -> None:
        machine = engine.machine
        assert machine.graphs.decode is not None, "only graphs are traced"
        self._places = machine.graphs.decode.places
        self._engine = engine
        self.stages: list[StageSpan] = []
        self.host: list[HostSpan] = []
        self._is_on = False
        self._kind = ""
        self._host: list[tuple[str, int, float, float]] = []
        self._events: list[tuple[int, int, str, list[torch.cuda.Event]]] = []
        self._undo: list[tuple[Any, str, Any]] = []
        self._zero: list[tuple[torch.cuda.Event, float]] = []
        self._started = self._garbage_began = 0.0
        self._watch()
        gc.callbacks.append(self._garbage)

    def _garbage(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._garbage_began = time.perf_counter()
        elif self._is_on:
            name = f"garbage {info['generation']}"
            self._host.append((name, self._engine._next_step, self._garbage_began, time.perf_counter()))

    def _watch(self) -> None:
        engine, machine = self._engine, self._engine.machine
        for number, place in enumerate(self._places):
            self._replace(place, "run", self._stage_run(number, place))
        self._replace(machine, "launch", self._launch(machine.launch))
        host: list[tuple[Any, str, str]] = [(machine, "read", "wait"), (machine.pipeline, "forward", "eager forward")]
        host += [(machine._drawing, "draw", "draw")]
        host += [(engine.jobs, name, name) for name in ("commit", "deliver", "launched", "expire")]
        host += [(engine.scheduler, "schedule", "schedule"), (engine._inbox, "do_all", "inbox")]
        host += [(links.Link, "send", "link.send"), (links.Link, "receive", "link.receive")]
        host += [(machine._copies, "start", "host copy"), (torch.cuda.Event, "synchronize", "event wait")]
        host += [(machine.pool, "poll", "pool")]
        for owner, attribute, name in host:
            self._replace(owner, attribute, self._timed(name, getattr(owner, attribute)))

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append((owner, name, owner.__dict__.get(name)))
        setattr(owner, name, value)

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self._is_on:
                return call(*args, **kwargs)
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._host.append((name, self._engine._next_step, began, time.perf_counter()))

        return timed

    def _launch(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        timed = self._timed("launch", launch)

        def kept(rows: list[Any], *others: Any) -> Any:
            reads, decodes = not rows[-1].feeds_back, rows[0].feeds_back
            self._kind = "m" if reads and decodes else "p" if reads else "d"
            return timed(rows, *others)

        return kept

    def _stage_run(self, number: int, place: GraphStage) -> Callable[..., None]:
        plain = place.run

        def run(replay: Callable[[], None], tokens: int, before: GraphStage | None) -> None:
            if not self._is_on:
                plain(replay, tokens, before)
                return
            events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            stream = torch.cuda.current_stream(place.device)
            events[0].record(stream)

            def between() -> None:
                events[1].record(stream)
                began = time.perf_counter()
                replay()
                self._host.append(("replay", self._engine._next_step, began, time.perf_counter()))
                events[2].record(stream)

            plain(between, tokens, before)
            self._events.append((number, self._engine._next_step, self._kind, events))

        return run

    def follow(self, seconds: float = 0.5) -> None:
        """Any thread, with steps under way: watch for so long."""
        self._zero = []
        for place in self._places:
            with torch.cuda.device(place.device):
                event, stream = torch.cuda.Event(enable_timing=True), torch.cuda.Stream(place.device)
                event.record(stream)
                event.synchronize()
            self._zero.append((event, time.perf_counter()))
        self._started = time.perf_counter()
        self._is_on = True
        time.sleep(seconds)
        self._is_on = False
        events, host = list(self._events), list(self._host)
        for place in self._places:
            torch.cuda.synchronize(place.device)
        for stage, step, kind, three in events:
            zero, at = self._zero[stage]
            given, began, ended = (zero.elapsed_time(event) + (at - self._started) * 1e3 for event in three)
            self.stages.append(StageSpan(stage, step, kind, given, began, ended))
        since = self._started
        self.host += [HostSpan(name, step, (a - since) * 1e3, (b - since) * 1e3) for name, step, a, b in host]

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the engine as it was."""
        gc.callbacks.remove(self._garbage)
        for owner, name, value in reversed(self._undo):
            if value is None:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def summary(host: list[HostSpan], stages: list[StageSpan]) -> dict[str, Any]:
    """Of a trace: ms a step; what share of the time each stage works, and waits for the one before; ms of each stage's
    graphs by kind, and ms from the end of one until the next is given, the median and the mean: copies, what the host
    fills in, on the first stage waiting for tokens too; the host's ms a step, calls inside calls counted in both."""
    steps = len({span.step for span in stages})
    if steps < 2:
        return {"steps": steps}
    length = max(span.ended for span in stages) - min(span.began for span in stages)
    work: dict[int, float] = defaultdict(float)
    waits: dict[int, float] = defaultdict(float)
    kinds: dict[tuple[int, str], list[float]] = defaultdict(list)
    for span in stages:
        work[span.stage] += span.ended - span.began
        waits[span.stage] += span.began - span.given
        kinds[span.stage, span.kind].append(span.ended - span.began)
    between: dict[int, list[float]] = defaultdict(list)
    ordered = sorted(stages, key=lambda span: (span.stage, span.given))
    for span, later in itertools.pairwise(ordered):
        if span.stage == later.stage:
            between[span.stage].append(later.given - span.ended)
    calls: dict[str, float] = defaultdict(float)
    for name, _, began, ended in host:
        calls[name] += ended - began
    return {
        "steps": steps,
        "ms_per_step": round(length / steps, 3),
        "works": {str(stage): round(ms / length, 3) for stage, ms in sorted(work.items())},
        "waits": {str(stage): round(ms / length, 3) for stage, ms in sorted(waits.items())},
        "graph_ms": {f"{stage}{kind}": round(sum(ms) / len(ms), 3) for (stage, kind), ms in sorted(kinds.items())},
        "between_ms": {
            str(stage): [round(statistics.median(ms), 3), round(statistics.mean(ms), 3)]
            for stage, ms in sorted(between.items())
        },
        "graphs": {f"{stage}{kind}": len(ms) for (stage, kind), ms in sorted(kinds.items())},
        "host_ms_per_step": {name: round(ms / steps, 3) for name, ms in sorted(calls.items())},
    }
