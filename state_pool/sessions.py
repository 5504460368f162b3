"""Sessions in memory: their state, their turns, their leases, and the index over all. Engine thread only."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from sortedcontainers import SortedList

from state_pool.crash_points import reach
from state_pool.errors import InvalidSessionId, SessionUnusable
from state_pool.layout import ZERO_SLOT, HostState
from state_pool.origins import LoadedAdapter, Origin, TunedState
from state_pool.session_key import LINEAR, ROOT, Fence, SessionKey, Tier, dialogue_named, has_prefix


def checked_key(session_id: str) -> SessionKey:
    """Return the plain session's key. Raises InvalidSessionId for text that a database cannot store."""
    try:
        session_id.encode()
    except UnicodeEncodeError:
        raise InvalidSessionId(f"session id {session_id!r} is not valid Unicode text") from None
    if "\0" in session_id:  # PostgreSQL text cannot have it
        raise InvalidSessionId(f"session id {session_id!r} has the character U+0000; leave it out", session_id)
    return SessionKey(session_id)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Session:
    """One line of turns, and where its state is: in `slot`, in `host`, or only on disk."""

    key: SessionKey
    row_id: int
    """never reused"""
    created: float
    updated: float
    parent: Session | None = None
    origin: Origin | None = None
    """The tuned state it started from, set when its first lease is READY. None: the zero state."""
    adapter: Origin | None = None
    """The adapter that all its turns run under, set at the same time. None: none."""
    turn: int = 0
    """Number of committed turns. 0: only its first lease knows the session."""
    num_tokens: int = 0
    slot: int | None = None
    host: HostState | None = None
    replay: Sequence[int] = ()
    """Tokens to prefill after the state in `slot` or `host`, which came from an older checkpoint."""
    disk_turn: int = -1
    """Last turn in the state on disk; -1: none."""
    disk_tokens: int = 0
    unlogged: int = 0
    """Turns on their way to the log."""
    log_broken: bool = False
    """A turn could not be logged (durability "lazy"): none is logged until a checkpoint covers it."""
    unusable: str | None = None
    queue: list[Lease] = field(default_factory=list)
    active: Lease | None = None
    pending: PendingTurn | None = None
    """recorded, not committed yet"""
    readers: int = 0
    """Leases that read this state or wait for it. It is not evicted or expired meanwhile."""
    loading: bool = False
    moving: bool = False
    """A copy or a checkpoint of it is running."""
    deleted: bool = False
    fence: Fence | None = None
    """The fence of its writes, when engines share the database."""
    acquired: bool = False
    """Whether this engine holds the session for a turn: other engines wait for the turn's end."""

    @property
    def exists(self) -> bool:
        return self.turn > 0

    @property
    def busy(self) -> bool:
        """Whether a turn runs, waits or commits, or a lease reads it."""
        return self.active is not None or bool(self.queue) or self.pending is not None or self.readers > 0

    @property
    def dirty(self) -> bool:
        return self.disk_turn < self.turn

    @property
    def log_tokens(self) -> int:
        """Tokens to replay if only the disk had it: those after its newest stored state, or its parents'."""
        base: Session = self
        while base.disk_turn < 0 and base.parent is not None:
            base = base.parent
        return self.num_tokens - base.disk_tokens

    @property
    def reloadable(self) -> bool:
        """Whether the disk can give back the same state. If so, memory can drop it."""
        return not self.dirty or bool(self.replay)

    def check_usable(self, given: str | None = None) -> None:
        """Raises SessionUnusable with the reason. `given`: see PoolError."""
        if self.unusable is not None:
            raise SessionUnusable(f"session {self.key.display_name!r}: {self.unusable}", given)

    @property
    def tier(self) -> Tier:
        if self.slot is not None:
            return Tier.SLOT
        return Tier.HOST if self.host is not None else Tier.DISK


OnDurable = Callable[[Exception | None], None]
"""Called once, on the engine thread, from `StatePool.poll`: None if durable, else the error that lost the turn."""


