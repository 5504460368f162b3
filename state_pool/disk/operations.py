"""Jobs of the writer and reader threads: their data, the queue of states to store, their errors for clients."""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from state_pool.disk.checkpoint_store import CheckpointStoreUnavailable
from state_pool.disk.state_store import ServerUnavailable
from state_pool.errors import DirectoryUnreachable, PoolError, SessionUnusable, TurnInDoubt, TurnNotStored
from state_pool.expiry import Gap
from state_pool.layout import HostState, Layout
from state_pool.origins import Origin
from state_pool.session_key import Fence, SessionEntry, SessionKey, Tier

Deliver = Callable[[Callable[[], None]], None]
"""Passes a callback to the engine thread."""
Done = Callable[[Exception | None], None]
"""Called on the engine thread: None when the write is committed, else its error."""


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session's row in the database, written with each turn."""

    row_id: int
    """Primary key; never reused."""
    key: SessionKey
    parent: int | None
    turn: int
    num_tokens: int
    """Tokens of all turns up to `turn`."""
    created: float
    updated: float
    origin: Origin | None = None
    adapter: Origin | None = None


@dataclass(frozen=True, slots=True)
class StoredSession:
    session: SessionRow
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
    """as in `Append`. None in a shared database: the session's row must still exist."""


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete sessions from the disk. A dialogue that children still need is hidden and goes later."""

    row_ids: tuple[int, ...]


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
    """The session or parent, then the sessions that it is rebuilt from, nearest first."""
    dialogue: int = 0
    """never reused, even if the turn fails"""


@dataclass(frozen=True, slots=True)
class Release:
    """End a turn without a commit, so that others may start."""

    fence: Fence


@dataclass(eq=False, slots=True)
class DeleteNamed:
    """Delete the sessions that a name matches. `count` is valid when the job is done."""

    session_id: str
    prefix: bool
    count: int = 0


@dataclass(eq=False, slots=True)
class DeleteOldest:
    """Delete up to `limit` sessions, least recently used first. Skips sessions with a running turn."""

    limit: int
    cutoff: float | None
    """Only sessions unused since this Unix time. None: of any age, because the database is too large."""
    planned: float = 0.0
    """Unix time when the cutoff was computed. An earlier time at the delete: the clock was set back."""
    count: int = 0
    """Result, set by the store: number of deleted sessions."""
    last_use: float | None = None
    """Result: Unix time of the latest use among them."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """The object with a state's bytes."""

    key: str
    checksum: bytes


@dataclass(frozen=True, slots=True)
class ObjectLocation:
    state: int
    session: int
    stored: StoredObject
    layout: Layout
    """Layout of its parts as stored, in order."""


@dataclass(frozen=True, slots=True)
class StoredParts:
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


LoadResult = Loaded | SessionUnusable


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
    owner: str = ""
    """"": of all owners."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A session with damaged rows, and the message for its users."""

    row_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class ClockSetBack:
    """Times that the clock showed twice."""

    times: Gap


SmallJob = Append | Delete | Quarantined | Acquire | Release | DeleteNamed | DeleteOldest | ClockSetBack
"""Jobs that fit into one transaction with others."""


@dataclass(slots=True, eq=False)
class StagedState:
    """A state being written: first its chunks or its object, then its row."""

    job: Checkpoint
    done: Done
    state_number: int = 0
    """Its number in the database, set before the first chunk."""
    chunks: deque[memoryview] = field(default_factory=deque)
    chunks_written: int = 0
    num_bytes: int = 0
    stored: StoredObject | None = None
    upload_started_at: float = 0.0
    """Unix time"""


