"""Jobs of the writer and reader threads, and their results. Plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from state_pool.layout import HostState, Layout
from state_pool.origins import Origin
from state_pool.session_page import SessionEntry, Tier
from state_pool.sessions import Fence, SessionKey

Done = Callable[[Exception | None], None]
"""Called on the engine thread: None when the write is committed, else its error."""


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session's row, written with each turn."""

    row: int
    key: SessionKey
    parent: int | None
    turn: int
    num_tokens: int
    """Tokens of all turns up to `turn`."""
    created: float
    updated: float
    origin: Origin | None = None
    """The tuned state that the session started from."""
    adapter: Origin | None = None
    """The adapter that all its turns run under."""


@dataclass(frozen=True, slots=True)
class StoredSession:
    """A session as the database has it."""

    row: SessionRow
    disk_turn: int
    """Last turn in its stored state; -1: no state."""
    disk_tokens: int
    quarantined: str | None


@dataclass(frozen=True, slots=True)
class Append:
    """Commit a turn's token ids. Many turns share one transaction."""

    session: SessionRow
    tokens: list[int]
    fence: Fence | None = None
    """Must still be valid, or the turn is refused with StaleEpoch. None: the database is not shared."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Commit a state. With `commits`, it also commits the turn (durability "turn")."""

    session: SessionRow
    host: HostState
    commits: Append | None = None
    fence: Fence | None = None
    """As in `Append`."""
    shared: bool = False
    """The database is shared: without a fence, the session's row must still exist."""


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete sessions from the disk. A dialogue that children still need is hidden and goes later."""

    rows: tuple[int, ...]


@dataclass(eq=False, slots=True)
class Acquire:
    """Take a session from any engine for one turn. With `branch_from`: read the parent of a new dialogue.

    The fields from `fence` on are the result, valid when the job is done.
    """

    session_id: str
    branch_from: int | None = None
    fence: Fence | None = None
    """Fence of the turn's writes. None: another engine runs a turn of the session, retry."""
    stored: list[StoredSession] = field(default_factory=list)
    """The session or parent, then the sessions that it is rebuilt from, nearest first. Empty: there is none."""
    dialogue: int = 0
    """Number of the new dialogue; never reused, even if the turn fails."""


@dataclass(frozen=True, slots=True)
class Release:
    """A turn has ended without a commit, so others may start."""

    fence: Fence


@dataclass(eq=False, slots=True)
class DeleteNamed:
    """Delete all sessions that a name matches, on any engine. `count` is valid when the job is done."""

    session_id: str
    prefix: bool
    count: int = 0


@dataclass(eq=False, slots=True)
class DeleteOldest:
    """Delete up to `limit` sessions without a running turn, least recently used first."""

    limit: int
    cutoff: float | None
    """Only sessions unused since this Unix time."""
    count: int = 0


@dataclass(frozen=True, slots=True)
class StoredObject:
    """The object with a state's bytes, as its row names it."""

    key: str
    checksum: bytes


@dataclass(frozen=True, slots=True)
class ObjectLocation:
    """Where to fetch a state."""

    state: int
    session: int
    stored: StoredObject
    layout: Layout
    """Layout of its parts as stored, in order."""


@dataclass(frozen=True, slots=True)
class StoredParts:
    """A state as stored."""

    state: int
    parts: dict[str, bytes]
    layout: Layout


@dataclass(frozen=True, slots=True)
class Loaded:
    """A session's verified state with the tokens to replay after it."""

    host: HostState | None
    """None: no stored state. The replay starts from the session's origin."""
    replay: list[int]
    bytes_read: int
    num_tokens: int
    """Tokens of state and replay together, from the same read: more turns may have been logged after the request."""


@dataclass(frozen=True, slots=True)
class ListQuery:
    """A page of the session list, and newer information from memory. Sessions are given by row."""

    limit: int
    offset: int
    tiers: Mapping[int, Tier]
    """Rows whose state is in memory. All others are on disk."""
    newer: Mapping[int, SessionEntry]
    """Entries that replace those of the database, because memory has a newer turn."""
    deleted: frozenset[int] = frozenset()
    """Rows to leave out, since their delete is not on disk yet."""
    counted: bool = False
    """Whether to count the sessions too, because memory does not know all of them."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A session with damaged rows, and the message for its users."""

    row: int
    reason: str
