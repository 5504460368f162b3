"""What the pool refuses, each message naming the thing, the limit and the remedy."""

from __future__ import annotations


class PoolError(Exception):
    """Root of everything the pool raises or hands to a callback."""


class SessionBusy(PoolError):
    """A turn of the session is running and the caller would not wait."""


class SessionNotFound(PoolError):
    """No such session or dialogue, or it was deleted while the turn ran."""


class SessionUnusable(PoolError):
    """The session exists and must not be fed to this model: other model, damaged rows, unreadable disk."""


class PoolFull(PoolError):
    """A configured limit leaves no room for a new session."""


class TurnNotStored(PoolError):
    """The turn could not be made durable; its session stays as it was before the turn."""


class DatabaseUnusable(PoolError):
    """The session database cannot be opened: locked, read-only, truncated, of a newer schema."""
