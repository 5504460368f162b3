"""Errors of the pool. Each message names the object, the limit and the remedy."""

from __future__ import annotations

from collections.abc import Iterable


class PoolError(Exception):
    """Base of all errors raised by the pool or passed to callbacks.

    `given`: the name or number from the request that is at fault, if there is one.
    """

    def __init__(self, message: str, given: str | int | None = None) -> None:
        super().__init__(message)
        self.given = given


class SessionBusy(PoolError):  # noqa: N818 - names what happened, as the message does
    """A turn of the session runs and the caller does not wait."""


class SessionNotFound(PoolError):  # noqa: N818 - names what happened, as the message does
    """No such session or dialogue, or it was deleted during the turn."""


class DialogueNotFound(SessionNotFound):
    def __init__(self, session_id: str, dialogue: int) -> None:
        super().__init__(f"session {session_id!r} has no dialogue {dialogue}; 0 is its empty root", dialogue)


class InvalidSessionId(PoolError):  # noqa: N818 - names what happened, as the message does
    """A database cannot store this id."""


class OriginMismatch(PoolError):  # noqa: N818 - names what happened, as the message does
    """The session started from another tuned state than the request names."""


PRIVATE_PREFIX = "ft-"
"""Begins the names that only their owners may know: those of fine-tuning jobs."""


def shown_names(names: Iterable[str]) -> str:
    """Return the names that everybody may know, as an error lists them."""
    return ", ".join(repr(name) for name in names if not name.startswith(PRIVATE_PREFIX)) or "none"


class StateNotFound(PoolError):  # noqa: N818 - names what happened, as the message does
    pass


class AdapterMismatch(PoolError):  # noqa: N818 - names what happened, as the message does
    """The session runs under another adapter than the request names."""


class AdapterNotFound(PoolError):  # noqa: N818 - names what happened, as the message does
    """No adapter of that name, or with the session's weights, is loaded."""


class NameTaken(PoolError):  # noqa: N818 - names what happened, as the message does
    def __init__(self, what: str, name: str) -> None:
        super().__init__(f"there is {what} {name!r} already; delete it first, or choose another name", name)


class SessionUnusable(PoolError):  # noqa: N818 - names what happened, as the message does
    """The session exists, but this model must not read it: other model, damaged rows, unreadable disk."""


class SessionReadFailed(SessionUnusable):
    """The session could not be read this time: server down, disk error, no memory. Retry."""


class PoolFull(PoolError):  # noqa: N818 - names what happened, as the message does
    """A configured limit leaves no room."""


class TurnNotStored(PoolError):  # noqa: N818 - names what happened, as the message does
    """The turn could not be made durable. Its session is unchanged."""


class TurnInDoubt(PoolError):  # noqa: N818 - names what happened, as the message does
    """The connection broke during the turn's commit: the turn may or may not be stored."""


class StaleEpoch(PoolError):  # noqa: N818 - names what happened, as the message does
    """Another engine has taken over or deleted the session. This turn is not kept."""


class DirectoryUnreachable(PoolError):  # noqa: N818 - names what happened, as the message does
    """The shared database cannot say which engine has the session. Retry."""


class SessionTooLarge(PoolError):  # noqa: N818 - names what happened, as the message does
    pass


class PoolLost(PoolError):  # noqa: N818 - names what happened, as the message does
    """A pool thread has died: nothing becomes durable, and the process must end."""


class DatabaseReadFailed(PoolError):  # noqa: N818 - names what happened, as the message does
    pass


class DatabaseTimeout(PoolError):  # noqa: N818 - names what happened, as the message does
    """The database did not answer in time. The query may still be running."""


class DatabaseUnusable(PoolError):  # noqa: N818 - names what happened, as the message does
    """The session database cannot be opened: locked, read-only, truncated or of a newer schema."""


class SessionCorrupted(SessionUnusable):
    """Stored rows contradict their checksums or each other. The session must be quarantined."""

    def __init__(self, fault: str) -> None:
        super().__init__(f"{fault}; delete the session to start a new one")
