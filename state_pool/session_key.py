"""Names, fences and owners of sessions, and lists of sessions.

All are plain data. A fence says how a session is held. The stored id of an API key's session begins with the key's
name. A key's ids are thus a name space of that key, in every tier and in every engine. Ids without an owner are shared.
"""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

import msgspec

LINEAR = -1
"""Dialogue number of a plain session. Dialogues of a branching session are numbered from 1."""
ROOT = 0
"""The empty dialogue that every branching session starts from. It always exists and is never stored."""
_MAX_DIGITS = 19
"""Of a dialogue's number: more may not fit 64 bits."""


class SessionKey(NamedTuple):
    session_id: str
    dialogue: int = LINEAR

    @property
    def display_name(self) -> str:
        """The name in lists: "s" for the plain session, "s:2" for dialogue 2. See `dialogue_named`."""
        return self.session_id if self.dialogue == LINEAR else f"{self.session_id}:{self.dialogue}"

    def entry(self, tier: Tier, updated: float) -> SessionEntry:
        """Return the session's entry in lists. `updated`: Unix time of the last turn."""
        return SessionEntry(self.display_name, tier, updated, None if self.dialogue == LINEAR else self.dialogue)


def dialogue_named(display_name: str) -> SessionKey | None:
    """Return the dialogue that lists show by this name. None: no dialogue is shown so."""
    session_id, _, number = display_name.rpartition(":")
    key = SessionKey(session_id, int(number) if number.isdecimal() and len(number) < _MAX_DIGITS else ROOT)
    return key if key.dialogue > ROOT and key.display_name == display_name else None


class Fence(NamedTuple):
    """The right to write a session's next turn. Used when engines share the database. Every commit compares it."""

    session_id: str
    dialogue: int
    """LINEAR: the plain session, held by one engine at a time. ROOT: all dialogues, until a delete."""
    epoch: int
    """Number of this holding; never reused."""
    parent: int | None = None
    """Row of the parent that a new dialogue reads. It must not have been deleted."""


class Tier(enum.StrEnum):
    """The fastest tier that holds a state."""

    SLOT = "slot"
    """A GPU slot (L1)."""
    HOST = "host"
    """Host memory (L2)."""
    DISK = "disk"
    """The database (L3)."""


class SessionEntry(msgspec.Struct, frozen=True):
    session_id: str
    """The display name; a dialogue ends with a colon and its number."""
    tier: Tier
    updated: float
    """Unix time of the last turn"""
    dialogue: int | None = None
    """Number of the dialogue; None for a plain session. A session's id may equal a dialogue's display name."""


class SessionPage(msgspec.Struct, frozen=True, kw_only=True):
    """Session counts by tier, and one page of sessions, newest first."""

    total: int
    in_slots: int
    in_host_memory: int
    on_disk: int
    sessions: list[SessionEntry]


OWNED = "owner="
"""Begins every id with an owner: `owner=team-a/anna` is the session `anna` of the key `team-a`."""
_OWNER = re.compile(rf"(?<!/){OWNED}([A-Za-z0-9._@-]+)/")
"""An id that a client chose may begin like an owned one."""
_MAX_CHAR = "\U0010ffff"
Condition = tuple[str, tuple[str, ...]]
"""A condition of SQL on the column `session_id`, with its values."""


def owned_id(owner: str, session_id: str) -> str:
    """Return the stored id of an owner's session. Owner "" has no name space."""
    return f"{OWNED}{owner}/{session_id}" if owner else session_id


def owner_of(stored_id: str) -> str:
    """Return the owner's name, "" for a shared session."""
    found = _OWNER.match(stored_id)
    return "" if found is None else found[1]


def without_owner(text: str) -> str:
    """Remove the owner from each id of a text. Owners see their ids as they chose them."""
    return _OWNER.sub("", text)


def is_visible(stored_id: str, owner: str) -> bool:
    """Return whether an owner sees a session: its own, and shared ones. Owner "" sees all."""
    return not owner or not stored_id.startswith(OWNED) or stored_id.startswith(owned_id(owner, ""))


def visible_to(owner: str) -> Condition:
    """Return `is_visible` as a condition of SQL."""
    if not owner:
        return "1 = 1", ()
    shared, own = beginning_with(OWNED), beginning_with(owned_id(owner, ""))
    return f"(NOT ({shared[0]}) OR ({own[0]}))", shared[1] + own[1]


def has_prefix(stored_id: str, prefix: str) -> bool:
    """Return whether a delete by prefix includes a session. A prefix of shared ids includes no owner's session."""
    return stored_id.startswith(prefix) and (prefix.startswith(OWNED) or not stored_id.startswith(OWNED))


def matching_prefix(prefix: str) -> Condition:
    """Return `has_prefix` as a condition of SQL."""
    condition, values = beginning_with(prefix)
    if prefix.startswith(OWNED):
        return condition, values
    owned = beginning_with(OWNED)
    return f"{condition} AND NOT ({owned[0]})", values + owned[1]


def beginning_with(prefix: str) -> Condition:
    """Return the condition that an id begins with a text. An index on the column serves it."""
    return "session_id >= ? AND session_id < ?", (prefix, prefix + _MAX_CHAR)
