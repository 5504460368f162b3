"""The session list as plain data."""

from __future__ import annotations

import enum

import msgspec


class Tier(enum.StrEnum):
    """The fastest tier that holds a state."""

    SLOT = "slot"
    """A GPU slot (L1)."""
    HOST = "host"
    """Host memory (L2)."""
    DISK = "disk"
    """The database (L3)."""


class SessionEntry(msgspec.Struct, frozen=True):
    """One session, or one dialogue of a branching one."""

    session_id: str
    """The display name; a dialogue ends with a colon and its number."""
    tier: Tier
    updated: float
    """Unix time of the last turn."""


class SessionPage(msgspec.Struct, frozen=True, kw_only=True):
    """Session counts by tier, and one page of sessions, newest first."""

    total: int
    in_slots: int
    in_host_memory: int
    on_disk: int
    sessions: list[SessionEntry]
