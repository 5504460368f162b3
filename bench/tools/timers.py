"""Clocks for pieces of work on a GPU or a CPU, and nvidia-smi's samples while they run."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


def device_ms(work: Callable[[], object], calls: int = 1) -> float:
    """Return milliseconds of GPU time per call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(calls):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / calls


def host_s(work: Callable[[], object]) -> float:
    """Return the wall seconds of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def median_s(device: torch.device, work: Callable[[], object], calls: int) -> float:
    """Return the median seconds of a call on a device, after one that is not counted."""
    work()
    return statistics.median(device_ms(work) / 1e3 if device.type == "cuda" else host_s(work) for _ in range(calls))


@contextmanager
def nvidia_smi(query: str, interval_ms: int, *options: str) -> Iterator[list[list[str]]]:
    """Yield a list. It gets the fields of each sample when the block ends; it stays empty without nvidia-smi."""
    samples: list[list[str]] = []
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "-lms", str(interval_ms)]
    try:
        sampler = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        yield samples
        return
    try:
        yield samples
    finally:
        sampler.terminate()
        lines = sampler.communicate()[0].splitlines()  # the last one may be cut off
        samples += [line.split(", ") for line in lines if line.count(", ") == query.count(",")]