class LeaseState(enum.StrEnum):
    WAITING = "waiting"
    """Another turn of the session runs, or the state is being brought to a slot."""
    READY = "ready"
    FAILED = "failed"
    """See `Lease.error`. A running turn fails this way if its session is deleted."""
    DONE = "done"
    """checked in or released"""


@dataclass(slots=True, eq=False)
class Lease:
    """One turn of one session: the state it reads and its progress. Fields are valid once READY."""

    session: Session
    """The session of the turn; for a branch, the new dialogue."""
    source: Session | None
    """The session whose state is read: the session itself, the parent dialogue, or None for the empty root."""
    state: LeaseState = LeaseState.WAITING
    error: Exception | None = None
    tuned: TunedState | None = None
    """The tuned state that a new session starts from. An existing one must have started from it."""
    mixture: Origin | None = None
    """The origin of a mixture. The engine holds its members."""
    adapter: LoadedAdapter | None = None
    """The requested adapter; once READY, the session's."""
    exists: bool = False
    """Whether there is a history. If False, the row still starts from `read_slot`."""
    read_slot: int = ZERO_SLOT
    """Slot that the first step reads. Its content stays until the lease ends."""
    replay: list[int] = field(default_factory=list)
    """Token ids to prefill before the prompt, logged after the state in `read_slot`."""
    num_tokens: int = 0
    history: tuple[int, int] = (0, 0)
    """Row and turns of `source`: no other content ever has both."""
    tier: Tier | None = None
    """Tier of the state at checkout; None: the session is new."""
    dialogue_idx: int | None = None
    """Number of the new dialogue, set by `Turns.record`; None for a plain session."""
    branch: bool = False
    pinned: bool = False
    """whether the lease holds `read_slot`"""
    wait: bool = True
    """Whether to wait for another engine's turn of the session."""
    reserved_dialogue: int | None = None
    """Number of the new dialogue, if the database assigns it before the turn."""
    is_reader: bool = False
    """Whether the lease counts in its source's `readers`."""


@dataclass(slots=True, eq=False)
class PendingTurn:
    """A recorded turn that is not yet part of its session."""

    turn: int
    tokens: list[int]
    on_durable: OnDurable | None
    slot: int | None = None
    """Slot with the state after the turn. None: it was dropped and must be replayed."""
    checked_in: bool = False
    log_result: Exception | bool | None = None
    """Of the write of its tokens. None: unknown; True: stored; an exception: not stored."""
    outcome: Exception | bool | None = None
    """None: unknown; True: durable; an exception: not stored."""

    def notify(self, error: Exception | None) -> None:
        """Report the outcome to the engine, once."""
        on_durable, self.on_durable = self.on_durable, None
        if on_durable is not None:
            on_durable(error)
            reach("after_acknowledgement")


class DialogueNumbers:
    """Largest dialogue numbers of sessions whose dialogues may all be deleted.

    Keeps `MAX_SESSIONS` sessions. New dialogues of older ones are numbered above all forgotten numbers.
    """

    MAX_SESSIONS = 100_000

    def __init__(self) -> None:
        self._largest: OrderedDict[str, int] = OrderedDict()
        self._floor = ROOT

    def largest(self, session_id: str) -> int:
        """Return the session's largest number, or a bound for forgotten sessions."""
        return max(self._largest.get(session_id, ROOT), self._floor)

    def retire(self, session_id: str, number: int) -> None:
        self._largest[session_id] = max(self._largest.pop(session_id, ROOT), number)
        while len(self._largest) > self.MAX_SESSIONS:
            self._floor = max(self._floor, self._largest.popitem(last=False)[1])


