"""Where the time of an engine's steps goes: named methods of its thread, timed while a bench asks for it.

`StepParts(engine)` puts clocks around them; each counts its own time, less that of those it calls, by the wall and of
all the process's threads: what is the same in both is done by one thread while the other cores wait. What bounds it:
four readings of a clock a call, some microseconds a step and two for each token under a grammar.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from rwkv_batch.core import job_table
from rwkv_batch.engine import Engine
from rwkv_batch.runner.drawing import Drawing
from sampling.grammar.masks import Masks
from sampling.grammar.matcher import Matcher


class StepParts:
    """Milliseconds of each part. The engine's thread writes, any other may read."""

    def __init__(self, engine: Engine) -> None:
        """Of an engine that has started; its methods stay wrapped."""
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._inner: list[tuple[float, float]] = []
        runner = engine.machine
        for owner, method, name in (
            (engine, "step", "loop"),
            (engine.scheduler, "schedule", "schedule"),
            (runner, "launch", "launch"),
            (runner.pipeline, "forward", "forward"),
            (runner.pipeline.stages[-1], "logits", "head"),
            (runner.sampler(""), "sample", "draw"),
            (engine.jobs, "commit", "commit"),
            (engine.jobs, "deliver", "deliver"),
            (Drawing, "draw_constrained", "draw_constrained"),
            (Masks, "fill", "masks"),
            (Matcher, "advance", "follow"),
            (Matcher, "certain", "find_certain"),
            (job_table, "take_certain", "take_certain"),
        ):
            setattr(owner, method, self._timed(getattr(owner, method), name))

    def read(self, steps: int) -> dict[str, float]:
        """Milliseconds a step of each part since the last reading."""
        spent, self._spent = self._spent, defaultdict(float)
        return {name: seconds * 1e3 / max(1, steps) for name, seconds in sorted(spent.items())}

    def _timed(self, act: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started, used = time.perf_counter(), time.process_time()
            self._inner.append((0.0, 0.0))
            try:
                return act(*args, **kwargs)
            finally:
                spent, used = time.perf_counter() - started, time.process_time() - used
                inner_spent, inner_used = self._inner.pop()
                self._spent[f"{name}_ms"] += spent - inner_spent
                self._spent[f"{name}_processor_ms"] += used - inner_used
                if self._inner:
                    outer_spent, outer_used = self._inner[-1]
                    self._inner[-1] = outer_spent + spent, outer_used + used

        return timed
