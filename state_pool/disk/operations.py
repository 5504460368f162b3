"""What the engine thread asks of the writer and reader threads, and what comes back. Plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from state_pool.arena import HostState
from state_pool.session_page import SessionEntry, Tier
from state_pool.sessions import SessionKey
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
    adapter: Origin | None = None
    """The tuned state that the session began from."""


@dataclass(frozen=True, slots=True)
class Append:
    """Commit a turn's token ids; many such are committed together."""

    session: SessionRow
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Commit a state; `commits` also makes it the session's newest turn (durability "turn")."""

    session: SessionRow
    host: HostState
    commits: Append | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove sessions from the disk; a dialogue whose children still need it goes later, hidden until then."""

    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A session's state as it was stored, verified, with what to replay after it."""

    host: HostState | None
    """None: no stored state applies; replay starts from what the session began from."""
    replay: list[int]
    bytes_read: int


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


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A session whose rows are damaged: what to tell whoever asks for it."""

    row: int
    reason: str
