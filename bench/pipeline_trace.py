"""When each stage worked on each step, and what the host did meanwhile: a timeline for `bench.pipeline --trace`.

Two events around every graph of every stage, on that stage's stream; the host's clock around what its loop does. Both
cost the host some 2 us an event, so a traced run is a little slower than one that is not: shares and order count, not
tokens/s. All times are in ms since the trace began.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from rwkv_batch.engine import Engine
from rwkv_batch.runner import links, model_runner
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
    """Follows an engine that runs graphs, from `begin` to `end`; made before it serves, read after."""

    def __init__(self, engine: Engine) -> None:
        machine = engine.machine
        assert machine._graphs is not None, "only graphs are traced"
        self._places = machine._graphs.places
        self._engine = engine
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
        host = [(machine, "read", "wait"), (machine.pipeline, "forward", "eager forward"), (machine._drawing, "draw", "draw")]
        host += [(engine.jobs, name, name) for name in ("commit", "deliver", "launched", "expire")]
        host += [(engine.scheduler, "schedule", "schedule"), (engine, "_drain_inbox", "inbox")]
        host += [(links.Link, "send", "link.send"), (links.Link, "receive", "link.receive")]
        host += [(model_runner.HostCopy, "__init__", "host copy"), (torch.cuda.Event, "synchronize", "event wait")]
        host += [(machine.pool, "poll", "pool")]
        for owner, attribute, name in host:
            self._replace(owner, attribute, self._timed(name, getattr(owner, attribute)))

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append((owner, name, owner.__dict__.get(name)))
        setattr(owner, name, value)

    def close(self) -> None:
        """Leave the engine as it was."""
        gc.callbacks.remove(self._garbage)
        for owner, name, value in reversed(self._undo):
            if value is None:
                delattr(owner, name)
            else:
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

        def kept(rows: list[Any], after: Any = ()) -> Any:
            reads, decodes = not rows[-1].feeds_back, rows[0].feeds_back
            self._kind = "m" if reads and decodes else "p" if reads else "d"
            return timed(rows, after)

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

    def begin(self) -> None:
        """Any thread: from here on."""
        self._zero = []
        for place in self._places:
            with torch.cuda.device(place.device):
                event = torch.cuda.Event(enable_timing=True)
                stream = torch.cuda.Stream(place.device)
                stream.synchronize()
                event.record(stream)
                event.synchronize()
            self._zero.append((event, time.perf_counter()))
        self._host.clear()
        self._events.clear()
        self._started = time.perf_counter()
        self._is_on = True

    def end(self) -> tuple[list[HostSpan], list[StageSpan]]:
        """Any thread, with steps under way: what was seen."""
        self._is_on = False
        events, host = list(self._events), list(self._host)
        for place in self._places:
            torch.cuda.synchronize(place.device)
        stages = []
        for stage, step, kind, three in events:
            zero, at = self._zero[stage]
            times = [zero.elapsed_time(event) + (at - self._started) * 1e3 for event in three]
            stages.append(StageSpan(stage, step, kind, *times))
        shift = self._started
        return [HostSpan(n, s, (a - shift) * 1e3, (b - shift) * 1e3) for n, s, a, b in host], stages


def summary(host: list[HostSpan], stages: list[StageSpan]) -> dict[str, Any]:
    """Of a trace: ms a step; each stage's share of work and of waiting for the one before; the host's ms a step."""
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
    calls: dict[str, list[float]] = defaultdict(list)
    for name, _, began, ended in host:
        calls[name].append(ended - began)
    return {
        "steps": steps,
        "ms_per_step": round(length / steps, 3),
        "work_share": [round(work[stage] / length, 3) for stage in sorted(work)],
        "waits_share": [round(waits[stage] / length, 3) for stage in sorted(work)],
        "ms_by_stage_and_kind": {f"{s}{k}": [len(ms), round(sum(ms) / len(ms), 3)] for (s, k), ms in sorted(kinds.items())},
        "host_ms_per_step": {name: [len(ms), round(sum(ms) / steps, 3), round(max(ms), 3)] for name, ms in sorted(calls.items())},
    }
