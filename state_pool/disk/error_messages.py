"""Classifies errors of the session database and words them for clients."""

from __future__ import annotations

import sqlite3

from state_pool.disk.applier import SmallJob
from state_pool.disk.checkpoint_store import CheckpointStoreUnavailable
from state_pool.disk.operations import Append, Checkpoint
from state_pool.disk.state_store import ServerUnavailable
from state_pool.errors import DirectoryUnreachable, PoolError, TurnInDoubt, TurnNotStored


def is_environment_error(error: Exception) -> bool:
    """Whether the cause is outside the job, so that an immediate retry would fail too."""
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
    if error is not None and in_doubt and _ends_turn(job):
        return TurnInDoubt("the connection to the session database was lost while it committed the turn")
    if error is None or isinstance(error, PoolError):
        return error
    if isinstance(error, ServerUnavailable):
        return DirectoryUnreachable(f"{describe_error(error)}; try again in a moment")
    outcome = "the turn was not stored" if isinstance(job, Append | Checkpoint) else "the change was not stored"
    return TurnNotStored(f"{outcome}: {describe_error(error)}")


def _ends_turn(job: SmallJob | Checkpoint) -> bool:
    return isinstance(job, Append) or (isinstance(job, Checkpoint) and job.commits is not None)
