"""Memory, threads and file descriptors of the service's processes, and whether they grow.

Also the resources that the service holds while idle.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.chaos.service import HEADERS
from test.ray_nodes import descendants

SAMPLE_S = 2.0
FLAT = 0.01
"""Growth per hour, as a share, that counts as flat."""
FLAT_COUNT = 2.0
"""The same for files and descriptors: how many more during the whole run. One of thirty is 3 %."""
FLAT_THREADS = FLAT_COUNT + (os.cpu_count() or 1) + 4
"""The same for threads: asyncio's pool starts up to this many, each when all others are busy, so it fills for hours."""
BLOCKS = 24
"""Time blocks, each reduced to its median: samples of neighbouring seconds are not independent."""
LONG_S = 1800.0
"""From this length on, the upper bound must be below FLAT. Shorter runs only fail if the lower one is above."""
_SIGMAS = 1.96
"""95 %."""


@dataclass(frozen=True, slots=True)
class Figures:
    anonymous: int
    """Resident bytes without a file behind them. File pages come and go with memory pressure."""
    threads: int
    descriptors: int


def figures_of(pid: int) -> Figures | None:
    """Return the figures of a process; None if it has ended."""
    try:
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        rss, file_backed = (int(status[name].split()[0]) << 10 for name in ("VmRSS", "RssFile"))
        return Figures(rss - file_backed, int(status["Threads"]), descriptors)
    except (OSError, KeyError, ValueError):
        return None


def name_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip().replace(" ", "-")
    return "?"


def names_of(url: str) -> dict[int, str]:
    """Return process id -> name, for the engine, HTTP workers and batches. Reads /status."""
    processes = httpx.get(f"{url}/status", timeout=10, verify=False, headers=HEADERS).json()["processes"]
    clients = [*processes["http_workers"], *filter(None, [processes["batches"]])]
    return {processes["engine"]["pid"]: "engine"} | {one["pid"]: one["name"] for one in clients}


def all_figures(supervisor: int) -> dict[int, Figures]:
    found = {pid: figures_of(pid) for pid in descendants(supervisor)}
    return {pid: figures for pid, figures in found.items() if figures is not None}


@dataclass
class Sampler:
    """Samples each process's figures and the service's files. Runs on its own thread."""

    supervisor: int
    folder: Path
    """All files of the service, temporary ones included."""
    samples: dict[int, list[tuple[float, Figures]]] = field(default_factory=dict)
    files: list[tuple[float, int]] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        threading.Thread(target=self._run, name="sampler", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            with contextlib.suppress(OSError):
                for pid, figures in all_figures(self.supervisor).items():
                    self.samples.setdefault(pid, []).append((time.monotonic(), figures))
                self.files.append((time.monotonic(), sum(len(files) for _, _, files in os.walk(self.folder))))


def held_when_idle(url: str, timeout_s: float = 60.0) -> dict[str, Any]:
    """Return the resources in use without requests, after they have settled."""
    deadline = time.monotonic() + timeout_s
    while True:
        status = httpx.get(f"{url}/status", timeout=10, verify=False, headers=HEADERS).json()
        held = _held(status)
        if not any(held.values()) or time.monotonic() > deadline:
            return held
        time.sleep(0.5)


def _held(status: dict[str, Any]) -> dict[str, Any]:
    pool = status["pool"]
    owned = pool["l1"]["sessions"] + pool["prefix_cache"]["l1"] + pool["tuned_states"]["in_slots"]
    return {
        "rows": status["running_rows"] + status["waiting_rows"] + status.get("paused_rows", 0),
        "slots": max(0, pool["slots"]["total"] - pool["slots"]["free"] - owned),
        "leases": pool["waiting_leases"],
        "jobs": sum(worker["jobs"] for worker in status["processes"]["http_workers"]),
    }


@dataclass(frozen=True)
class Slope:
    """Growth per hour with 95 % bounds: as a share, of counts as a number.

    This is the Theil-Sen estimator with Sen's bounds. The estimate is the median of the slopes between all pairs of
    blocks.
    """

    an_hour: float
    low: float
    high: float
    seconds: float
    """length of the sampled time"""
    max_more: float | None = None
    """of counts: how many more in `seconds` is flat"""

    @property
    def grows(self) -> bool:
        """Whether the figure grows. Also True if a long run does not show that it is flat."""
        bound = self.high if self.seconds >= LONG_S else self.low
        return bound > FLAT if self.max_more is None else bound * self.seconds / 3600 > self.max_more


def medians(samples: list[tuple[float, float]], are_counts: bool = False) -> list[tuple[float, float]]:
    """Return (mean time, median) of each block of (seconds, figure) samples; [] if there are too few.

    are_counts: return the lowest figure in place of the median. Files, threads and descriptors come and go with
    requests, so only their lowest number shows what is left behind.
    """
    if len(samples) < 2 * BLOCKS:
        return []
    cuts = [len(samples) * number // BLOCKS for number in range(BLOCKS + 1)]
    blocks = [samples[first:end] for first, end in itertools.pairwise(cuts)]
    reduce = min if are_counts else statistics.median
    return [(statistics.fmean(at for at, _ in block), reduce(y for _, y in block)) for block in blocks]


def slope(samples: list[tuple[float, float]], max_more: float | None = None) -> Slope | None:
    """Return the slope of (seconds, figure) samples in time order; None if there are too few.

    max_more: see `Slope`. With it, the figures are counts.
    """
    are_counts = max_more is not None
    points = medians(samples, are_counts)
    if not points:
        return None
    slopes = sorted((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in itertools.combinations(points, 2))
    spread = _SIGMAS * (BLOCKS * (BLOCKS - 1) * (2 * BLOCKS + 5) / 18) ** 0.5
    low, high = round((len(slopes) - spread) / 2), round((len(slopes) + spread) / 2)
    scale = 3600 / (1 if are_counts else statistics.median(y for _, y in points))
    middle, seconds = statistics.median(slopes), samples[-1][0] - samples[0][0]
    return Slope(scale * middle, scale * slopes[low], scale * slopes[high], seconds, max_more)
