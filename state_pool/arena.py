"""The memory for states on the GPU, as the pool needs it. The engine's pipeline implements it.

A slot holds one sequence's whole state, in every stage's arena. Slot 0 is always the zero state: fresh sequences read
it and nobody writes it. Slot 1 is the dummy that graph padding writes to. Kernels read a row's state from one slot and
write it to another, often the same one. So forks, prefix-cache hits and rollbacks need no copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

ZERO_SLOT = 0
DUMMY_SLOT = 1
FIRST_FREE_SLOT = 2


class InvalidStateValues(ValueError):  # noqa: N818 - names what the numbers are
    """A state has invalid numbers: NaN, infinite, or a negative quantisation scale."""


class HostState(Protocol):
    """One state in host memory, as named parts ("stage0.wkv", "stage0.shift", ...) of little-endian bytes."""

    def parts(self) -> dict[str, memoryview]:
        """Return the bytes by part name. Valid only after the copy that fills them."""
        ...


class Copy(Protocol):
    """An asynchronous copy between a slot and host memory."""

    @property
    def host(self) -> HostState:
        """The source or target in host memory."""
        ...

    def is_done(self) -> bool:
        """Never blocks."""
        ...

    def wait(self) -> None:
        """Block until the copy is done."""
        ...


class Arena(Protocol):
    """Slots of states on the GPU(s). Engine thread only, except `host_state`."""

    num_slots: int
    """All slots, with the zero slot and the dummy."""
    state_bytes: int
    """Bytes of one state over all stages."""
    layout: dict[str, tuple[str, tuple[int, ...]]]
    """Part name -> (dtype such as "float32", shape). A stored state must match it."""
    vocab: int
    """Vocabulary size: token ids are smaller."""
    fingerprint: str
    """Hash of the model's shapes and of a sample of its weights."""

    def save(self, slot: int) -> Copy:
        """Start copying a slot to host memory. Do not write the slot until the copy is done."""
        ...

    def load(self, slot: int, host: HostState) -> Copy:
        """Start copying a host state into a slot. Do not read the slot from the host until then.

        The device orders later forwards after the copy, so a row may be scheduled at once.
        """
        ...

    def host_state(self, parts: Mapping[str, bytes | memoryview]) -> HostState:
        """Build a host state from stored bytes. Any thread.

        Raises ValueError naming a part that does not fit `layout`, InvalidStateValues naming a part with invalid
        numbers.
        """
        ...
