"""Throughput counters. The engine's thread writes, any thread reads."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import NamedTuple

import msgspec

from rwkv_batch.core.scheduler import ScheduledRow

logger = logging.getLogger(__name__)

WINDOW_S = 10.0
STEPS_KEPT = 256
MIN_PROMPT_TOKENS = 16
"""Steps that read fewer tokens are not used to measure prefill speed."""
OLD_NAMES = {
    "generated_tokens": "drawn_tokens",
    "computed_tokens": "read_tokens",
    "generated_tokens_per_s": "drawn_tokens_per_s",
    "computed_tokens_per_s": "read_tokens_per_s",
}
"""Former names of the counters. Both names are served."""


class StepTime(NamedTuple):
    """Times of one step, as time.monotonic() in seconds."""

    started: float
    """start of its launch"""
    launched: float
    """end of its launch; more than a few milliseconds after `started` if it had to compile or capture something"""
    ended: float
    """its tokens were read"""
    rows: int
    tokens: int
    batch_rows: int = 0
    """batch rows among `rows`; 0 unless debug logging is on"""


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
        self._steps: deque[StepTime] = deque(maxlen=STEPS_KEPT)

    def count(self, rows: list[ScheduledRow], generated: int, started: float, launched: float) -> None:
        """Count a step whose tokens were just read. Time that two steps share counts once.

        rows: the step's rows, before their tokens are processed
        started, launched: see StepTime
        """
        computed = sum([row.num_tokens for row in rows])  # a list: a generator takes twice as long
        self.steps += 1
        self.generated_tokens += generated
        self.computed_tokens += computed
        now = time.monotonic()
        self._count_prompts(computed - sum([row.uses_device_token for row in rows]), now - max(started, self._last_end))
        self.busy_s += now - max(started, self._last_end)
        self._last_end = now
        logs_first_tokens = logger.isEnabledFor(logging.DEBUG)
        batch_rows = sum(row.sequence.job.is_batch for row in rows) if logs_first_tokens else 0
        self._steps.append(StepTime(started, launched, now, len(rows), computed, batch_rows))
        if logs_first_tokens:
            self._log_first_tokens(rows)
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

    def _log_first_tokens(self, rows: list[ScheduledRow]) -> None:
        """Log the waits of each interactive row before its first token. The log has all steps in that time."""
        step = self._steps[-1]
        if step.tokens > step.rows:
            logger.debug("prompts %s", msgspec.json.encode({"at_s": step.started} | _timing_of(step, 0.0)).decode())
        for row in rows:
            if not row.samples_token or row.sequence.output.tokens or row.sequence.job.is_batch:
                continue
            since = row.sequence.job.submitted_at
            timing = {
                "at_s": round(since, 5),
                "prompt_tokens": row.sequence.prompt_tokens,
                "first_token_ms": round((step.ended - since) * 1e3, 1),
                "queue_ms": round(row.sequence.queue_s * 1e3, 1),
                "waited_ms": round((step.started - since) * 1e3, 1),
                "steps": [_timing_of(one, since) for one in self._steps if one.ended > since],
            }
            logger.debug("first token %s", msgspec.json.encode(timing).decode())

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


def _timing_of(step: StepTime, since: float) -> dict[str, float | int]:
    return {
        "at_ms": round((step.started - since) * 1e3, 1),
        "ms": round((step.ended - step.started) * 1e3, 1),
        "launch_ms": round((step.launched - step.started) * 1e3, 1),
        "rows": step.rows,
        "tokens": step.tokens,
        "batch_rows": step.batch_rows,
    }
