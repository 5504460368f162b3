"""A turn's hold on a session's state, from checkout to checkin. Engine thread only."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from state_pool.arena import ZERO_SLOT
from state_pool.sessions import Session

OnDurable = Callable[[Exception | None], None]
"""Called once, on the engine thread, from `StatePool.poll`: None when durable, else why the turn was not kept."""


class LeaseState(enum.StrEnum):
    """Where a lease stands."""

    WAITING = "waiting"
    """Behind another turn of the session, or its state is on its way to a slot."""
    READY = "ready"
    FAILED = "failed"
    """See `Lease.error`; also a running turn whose session was deleted."""
    DONE = "done"
    """Checked in or released."""


@dataclass(slots=True, eq=False)
class Lease:
    """One turn of one session: what it reads, and who waits for what. Fields are valid from READY on."""

    session: Session
    """The session the turn belongs to; for a branch, the new dialogue."""
    source: Session | None
    """Whose state is read: the session itself, the parent dialogue, or None for the empty root."""
    state: LeaseState = LeaseState.WAITING
    error: Exception | None = None
    exists: bool = False
    """Whether there is a history; False: the row begins from the zero state."""
    read_slot: int = ZERO_SLOT
    """Slot the first step reads from; it keeps its content until the lease ends."""
    replay: list[int] = field(default_factory=list)
    """Token ids to be prefilled before the prompt: logged after the state in `read_slot` was taken."""
    num_tokens: int = 0
    """Tokens of history that the state and the replay stand for together."""
    tier: str = "new"
    """Where the state was at checkout: "new", or the words of /state/status."""
    dialogue_idx: int | None = None
    """Number of the new dialogue, from `StatePool.record` on; None for a plain session."""
    branch: bool = False
    pinned: bool = False
    """Whether the lease holds `read_slot`."""
    reads: bool = False
    """Whether the lease counts among the source's readers, from wanting its state to the end of the turn."""

    @property
    def deleted(self) -> bool:
        """Whether the session was deleted under the turn."""
        return self.session.deleted

    def poll(self) -> LeaseState:
        """The state; raises nothing and never blocks."""
        return self.state


@dataclass(slots=True, eq=False)
class PendingTurn:
    """A turn between `record` and the moment it is part of its session."""

    turn: int
    tokens: list[int]
    on_durable: OnDurable | None
    slot: int | None = None
    """Where the state after the turn is; None: it was thrown away and has to be replayed."""
    checked_in: bool = False
    outcome: Exception | bool | None = None
    """None: not known yet; True: durable; an exception: it was not stored."""
