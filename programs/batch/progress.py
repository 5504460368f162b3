"""Progress of a run on standard error: a bar, plain lines or JSON lines."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from programs.batch.lines import Outcome

PROGRESS_FORMATS = ("auto", "plain", "json")
_PLAIN_S, _BAR_S = 10.0, 0.5
_PERCENT = 100


@dataclass(slots=True)
class RunStats:
    """Counters of a run. The event loop writes, any thread reads."""

    fraction: Callable[[], float | None]
    """Share of the input that was read."""
    noun: str = "lines"
    """Word for the counted records, in texts for people."""
    answered: int = 0
    failed: int = 0
    skipped: int = 0
    """Lines that an earlier run finished."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    started: float = field(default_factory=time.monotonic)

    def restart(self) -> None:
        """Restarts the clock at the first request. So loading a model does not count."""
        self.started = time.monotonic()

    def count(self, outcome: Outcome) -> None:
        if outcome.problem:
            self.failed += 1
        else:
            self.answered += 1
        self.prompt_tokens += outcome.prompt_tokens
        self.completion_tokens += outcome.completion_tokens

    def figures(self) -> dict[str, float | int | None]:
        """Returns all counters and this run's rates."""
        seconds = max(1e-9, time.monotonic() - self.started)
        done = self.answered + self.failed
        read = self.fraction()
        eta = None
        if read is not None and done:
            scale = (self.skipped + done) / done
            eta = seconds * max(0.0, 1.0 - read) / max(read / scale, 1e-9)
        return {
            "lines": self.skipped + done,
            "failed": self.failed,
            "resumed": self.skipped,
            "read": None if read is None else round(read, 4),
            "lines_per_s": round(done / seconds, 2),
            "tokens_per_s": round((self.prompt_tokens + self.completion_tokens) / seconds, 1),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "seconds": round(seconds, 1),
            "eta_s": None if eta is None else round(eta, 1),
        }


class Reporter:
    """Context manager that reports the counters from its own thread."""

    def __init__(self, stats: RunStats, progress_format: str) -> None:
        self._stats = stats
        self._format = progress_format
        self._stopped = threading.Event()
        self._bar: tqdm | None = None
        self._logs = contextlib.ExitStack()
        """Prints log lines above the bar."""
        if progress_format == "auto" and sys.stderr.isatty():
            bar = "{percentage:3.0f}%|{bar}| {desc}"
            self._bar = tqdm(total=_PERCENT, bar_format=bar, file=sys.stderr)
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> Reporter:
        if self._bar is not None:
            self._logs.enter_context(logging_redirect_tqdm())
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()
        if self._format == "json":
            self._write()
            return
        if self._bar is not None:
            self._write()
            self._bar.close()
            self._logs.close()
        sys.stderr.write(summary(self._stats.figures(), self._stats.noun))

    def _run(self) -> None:
        while not self._stopped.wait(_PLAIN_S if self._bar is None else _BAR_S):
            self._write()

    def _write(self) -> None:
        figures = self._stats.figures()
        if self._bar is not None:
            self._bar.n = round(_PERCENT * (figures["read"] or 0))
            self._bar.set_description_str(as_text(figures, self._stats.noun))
        else:
            sys.stderr.write(
                (json.dumps(figures) if self._format == "json" else as_text(figures, self._stats.noun)) + "\n"
            )
            sys.stderr.flush()


def as_text(figures: dict[str, float | int | None], noun: str) -> str:
    """Formats the counters for people."""
    parts = [f"{figures['lines']} {noun if figures['lines'] != 1 else noun.removesuffix('s')}"]
    if figures["read"] is not None:
        parts[0] += f" ({figures['read']:.0%} read)"
    if figures["resumed"]:
        parts.append(f"{figures['resumed']} of them before")
    parts += [f"{figures['failed']} failed", f"{figures['lines_per_s']} {noun}/s"]
    if figures["tokens_per_s"]:  # some routes report no tokens
        parts.append(f"{figures['tokens_per_s']} tokens/s")
    if figures["eta_s"]:
        parts.append(f"{time.strftime('%H:%M:%S', time.gmtime(figures['eta_s']))} left")
    return ", ".join(parts)


def summary(figures: dict[str, float | int | None], noun: str) -> str:
    """Formats the counters of a finished run."""
    resumed = f", {figures['resumed']} of them before" if figures["resumed"] else ""
    tokens, speed = "", ""
    if figures["prompt_tokens"]:  # none for cached answers, and from services that report no tokens
        tokens = f"tokens  {figures['prompt_tokens']:,} read, {figures['completion_tokens']:,} new\n"
        speed = f", {figures['tokens_per_s']:,} tokens/s"
    return (
        f"{noun}   {figures['lines']:,}{resumed}; {figures['failed']:,} failed\n"
        f"{tokens}"
        f"time    {figures['seconds']:,} s: {figures['lines_per_s']:,} {noun}/s{speed}\n"
    )
