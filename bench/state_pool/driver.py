"""A state pool over slots in host memory, and what drives it as the engine does."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from state_pool.config import PoolConfig
from state_pool.pool import StatePool
from state_pool.session_page import SessionPage
from state_pool.sessions import Lease, LeaseState

STATE_PARTS = {"stage0.wkv": ("float16", (32, 64, 64, 64)), "stage0.shift": ("float16", (64, 4096))}
TURN_TOKENS = 300


@dataclass
class HostBytes:
    """A state as arrays in host memory."""

    arrays: dict[str, np.ndarray]

    def parts(self) -> dict[str, memoryview]:
        """Name -> raw bytes."""
        return {name: memoryview(array.reshape(-1).view(np.uint8)) for name, array in self.arrays.items()}


@dataclass
class DoneCopy:
    """A copy that was made at once."""

    host: HostBytes

    def is_done(self) -> bool:
        """It is."""
        return True

    def wait(self) -> None:
        """Nothing to wait for."""


@dataclass
class HostArena:
    """Slots in host memory, of the real size."""

    num_slots: int
    vocab: int = 1 << 16
    fingerprint: str = "bench"
    layout: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=lambda: dict(STATE_PARTS))

    def __post_init__(self) -> None:
        """Random bytes: nothing a disk could compress."""
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


class Bench:
    """Drives one pool as the engine does: poll, and look."""

    def __init__(self, folder: Path, slots: int, **settings: Any) -> None:
        self.arena = HostArena(slots)
        self.pool = StatePool(self.arena, PoolConfig(state_db=str(folder / "bench.db"), **settings))

    def until(self, condition: Callable[[], bool]) -> None:
        """Poll as a step loop would."""
        while not condition():
            self.pool.poll()
            time.sleep(0.0001)

    def ready(self, name: str) -> Lease:
        """A session's next turn."""
        lease = self.pool.checkout(name)
        self.until(lambda: lease.poll() is not LeaseState.WAITING)
        if lease.error is not None:
            raise lease.error
        return lease

    def turns(self, names: Sequence[str], tokens: list[int]) -> list[float]:
        """One turn of each session, all at once; returns seconds from record to durable."""
        waits: list[float] = []
        leases = [self.ready(name) for name in names]
        for lease in leases:
            slots: list[int] = []
            self.until(lambda slots=slots: take(self.pool, slots))
            started = time.perf_counter()

            def durable(error: Exception | None, started: float = started) -> None:
                if error is not None:
                    raise error
                waits.append(time.perf_counter() - started)

            self.pool.record(lease, tokens, durable)
            self.pool.checkin(lease, slots[0])
        self.until(lambda: len(waits) == len(names))
        return waits

    def list_sessions(self, limit: int = 100, offset: int = 0) -> SessionPage:
        """A page of the list, waited for."""
        pages: list[SessionPage | Exception] = []
        self.pool.list_sessions(pages.append, limit, offset)
        self.until(lambda: bool(pages))
        if isinstance(pages[0], Exception):
            raise pages[0]
        return pages[0]

    def settle(self) -> None:
        """Wait for everything that is under way."""
        self.until(lambda: not self.pool.pending)


def take(pool: StatePool, slots: list[int]) -> bool:
    """Put a slot into the list if there is one."""
    slot = pool.allocate()
    if slot is not None:
        slots.append(slot)
    return slot is not None
