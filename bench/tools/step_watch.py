"""What engines do during a run: rows that run and time of a step, by the status that each is asked for meanwhile."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from functools import partial
from typing import Any, NamedTuple

from cluster.fleet import Fleet
from rwkv_batch.calls import GetStatus
from rwkv_batch.errors import ServiceError

LOOK_S = 0.2


class Look(NamedTuple):
    """An engine at a moment."""

    at: float
    """seconds since the watch began"""
    rows: int
    """that run"""
    steps: int
    busy_s: float
    """of all its steps so far"""


class StepWatch:
    """Looks at every engine of a fleet, five times a second, from `start` to `stop`."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._looks: dict[str, list[Look]] = {member.name: [] for member in fleet.members}
        self._begun = time.perf_counter()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> dict[str, dict[str, Any]]:
        """End; of each engine what `summary` says."""
        self._stopped.set()
        self._thread.join()
        return {name: summary(looks) for name, looks in sorted(self._looks.items())}

    def _watch(self) -> None:
        while True:
            for member in self._fleet.members:
                member.client.call(GetStatus(), partial(self._note, member.name))
            if self._stopped.wait(LOOK_S):
                return

    def _note(self, name: str, answer: dict[str, Any] | ServiceError) -> None:
        if isinstance(answer, ServiceError):
            return
        at = time.perf_counter() - self._begun
        self._looks[name].append(Look(at, int(answer["running_rows"]), int(answer["steps"]), float(answer["busy_s"])))


def summary(looks: list[Look]) -> dict[str, Any]:
    """Most rows; the median step with at least nine tenths of them, in ms; seconds busy; each look as [s, rows, ms]."""
    seen = []
    for before, now in itertools.pairwise(looks):
        steps = now.steps - before.steps
        ms = round((now.busy_s - before.busy_s) / steps * 1e3, 2) if steps else 0.0
        seen.append((round(now.at, 2), min(before.rows, now.rows), ms))
    most = max((look.rows for look in looks), default=0)
    full = [ms for _, rows, ms in seen if rows >= 0.9 * most and ms]
    return {
        "rows": most,
        "step_ms": round(statistics.median(full), 2) if full else None,
        "busy_s": round(looks[-1].busy_s - looks[0].busy_s, 2) if looks else 0.0,
        "looks": seen,
    }
