"""What the pool refuses, each message naming the thing, the limit and the remedy."""

from __future__ import annotations


class PoolError(Exception):
    """Root of everything the pool raises or hands to a callback; `given`: what is at fault, if it was named."""

    def __init__(self, message: str, given: str | int | None = None) -> None:
        super().__init__(message)
        self.given = given


class SessionBusy(PoolError):  # noqa: N818 - names what happened, as the message does
    """A turn of the session is running and the caller would not wait."""


class SessionNotFound(PoolError):  # noqa: N818 - names what happened, as the message does
    """No such session or dialogue, or it was deleted while the turn ran."""


class DialogueNotFound(SessionNotFound):
    """The session has no such dialogue."""

    def __init__(self, session_id: str, dialogue: int) -> None:
        super().__init__(f"session {session_id!r} has no dialogue {dialogue}; 0 is its empty root", dialogue)


class InvalidSessionId(PoolError):  # noqa: N818 - names what happened, as the message does
    """No database can hold a session's id."""


class OriginMismatch(PoolError):  # noqa: N818 - names what happened, as the message does
    """The session began from another tuned state than the request names."""


class StateNotFound(PoolError):  # noqa: N818 - names what happened, as the message does
    """No tuned state of that name is loaded."""


class AdapterMismatch(PoolError):  # noqa: N818 - names what happened, as the message does
    """The session was begun with another adapter than the request names."""


class AdapterNotFound(PoolError):  # noqa: N818 - names what happened, as the message does
    """No adapter of that name, or of that session's, is loaded."""


class NameTaken(PoolError):  # noqa: N818 - names what happened, as the message does
    """A tuned state or an adapter has that name already."""

    def __init__(self, what: str, name: str) -> None:
        super().__init__(f"there is {what} {name!r} already; delete it first, or choose another name", name)


class SessionUnusable(PoolError):  # noqa: N818 - names what happened, as the message does
    """The session exists and must not be fed to this model: other model, damaged rows, unreadable disk."""


class SessionReadFailed(SessionUnusable):
    """The session could not be read this time: a server that is away, a disk's error, no memory; try again."""


class PoolFull(PoolError):  # noqa: N818 - names what happened, as the message does
    """A configured limit leaves no room for a new session."""


class TurnNotStored(PoolError):  # noqa: N818 - names what happened, as the message does
    """The turn could not be made durable; its session stays as it was before the turn."""


class TurnInDoubt(PoolError):  # noqa: N818 - names what happened, as the message does
    """The database was lost while it committed the turn: nobody knows whether it was kept."""


class StaleEpoch(PoolError):  # noqa: N818 - names what happened, as the message does
    """Another engine has taken the session over, or deleted it: what this one computed is not kept."""


class DirectoryUnreachable(PoolError):  # noqa: N818 - names what happened, as the message does
    """The database that engines share cannot say who has the session; try again in a moment."""


class SessionTooLarge(PoolError):  # noqa: N818 - names what happened, as the message does
    """The session makes a larger file than any service takes."""


class PoolLost(PoolError):  # noqa: N818 - names what happened, as the message does
    """A thread of the pool has died: nothing is durable any more, and the process must end."""


class DatabaseReadFailed(PoolError):  # noqa: N818 - names what happened, as the message does
    """The open database failed a question."""


class DatabaseTimeout(PoolError):  # noqa: N818 - names what happened, as the message does
    """The open database did not answer a question in time."""


class DatabaseUnusable(PoolError):  # noqa: N818 - names what happened, as the message does
    """The session database cannot be opened: locked, read-only, truncated, of a newer schema."""
