"""Memory and power of the engine's devices, where available.

GPUs: through NVML, which comes with the driver and does not touch CUDA. So no stream waits and no graph capture fails.
CPU: the engine process's memory from /proc.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from pathlib import Path
from typing import NamedTuple

_FRESH_S = 1.0
"""Seconds for which statistics are cached."""


class DeviceStats(NamedTuple):
    """Bytes and watts. None: unknown."""

    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Nvml:
    """The NVML functions in use. Raises OSError if the library is missing or does not start."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        if self._library.nvmlInit_v2() != 0:
            raise OSError("NVML does not start")

    def stats(self, number: str) -> DeviceStats:
        """Return statistics of the GPU with this index or UUID, as in CUDA_VISIBLE_DEVICES."""
        handle = ctypes.c_void_p()
        if number.isdecimal():
            found = self._library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(number)), ctypes.byref(handle))
        else:
            found = self._library.nvmlDeviceGetHandleByUUID(number.encode(), ctypes.byref(handle))
        if found != 0:
            return DeviceStats()
        memory, milliwatts = _Memory(), ctypes.c_uint()
        has_memory = self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
        has_power = self._library.nvmlDeviceGetPowerUsage(handle, ctypes.byref(milliwatts)) == 0
        return DeviceStats(
            memory.used if has_memory else None,
            memory.total if has_memory else None,
            milliwatts.value / 1000 if has_power else None,
        )


def _cpu_stats() -> DeviceStats:
    """Resident memory of this process, and the machine's total."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return DeviceStats(pages * os.sysconf("SC_PAGE_SIZE"), total)
    return DeviceStats()


class DeviceMonitor:
    """Statistics of devices by name ("cuda:0", "cpu"), at most a second old. Any thread."""

    def __init__(self) -> None:
        self._nvml: _Nvml | None = None
        with contextlib.suppress(OSError, AttributeError):
            self._nvml = _Nvml()
        self._known: dict[str, tuple[float, DeviceStats]] = {}

    def stats(self, device: str) -> DeviceStats:
        """Return a device's statistics. All None for an unknown device."""
        now = time.monotonic()
        updated_at, stats = self._known.get(device, (-_FRESH_S, DeviceStats()))
        if now - updated_at >= _FRESH_S:
            stats = self._query(device)
            self._known[device] = (now, stats)
        return stats

    def _query(self, device: str) -> DeviceStats:
        kind, _, number = device.partition(":")
        if kind == "cpu":
            return _cpu_stats()
        if kind != "cuda" or self._nvml is None:
            return DeviceStats()
        visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        index = int(number or 0)
        return self._nvml.stats(visible[index] if index < len(visible) else str(index))