class SessionIndex:
    """All sessions by name, least recently used first. Also the order of L1 and L2."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[SessionKey, Session] = OrderedDict()
        self._names: SortedList = SortedList()  # of SessionKey, 8 bytes per session; finds prefixes
        self._dialogues: dict[str, dict[int, Session]] = {}
        self.l1: OrderedDict[Session, None] = OrderedDict()
        """least recently used first, like `l2`"""
        self.l2: OrderedDict[Session, None] = OrderedDict()
        self.unusable: dict[Session, None] = {}
        """see `mark_unusable`"""
        self.num_existing = 0
        self._numbers = DialogueNumbers()
        self._last_row = 0

    def new_row(self) -> int:
        """Return an unused row number for a pool without a database."""
        self._last_row += 1
        return self._last_row

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._by_key.values())

    def __reversed__(self) -> Iterator[Session]:
        return reversed(self._by_key.values())

    def get(self, key: SessionKey) -> Session | None:
        """Return the session of that name. It may have no committed turn."""
        return self._by_key.get(key)

    def has_id(self, session_id: str) -> bool:
        return SessionKey(session_id) in self._by_key or session_id in self._dialogues

    def add(self, session: Session) -> None:
        self._by_key[session.key] = session
        self._names.add(session.key)
        if session.key.dialogue != LINEAR:
            self._dialogues.setdefault(session.key.session_id, {})[session.key.dialogue] = session
        self.num_existing += session.exists
        if session.unusable is not None:
            self.unusable[session] = None

    def mark_unusable(self, session: Session, reason: str) -> None:
        session.unusable = reason
        self.unusable[session] = None

    def mark_usable(self, session: Session) -> None:
        session.unusable = None
        self.unusable.pop(session, None)

    def remove(self, session: Session) -> None:
        if self._by_key.get(session.key) is session:
            del self._by_key[session.key]
            self._names.remove(session.key)
            self.num_existing -= session.exists
        family = self._dialogues.get(session.key.session_id, {})
        if family.get(session.key.dialogue) is session:
            self.retire_number(*session.key)
            del family[session.key.dialogue]
            if not family:
                del self._dialogues[session.key.session_id]
        self.l1.pop(session, None)
        self.l2.pop(session, None)
        self.unusable.pop(session, None)

    def touch(self, session: Session, now: float) -> None:
        """Make the session the most recently used."""
        session.updated = now
        self._by_key.move_to_end(session.key)

    def next_dialogue(self, session_id: str) -> int:
        """Return the number for a new dialogue. Larger than any that the session ever had."""
        return max(self._largest_dialogue(session_id), self._numbers.largest(session_id)) + 1

    def retire_number(self, session_id: str, dialogue: int) -> None:
        """Never assign this number to another dialogue."""
        if dialogue >= self._largest_dialogue(session_id):
            self._numbers.retire(session_id, dialogue)

    def _largest_dialogue(self, session_id: str) -> int:
        return max(self._dialogues.get(session_id, ()), default=ROOT)

    def matching(self, session_id: str, prefix: bool) -> list[Session]:
        """Find the sessions that a delete names.

        - by id, with all dialogues
        - else by display name
        - with `prefix`: all whose display name starts with it; see `has_prefix`
        """
        if prefix:
            return self._with_prefix(session_id)
        exact = list(self._dialogues.get(session_id, {}).values())
        linear = self._by_key.get(SessionKey(session_id))
        if linear is not None:
            exact.append(linear)
        if not exact and (key := dialogue_named(session_id)) is not None and key in self._by_key:
            exact.append(self._by_key[key])
        return exact

    def _with_prefix(self, prefix: str) -> list[Session]:
        """Find sessions by the prefix of their display names. The cost depends on the matches only."""
        beginning = takewhile(lambda key: key.session_id.startswith(prefix), self._names.irange((prefix,)))
        keys = [key for key in beginning if has_prefix(key.session_id, prefix)]
        dialogues = self._dialogues.get(prefix.rpartition(":")[0], {}).values() if ":" in prefix else ()
        return [self._by_key[key] for key in keys] + [s for s in dialogues if s.key.display_name.startswith(prefix)]
