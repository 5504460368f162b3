"""A state pool over slots in host memory. Drives it as the engine does."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.tools.pool_driver import PoolDriver
from state_pool.config import PoolConfig

STATE_PARTS = {"stage0.wkv": ("float16", (32, 64, 64, 64)), "stage0.shift": ("float16", (64, 4096))}
TURN_TOKENS = 300


@dataclass
class HostBytes:
    """A state as arrays in host memory."""

    arrays: dict[str, np.ndarray]

    def parts(self) -> dict[str, memoryview]:
        """Return name -> raw bytes."""
        return {name: memoryview(array.reshape(-1).view(np.uint8)) for name, array in self.arrays.items()}


@dataclass
class DoneCopy:
    host: HostBytes

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        """Do nothing: the copy is finished."""


@dataclass
class HostArena:
    """Slots in host memory, of the real size."""

    num_slots: int
    vocab: int = 1 << 16
    fingerprint: str = "bench"
    layout: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=lambda: dict(STATE_PARTS))

    def __post_init__(self) -> None:
        """Fill the slots with random bytes, which a disk cannot compress."""
        draw = np.random.default_rng(0)
        self._slots = {
            name: draw.integers(0, 2**16, (self.num_slots, *shape), dtype=np.uint16)
            for name, (_, shape) in self.layout.items()
        }
        self.state_bytes = sum(part[0].nbytes for part in self._slots.values())

    def save(self, slot: int) -> DoneCopy:
        """See `Arena.save`."""
        return DoneCopy(HostBytes({name: part[slot].copy() for name, part in self._slots.items()}))

    def load(self, slot: int, host: HostBytes) -> DoneCopy:
        """See `Arena.load`."""
        for name, part in self._slots.items():
            part[slot] = host.arrays[name]
        return DoneCopy(host)

    def host_state(self, parts: Mapping[str, bytes | memoryview]) -> HostBytes:
        """See `Arena.host_state`."""
        return HostBytes(
            {name: np.frombuffer(parts[name], np.uint16).reshape(shape) for name, (_, shape) in self.layout.items()}
        )


class Bench(PoolDriver):
    """Drives one pool with real sizes."""

    timeout_s = 3600.0
    poll_interval_s = 0.0001

    def __init__(self, folder: Path, slots: int, **settings: Any) -> None:
        super().__init__(HostArena(slots), PoolConfig(state_db=str(folder / "bench.db"), **settings))

    def turns(self, names: Sequence[str], tokens: list[int]) -> list[float]:
        """Run one turn of each session at once; returns seconds from `record` to durable."""
        waits: list[float] = []
        leases = [self.ready(self.pool.turns.checkout(name)) for name in names]
        for lease in leases:
            slot = self.slot()
            started = time.perf_counter()

            def durable(error: Exception | None, started: float = started) -> None:
                if error is not None:
                    raise error
                waits.append(time.perf_counter() - started)

            self.pool.turns.record(lease, tokens, durable)
            self.pool.turns.checkin(lease, slot)
        self.until(lambda: len(waits) == len(names))
        return waits
