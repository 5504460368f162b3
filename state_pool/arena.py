"""What the pool needs of the memory that holds states on the device(s). Implemented by the engine's pipeline.

A *slot* is a place for one sequence's whole state in every stage's arena. Slot 0 always holds the zero
state (a fresh sequence reads from it, nobody writes it); slot 1 is the dummy that graph padding writes to.
Kernels read a row's state from one slot and write it to another (often the same), so forking a state,
starting from a cached prefix or rolling back a step costs no copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

ZERO_SLOT = 0
DUMMY_SLOT = 1
FIRST_FREE_SLOT = 2


class InvalidStateValues(ValueError):  # noqa: N818 - names what the numbers are
    """A state has numbers that no model leaves: NaN, infinite, or scales of codes below zero."""


class HostState(Protocol):
    """One state in host memory: named parts ("stage0.wkv", "stage0.shift", …) of raw little-endian bytes."""

    def parts(self) -> dict[str, memoryview]:
        """Name -> bytes. Valid only when the copy that fills it is done."""
        ...


class Copy(Protocol):
    """A copy under way on a stream of its own."""

    @property
    def host(self) -> HostState:
        """Where the bytes go, or come from."""
        ...

    def is_done(self) -> bool:
        """Whether the bytes have arrived; never blocks."""
        ...

    def wait(self) -> None:
        """Block until they have."""
        ...


class Arena(Protocol):
    """Slots of state on the device(s). All methods but `host_state` are called on the engine thread."""

    num_slots: int
    """Slots in all, the zero slot and the dummy among them."""
    state_bytes: int
    """Bytes of one state, all stages together."""
    layout: dict[str, tuple[str, tuple[int, ...]]]
    """Part name -> (dtype such as "float32", shape): what a stored state must match."""
    vocab: int
    """Token ids of the model are smaller than this."""
    fingerprint: str
    """Hash of the model's shapes and of a sample of its weights."""

    def save(self, slot: int) -> Copy:
        """Start copying a slot to host memory. The slot must not be written until the copy is done."""
        ...

    def load(self, slot: int, host: HostState) -> Copy:
        """Start copying a host state into a slot. The slot must not be read until the copy is done.

        Later forwards are ordered after it on the device, so a row may be scheduled at once.
        """
        ...

    def host_state(self, parts: Mapping[str, bytes | memoryview]) -> HostState:
        """A host state from stored bytes, on any thread.

        Raises ValueError naming the part that does not fit `layout`, Noise naming one from which nothing can go on.
        """
        ...
