"""What a list of the stored sessions says. Plain data, without what the pool needs to make it."""

from __future__ import annotations

import enum

import msgspec


class Tier(enum.StrEnum):
    """Where a state is: the fastest of the places that hold it."""

    SLOT = "slot"
    """A slot on the device (L1)."""
    HOST = "host"
    """Host memory (L2)."""
    DISK = "disk"
    """The database (L3)."""


class SessionEntry(msgspec.Struct, frozen=True):
    """One session, or one dialogue of a branching one."""

    session_id: str
    """As lists show it: with the dialogue's number behind a colon."""
    tier: Tier
    updated: float
    """Unix time of the last turn."""


class SessionPage(msgspec.Struct, frozen=True, kw_only=True):
    """All sessions counted by tier, and some of them, newest first."""

    total: int
    in_slots: int
    in_host_memory: int
    on_disk: int
    sessions: list[SessionEntry]
