"""What the pool knows of each session in memory: its state, and the turns that hold it. Owned by the engine thread."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from sortedcontainers import SortedList

from state_pool.adapters import LoadedAdapter
from state_pool.arena import ZERO_SLOT, HostState
from state_pool.errors import InvalidSessionId
from state_pool.session_page import Tier
from state_pool.tuned_state import Origin, TunedState

LINEAR = -1
"""Dialogue number of a plain session, which grows turn by turn; branching dialogues are numbered from 1."""
ROOT = 0
"""The empty dialogue that every branching session begins from; it always exists and is never stored."""


class SessionKey(NamedTuple):
    """A session's name and which of its dialogues; the plain session is a kind of its own."""

    session_id: str
    dialogue: int = LINEAR

    @property
    def display_name(self) -> str:
        """The name in lists: "s" for the plain session, "s:2" for dialogue 2. Never parsed."""
        return self.session_id if self.dialogue == LINEAR else f"{self.session_id}:{self.dialogue}"


class Fence(NamedTuple):
    """Who may write a session's next turn, where several engines share the database; compared in each commit."""

    session_id: str
    dialogue: int
    """LINEAR: the plain session, which one engine has at a time; ROOT: all dialogues together, until a delete."""
    epoch: int
    """Of this holder: never given twice."""
    parent: int | None = None
    """Row of the dialogue that a new one is read from, which must not have been deleted."""


def checked_key(session_id: str) -> SessionKey:
    """The plain session of that name. Raises UnfitName for text that not every database can hold."""
    try:
        session_id.encode()
    except UnicodeEncodeError:
        raise InvalidSessionId(f"session id {session_id!r} is not valid Unicode text") from None
    if "\0" in session_id:  # PostgreSQL's text has none
        raise InvalidSessionId(f"session id {session_id!r} has the character U+0000; leave it out", session_id)
    return SessionKey(session_id)


@dataclass(slots=True, eq=False)
class Session:
    """One line of turns, and where its state is. At most one of `slot` and `host` holds it, or only the disk."""

    key: SessionKey
    row: int
    """Its number in the database, never used again for another."""
    created: float
    updated: float
    parent: Session | None = None
    origin: Origin | None = None
    """The tuned state it began from, from its first lease's READY on; None: the zero state."""
    adapter: Origin | None = None
    """The adapter that has read all of it, from then on; None: none."""
    turn: int = 0
    """Turns that are part of it; 0: it doesn't exist yet for anyone but its first lease."""
    num_tokens: int = 0
    slot: int | None = None
    host: HostState | None = None
    replay: Sequence[int] = ()
    """Tokens to be read after the state in `slot` or `host`, which came from an older checkpoint."""
    disk_turn: int = -1
    """Turn after which the state on disk was taken; -1: none."""
    disk_tokens: int = 0
    """Tokens the state on disk stands for."""
    unlogged: int = 0
    """Turns on their way to the log."""
    log_broken: bool = False
    """A turn could not be logged (only with durability "lazy"): no more are until a checkpoint covers it."""
    unusable: str | None = None
    queue: list[Lease] = field(default_factory=list)
    """Leases that wait for their turn."""
    active: Lease | None = None
    pending: PendingTurn | None = None
    """The turn that was recorded and isn't settled yet."""
    readers: int = 0
    """Leases that want or read this state: it isn't evicted or expired under them."""
    loading: bool = False
    moving: bool = False
    """A copy or a checkpoint of it is under way."""
    deleted: bool = False
    fence: Fence | None = None
    """What its writes are compared with, where several engines share the database."""
    acquired: bool = False
    """Other engines wait for the end of a turn that this one has acquired."""

    @property
    def exists(self) -> bool:
        """Whether a turn of it was ever kept."""
        return self.turn > 0

    @property
    def busy(self) -> bool:
        """Whether a turn runs, waits or settles, or somebody reads it."""
        return self.active is not None or bool(self.queue) or self.pending is not None or self.readers > 0

    @property
    def dirty(self) -> bool:
        """Whether the state on disk is older than the session."""
        return self.disk_turn < self.turn

    @property
    def log_tokens(self) -> int:
        """Tokens to read again if nothing but the disk had it: those behind its newest state, or its parents'."""
        base: Session = self
        while base.disk_turn < 0 and base.parent is not None:
            base = base.parent
        return self.num_tokens - base.disk_tokens

    @property
    def reloadable(self) -> bool:
        """Whether the state in memory can go because the disk gives the very same."""
        return not self.dirty or bool(self.replay)

    @property
    def tier(self) -> Tier:
        """The fastest tier that holds it."""
        if self.slot is not None:
            return Tier.SLOT
        return Tier.HOST if self.host is not None else Tier.DISK


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
    tuned: TunedState | None = None
    """What a new session begins from; an existing one must have begun from it."""
    mixture: Origin | None = None
    """The same of a mixture, whose members the engine holds."""
    adapter: LoadedAdapter | None = None
    """What its row runs under: as asked for; from READY on the session's own."""
    exists: bool = False
    """Whether there is a history; False: the row begins from `read_slot` all the same."""
    read_slot: int = ZERO_SLOT
    """Slot the first step reads from; it keeps its content until the lease ends."""
    replay: list[int] = field(default_factory=list)
    """Token ids to be prefilled before the prompt: logged after the state in `read_slot` was taken."""
    num_tokens: int = 0
    """Tokens of history that the state and the replay stand for together."""
    tier: Tier | None = None
    """Where the state was at checkout; None: the session is new."""
    dialogue_idx: int | None = None
    """Number of the new dialogue, from `StatePool.record` on; None for a plain session."""
    branch: bool = False
    pinned: bool = False
    """Whether the lease holds `read_slot`."""
    wait: bool = True
    """Whether to wait for another engine's turn of the session."""
    reserved_dialogue: int | None = None
    """Number of the new dialogue, where the database gives it before the turn."""
    is_reader: bool = False
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