class StagingQueue:
    def __init__(self) -> None:
        self.waiting: deque[StagedState] = deque()
        self.uploading: list[StagedState] = []
        self.current: StagedState | None = None

    def __len__(self) -> int:
        return len(self.waiting) + len(self.uploading) + (self.current is not None)

    def next(self) -> StagedState | None:
        """Return the state to write a chunk of next."""
        if self.current is None and self.waiting:
            self.current = self.waiting.popleft()
        return self.current

    def start_upload(self, staging: StagedState) -> bool:
        """Start the upload, so that others are written meanwhile. Returns False if a delete removed the state."""
        if self.current is not staging:
            return False
        self.current = None
        self.uploading.append(staging)
        return True

    def finish_upload(self, staging: StagedState) -> bool:
        """Queue the uploaded state's row next. Returns False if a delete removed it."""
        if staging not in self.uploading:
            return False
        self.uploading.remove(staging)
        self.waiting.appendleft(staging)
        return True

    def finish(self, staging: StagedState) -> bool:
        """Remove a written or failed state. Returns False if a delete removed it."""
        if staging in self.uploading:
            self.uploading.remove(staging)
            return True
        if self.current is not staging:
            return False
        self.current = None
        return True

    def forget(self, row_ids: set[int]) -> list[StagedState]:
        """Remove and return the states of these sessions. Some chunks of them may be written."""
        removed = [staged for staged in self.waiting if staged.job.session.row_id in row_ids]
        for staged in removed:
            self.waiting.remove(staged)
        for staged in [*self.uploading, *([self.current] if self.current is not None else [])]:
            if staged.job.session.row_id in row_ids:
                self.finish(staged)
                removed.append(staged)
        return removed


@dataclass(slots=True)
class WriterStats:
    """Counters of the writer thread. Other threads only read them."""

    commits: int = 0
    turns: int = 0
    states: int = 0
    state_bytes: int = 0
    failures: int = 0
    used_bytes: int = 0
    """without free pages"""
    object_bytes: int = 0
    """in a checkpoint store"""
    degraded: str | None = None
    """The last write error; None after a success."""


def is_environment_error(error: Exception) -> bool:
    """Whether the cause is outside the job. Then an immediate retry would fail too."""
    return isinstance(error, sqlite3.Error) and any(
        word in str(error) for word in ("locked", "busy", "full", "readonly", "I/O")
    )


def describe_error(error: Exception) -> str:
    """Return the cause and the remedy in one line."""
    if isinstance(error, CheckpointStoreUnavailable):
        return str(error)
    if not isinstance(error, sqlite3.Error):
        return f"{type(error).__name__}: {error}"
    text = str(error)
    if isinstance(error, ServerUnavailable):
        return f"the server of the session database does not answer ({text}); start it, or check the network"
    if isinstance(error, sqlite3.IntegrityError):
        return f"another process writes this session database ({text}): stop that process, then restart this service"
    if "full" in text:
        return f"no space is left for the session database ({text}); free space on its disk"
    if "moved" in text:
        return "the session database's file has been moved or removed; move it back, or restart the service"
    if "readonly" in text:
        return f"the session database is read-only ({text}); make it writable again"
    if "locked" in text or "busy" in text:
        return f"another program holds a lock on the session database ({text}); close it"
    return f"the session database cannot be written ({text}); check its disk"


def reported_error(error: Exception | None, job: SmallJob | Checkpoint, in_doubt: bool) -> Exception | None:
    """Return the error to report for a job. `in_doubt`: the outcome of a commit with the job is unknown."""
    ends_turn = isinstance(job, Append) or (isinstance(job, Checkpoint) and job.commits is not None)
    if error is not None and in_doubt and ends_turn:
        return TurnInDoubt("the connection to the session database was lost while it committed the turn")
    if error is None or isinstance(error, PoolError):
        return error
    if isinstance(error, ServerUnavailable):
        return DirectoryUnreachable(f"{describe_error(error)}; try again in a moment")
    outcome = "the turn was not stored" if isinstance(job, Append | Checkpoint) else "the change was not stored"
    return TurnNotStored(f"{outcome}: {describe_error(error)}")
