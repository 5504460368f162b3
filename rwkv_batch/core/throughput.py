"""Throughput counters. The engine's thread writes, any thread reads."""

from __future__ import annotations

import time

from rwkv_batch.core.scheduler import ScheduledRow

WINDOW_S = 10.0
MIN_PROMPT_TOKENS = 16
"""Steps that read fewer tokens are not used to measure prefill speed."""
OLD_NAMES = {
    "generated_tokens": "drawn_tokens",
    "computed_tokens": "read_tokens",
    "generated_tokens_per_s": "drawn_tokens_per_s",
    "computed_tokens_per_s": "read_tokens_per_s",
}
"""Former names of the counters. Both names are served."""


class Throughput:
    """Total counters and the rate of the last seconds."""

    def __init__(self) -> None:
        self.steps = 0
        self.generated_tokens = 0
        self.computed_tokens = 0
        self.busy_s = 0.0
        self._last_end = 0.0
        self._prompt_speed = 0.0
        """smoothed prompt tokens per second in steps with prefill"""
        self._window: list[tuple[float, int, int]] = []
        """(time, tokens generated, tokens computed) in coarse buckets, oldest first"""

    def count(self, rows: list[ScheduledRow], generated: int, started: float) -> None:
        """Count a step whose tokens were just read. Time that two steps share counts once.

        rows: the step's rows, before their tokens are processed
        started: begin of its launch, as time.monotonic()
        """
        computed = sum([row.num_tokens for row in rows])  # a list: a generator takes twice as long
        self.steps += 1
        self.generated_tokens += generated
        self.computed_tokens += computed
        now = time.monotonic()
        self._count_prompts(computed - sum([row.uses_device_token for row in rows]), now - max(started, self._last_end))
        self.busy_s += now - max(started, self._last_end)
        self._last_end = now
        if self._window and now - self._window[-1][0] < 0.25:
            began, generated_before, computed_before = self._window[-1]
            self._window[-1] = (began, generated_before + generated, computed_before + computed)
        else:
            self._window = [entry for entry in self._window if now - entry[0] < WINDOW_S]
            self._window.append((now, generated, computed))

    def count_added(self, tokens: int) -> None:
        """Add tokens to the last counted step: appended without sampling, or sampled after accepted drafts."""
        self.generated_tokens += tokens
        at, generated, computed = self._window[-1]
        self._window[-1] = (at, generated + tokens, computed)

    def _count_prompts(self, num_tokens: int, seconds: float) -> None:
        if num_tokens >= MIN_PROMPT_TOKENS and seconds > 0:
            speed = num_tokens / seconds
            self._prompt_speed = 0.9 * self._prompt_speed + 0.1 * speed if self._prompt_speed else speed

    def prefill_time_s(self, num_tokens: int) -> float:
        """Return the seconds to read these prompt tokens. 0 if the speed is unknown."""
        return num_tokens / self._prompt_speed if self._prompt_speed else 0.0

    def stats(self) -> dict[str, float | int]:
        """Return counters and rates for /status and /metrics. The rates are those of the last ten seconds."""
        now = time.monotonic()
        recent = [entry for entry in self._window if now - entry[0] < WINDOW_S]
        span = max(now - recent[0][0], 0.25) if recent else 1.0
        stats: dict[str, float | int] = {
            "generated_tokens": self.generated_tokens,
            "computed_tokens": self.computed_tokens,
            "generated_tokens_per_s": round(sum(entry[1] for entry in recent) / span, 1),
            "computed_tokens_per_s": round(sum(entry[2] for entry in recent) / span, 1),
        }
        return {
            "steps": self.steps,
            "busy_s": round(self.busy_s, 3),
            **stats,
            **{OLD_NAMES[name]: value for name, value in stats.items()},
        }