class DialogueNumbers:
    """The largest dialogue number that a session has had, where none is left that shows it.

    Bounded: beyond `MAX_SESSIONS` sessions the oldest are forgotten, and no session's next number is smaller than theirs.
    """

    MAX_SESSIONS = 100_000

    def __init__(self) -> None:
        self._largest: OrderedDict[str, int] = OrderedDict()
        self._floor = ROOT

    def largest(self, session_id: str) -> int:
        """The session's largest number, or of those forgotten."""
        return max(self._largest.get(session_id, ROOT), self._floor)

    def retire(self, session_id: str, number: int) -> None:
        """Remember a number that was given."""
        self._largest[session_id] = max(self._largest.pop(session_id, ROOT), number)
        while len(self._largest) > self.MAX_SESSIONS:
            self._floor = max(self._floor, self._largest.popitem(last=False)[1])


class SessionIndex:
    """All sessions by name, least recently used first; the tiers' own orders beside it."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[SessionKey, Session] = OrderedDict()
        self._names: SortedList = SortedList()  # of SessionKey: 8 bytes a session, so that beginnings are found
        self._dialogues: dict[str, dict[int, Session]] = {}
        self.l1: OrderedDict[Session, None] = OrderedDict()
        """Sessions parked in slots, least recently used first."""
        self.l2: OrderedDict[Session, None] = OrderedDict()
        """Sessions in host memory, least recently used first."""
        self.unusable: dict[Session, None] = {}
        """Sessions that must not be fed; see `mark_unusable`."""
        self.num_existing = 0
        self._numbers = DialogueNumbers()

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._by_key.values())

    def __reversed__(self) -> Iterator[Session]:
        return reversed(self._by_key.values())

    def get(self, key: SessionKey) -> Session | None:
        """The session of that name, perhaps not existing yet."""
        return self._by_key.get(key)

    def add(self, session: Session) -> None:
        """Enter a session as the most recently used."""
        self._by_key[session.key] = session
        self._names.add(session.key)
        if session.key.dialogue != LINEAR:
            self._dialogues.setdefault(session.key.session_id, {})[session.key.dialogue] = session
        self.num_existing += session.exists
        if session.unusable is not None:
            self.unusable[session] = None

    def mark_unusable(self, session: Session, reason: str) -> None:
        """From now on the session is not fed; whoever asks for it is told why."""
        session.unusable = reason
        self.unusable[session] = None

    def mark_usable(self, session: Session) -> None:
        """The session may be fed again: what was wrong with it is gone."""
        session.unusable = None
        self.unusable.pop(session, None)

    def remove(self, session: Session) -> None:
        """Forget a session, on every tier's list."""
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
        """Make it the most recently used."""
        session.updated = now
        self._by_key.move_to_end(session.key)
        if session in self.l1:
            self.l1.move_to_end(session)
        if session in self.l2:
            self.l2.move_to_end(session)

    def next_dialogue(self, session_id: str) -> int:
        """The number a new dialogue of the session gets: larger than any that it ever had, those deleted counted."""
        return max(self._largest_dialogue(session_id), self._numbers.largest(session_id)) + 1

    def retire_number(self, session_id: str, dialogue: int) -> None:
        """A dialogue of that number has been, and there may be none any more: it is not given again."""
        if dialogue >= self._largest_dialogue(session_id):
            self._numbers.retire(session_id, dialogue)

    def _largest_dialogue(self, session_id: str) -> int:
        return max(self._dialogues.get(session_id, ()), default=ROOT)

    def matching(self, session_id: str, prefix: bool) -> list[Session]:
        """Sessions a delete means: by id with all dialogues, else by shown name, or all that begin so."""
        if prefix:
            return self._with_prefix(session_id)
        exact = list(self._dialogues.get(session_id, {}).values())
        linear = self._by_key.get(SessionKey(session_id))
        if linear is not None:
            exact.append(linear)
        return exact or self._by_display_name(session_id)

    def _with_prefix(self, prefix: str) -> list[Session]:
        """Sessions whose shown names begin so; costs what it finds, however many others there are."""
        keys = takewhile(lambda key: key.session_id.startswith(prefix), self._names.irange((prefix,)))
        dialogues = self._dialogues.get(prefix.rpartition(":")[0], {}).values() if ":" in prefix else ()
        return [self._by_key[key] for key in keys] + [s for s in dialogues if s.key.display_name.startswith(prefix)]

    def _by_display_name(self, name: str) -> list[Session]:
        """The dialogue that lists show under this name."""
        session_id, _, number = name.rpartition(":")
        dialogue = int(number) if number.isdecimal() and len(number) < 20 else ROOT
        session = self._dialogues.get(session_id, {}).get(dialogue)
        return [session] if session is not None and session.key.display_name == name else []
