"""What the engine thread asks of the writer and reader threads, and what comes back. Plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from state_pool.arena import HostState
from state_pool.codec import Layout
from state_pool.session_page import SessionEntry, Tier
from state_pool.sessions import Fence, SessionKey
from state_pool.tuned_state import Origin

Done = Callable[[Exception | None], None]
"""Called on the engine thread when a write was committed, or with why it was not."""


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session as a row: written whenever a turn of it is."""

    row: int
    key: SessionKey
    parent: int | None
    turn: int
    num_tokens: int
    """Tokens of all turns together, after `turn`."""
    created: float
    updated: float
    origin: Origin | None = None
    """The tuned state that the session began from."""
    adapter: Origin | None = None
    """The adapter that all its turns run under."""


@dataclass(frozen=True, slots=True)
class StoredSession:
    """A session as the database has it."""

    row: SessionRow
    disk_turn: int
    """Turn after which its stored state was taken; -1: there is none."""
    disk_tokens: int
    quarantined: str | None


@dataclass(frozen=True, slots=True)
class Append:
    """Commit a turn's token ids; many such are committed together."""

    session: SessionRow
    tokens: list[int]
    fence: Fence | None = None
    """Must still stand, or the turn is refused with StaleEpoch; None: this engine has the database for itself."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Commit a state; `commits` also makes it the session's newest turn (durability "turn")."""

    session: SessionRow
    host: HostState
    commits: Append | None = None
    fence: Fence | None = None
    """As an Append's."""
    shared: bool = False
    """Several engines write: the session's row must be there, unless a fence says that nobody deleted it."""


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove sessions from the disk; a dialogue whose children still need it goes later, hidden until then."""

    rows: tuple[int, ...]


@dataclass(eq=False, slots=True)
class Acquire:
    """Take a session from whichever engine has it, for one turn; with `branch_from`, read the parent of a new dialogue.

    The outcome is in the fields behind `fence`, valid when the job is done.
    """

    session_id: str
    branch_from: int | None = None
    fence: Fence | None = None
    """What the turn's writes will be compared with; None: another engine runs a turn of the session, ask again."""
    stored: list[StoredSession] = field(default_factory=list)
    """The session, or the parent, and those that it is rebuilt from, nearest first; empty: there is none."""
    dialogue: int = 0
    """Number of the new dialogue; given once, whether or not the turn is kept."""


@dataclass(frozen=True, slots=True)
class Release:
    """A turn that was acquired has ended without a commit: others may begin theirs."""

    fence: Fence


@dataclass(eq=False, slots=True)
class DeleteNamed:
    """Remove what a name means wherever it was made; `count` is valid when the job is done."""

    session_id: str
    prefix: bool
    count: int = 0


@dataclass(eq=False, slots=True)
class DeleteOldest:
    """Remove up to `limit` sessions, longest unused first, that no engine runs a turn of."""

    limit: int
    cutoff: float | None
    """Only those not used since (Unix time)."""
    count: int = 0


@dataclass(frozen=True, slots=True)
class StoredObject:
    """What a state's row says of the object that has its bytes."""

    key: str
    checksum: bytes


@dataclass(frozen=True, slots=True)
class ObjectLocation:
    """A state that is to be fetched."""

    state: int
    session: int
    stored: StoredObject
    layout: Layout
    """Of its parts, in order, as it was stored."""


@dataclass(frozen=True, slots=True)
class StoredParts:
    """A state as it was stored."""

    state: int
    parts: dict[str, bytes]
    layout: Layout
    """Of the parts."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A session's state as it was stored, verified, with what to replay after it."""

    host: HostState | None
    """None: no stored state applies; replay starts from what the session began from."""
    replay: list[int]
    bytes_read: int
    num_tokens: int
    """What state and replay stand for together, by the same reading: turns may have been logged since it was asked."""


@dataclass(frozen=True, slots=True)
class ListQuery:
    """Which sessions of the list are wanted, newest first, and what memory knows of them. Rows are database rows."""

    limit: int
    offset: int
    tiers: Mapping[int, Tier]
    """Rows whose state is in memory; all others are on disk."""
    newer: Mapping[int, SessionEntry]
    """Rows of which memory has a newer turn than the database may have: listed as they are here."""
    deleted: frozenset[int] = frozenset()
    """Rows whose delete is on its way to the disk: not listed."""
    counted: bool = False
    """Whether the sessions have to be counted too, since memory does not know them all."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A session whose rows are damaged: what to tell whoever asks for it."""

    row: int
    reason: str
