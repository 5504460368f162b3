"""How a session is named and held, and lists of sessions, as plain data."""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec

LINEAR = -1
"""Dialogue number of a plain session. Dialogues of a branching session are numbered from 1."""
ROOT = 0
"""The empty dialogue that every branching session starts from. It always exists and is never stored."""


class SessionKey(NamedTuple):
    session_id: str
    dialogue: int = LINEAR

    @property
    def display_name(self) -> str:
        """The name in lists: "s" for the plain session, "s:2" for dialogue 2. Never parsed."""
        return self.session_id if self.dialogue == LINEAR else f"{self.session_id}:{self.dialogue}"

    def entry(self, tier: Tier, updated: float) -> SessionEntry:
        """`updated`: Unix time of the last turn."""
        return SessionEntry(self.display_name, tier, updated, None if self.dialogue == LINEAR else self.dialogue)


class Fence(NamedTuple):
    """The right to write a session's next turn when engines share the database. Every commit compares it."""

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
    """One page of sessions, newest first."""

    total: int
    in_slots: int
    in_host_memory: int
    on_disk: int
    sessions: list[SessionEntry]
