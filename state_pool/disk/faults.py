"""Faults of the session database: whose they are, and what to tell."""

from __future__ import annotations

import sqlite3

from state_pool.disk.checkpoint_store import CheckpointStoreAway
from state_pool.disk.state_store import ServerAway


def is_outside(error: Exception) -> bool:
    """Whether the fault lies outside the job: trying again at once would only wait again."""
    return isinstance(error, sqlite3.Error) and any(
        word in str(error) for word in ("locked", "busy", "full", "readonly", "I/O")
    )


def in_words(error: Exception) -> str:
    """What failed, and what to do about it."""
    if isinstance(error, CheckpointStoreAway):
        return str(error)
    if not isinstance(error, sqlite3.Error):
        return f"{type(error).__name__}: {error}"
    text = str(error)
    if isinstance(error, ServerAway):
        return f"the server of the session database does not answer ({text}); start it, or see to the network"
    if "full" in text:
        return f"no space is left for the session database ({text}); make room on its disk"
    if "readonly" in text:
        return f"the session database is read-only ({text}); make it writable again"
    if "locked" in text or "busy" in text:
        return f"another program holds a lock on the session database ({text}); close it"
    return f"the session database cannot be written ({text}); check its disk"
