"""One row on its way through the engine: what it still has to read, and where its state lies."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rwkv_batch.output import RowOutput
from rwkv_batch.request import GenerateRequest
from state_pool.arena import ZERO_SLOT

if TYPE_CHECKING:
    from rwkv_batch.job import RunningJob
    from state_pool.lease import Lease


class Phase(enum.Enum):
    """Where a sequence stands."""

    WAITING = enum.auto()
    """has no slot yet"""
    RUNNING = enum.auto()
    """reads its prompt or decodes"""
    CLOSING = enum.auto()
    """has answered; reads the last tokens that its session state must contain"""
    DONE = enum.auto()


NO_SLOT = -1
NO_SEAT = -1


class SharedSlot:
    """A slot that several rows read from and none writes; given back when the last has moved on."""

    def __init__(self, slot: int, give_back: Callable[[], None], readers: int = 1) -> None:
        self.slot = slot
        self._give_back = give_back
        self._readers = readers

    def drop(self) -> None:
        """One reader needs it no more."""
        self._readers -= 1
        if self._readers == 0:
            self._give_back()


@dataclass(slots=True)
class Mark:
    """A state kept because the text after it may turn out to be a stop: it holds `count` drawn tokens."""

    slot: int
    count: int


@dataclass(slots=True, eq=False)
class Sequence:
    """A row. `feed[fed:]` is what the model has not read yet; its last token, once read, yields a draw.

    The state after feed[:fed] lies in `shared.slot` while `shared` is set (a session, a cached prefix, a
    fork's base: never written by this row), else in `slot`. The next step writes to `slot`.
    """

    job: RunningJob
    row: int
    request: GenerateRequest
    feed: list[int]
    output: RowOutput
    fed: int = 0
    phase: Phase = Phase.WAITING
    slot: int = NO_SLOT
    seat: int = NO_SEAT
    shared: SharedSlot | None = None
    draws: bool = True
    """False: reads its feed and never draws (the shared prompt of `n` continuations)."""
    stands_for: int = 1
    """rows of the job that end if this one ends before it has been forked"""
    lease: Lease | None = None
    mark: Mark | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    borders: list[int] = field(default_factory=list)
    """positions in `feed`, ascending, at which the state is offered to the prefix cache"""
    dialogue_idx: int | None = None
    """number of the dialogue that a branching turn has made"""
    turn_start: int = 0
    """where this turn's own tokens begin in `feed`; before it lies what a session had to replay"""

    @property
    def read_slot(self) -> int:
        """Where the state after feed[:fed] lies."""
        if self.shared is not None:
            return self.shared.slot
        return self.slot if self.fed else ZERO_SLOT

    @property
    def num_unread(self) -> int:
        """Tokens the model has not read yet."""
        return len(self.feed) - self.fed

    @property
    def is_decoding(self) -> bool:
        """Whether it has drawn and reads one token a step."""
        return self.phase is Phase.RUNNING and bool(self.output.tokens)
