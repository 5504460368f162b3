"""How fast the engine has been lately. Engine thread writes, anyone reads."""

from __future__ import annotations

import time

from rwkv_batch.scheduler import ScheduledRow

WINDOW_S = 10.0


class Speed:
    """Counters of all time and a sliding rate of the last seconds."""

    def __init__(self) -> None:
        self.steps = 0
        self.drawn_tokens = 0
        self.read_tokens = 0
        self.busy_s = 0.0
        self._last_end = 0.0
        self._window: list[tuple[float, int, int]] = []
        """(time, tokens drawn, tokens read) of coarse buckets, oldest first"""

    def count(self, rows: list[ScheduledRow], drawn: int, started: float) -> None:
        """Count one step, launched at `started` (perf_counter); time that two steps share counts once."""
        read = sum(row.num_tokens for row in rows)
        self.steps += 1
        self.drawn_tokens += drawn
        self.read_tokens += read
        ended = time.perf_counter()
        self.busy_s += ended - max(started, self._last_end)
        self._last_end = ended
        now = time.monotonic()
        if self._window and now - self._window[-1][0] < 0.25:
            began, drawn_before, read_before = self._window[-1]
            self._window[-1] = (began, drawn_before + drawn, read_before + read)
        else:
            self._window = [entry for entry in self._window if now - entry[0] < WINDOW_S]
            self._window.append((now, drawn, read))

    def figures(self) -> dict[str, float | int]:
        """Plain data for /status and /metrics; rates over the last ten seconds."""
        now = time.monotonic()
        recent = [entry for entry in self._window if now - entry[0] < WINDOW_S]
        span = max(now - recent[0][0], 0.25) if recent else 1.0
        return {
            "steps": self.steps,
            "drawn_tokens": self.drawn_tokens,
            "read_tokens": self.read_tokens,
            "busy_s": round(self.busy_s, 3),
            "drawn_tokens_per_s": round(sum(entry[1] for entry in recent) / span, 1),
            "read_tokens_per_s": round(sum(entry[2] for entry in recent) / span, 1),
        }
