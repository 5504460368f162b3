"""What work for a request ended with, in the words of the one error table."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from rwkv_batch.errors import MAY_BE_KEPT, ErrorKind, ServiceError
from state_pool.errors import (
    AdapterNotFound,
    DatabaseSlow,
    DialogueNotFound,
    DirectoryUnreachable,
    NameTaken,
    OtherAdapter,
    OtherOrigin,
    PoolError,
    PoolFull,
    SessionBusy,
    SessionNotFound,
    SessionTooLarge,
    SessionUnread,
    SessionUnusable,
    StaleEpoch,
    StateNotFound,
    TurnInDoubt,
    UnfitName,
)

logger = logging.getLogger(__name__)

_KINDS: dict[type[PoolError], ErrorKind] = {
    SessionBusy: ErrorKind.SESSION_BUSY,
    SessionNotFound: ErrorKind.SESSION_NOT_FOUND,
    DialogueNotFound: ErrorKind.SESSION_NOT_FOUND,
    UnfitName: ErrorKind.INVALID_FIELD,
    SessionUnusable: ErrorKind.SESSION_UNUSABLE,
    SessionUnread: ErrorKind.ENGINE_LOST,
    PoolFull: ErrorKind.OVERLOADED,
    DatabaseSlow: ErrorKind.TIMEOUT,
    SessionTooLarge: ErrorKind.BODY_TOO_LARGE,
    StateNotFound: ErrorKind.STATE_NOT_FOUND,
    AdapterNotFound: ErrorKind.ADAPTER_NOT_FOUND,
    NameTaken: ErrorKind.NAME_TAKEN,
    OtherOrigin: ErrorKind.INVALID_FIELD,
    OtherAdapter: ErrorKind.INVALID_FIELD,
    StaleEpoch: ErrorKind.SESSION_BUSY,
    DirectoryUnreachable: ErrorKind.ENGINE_LOST,
    TurnInDoubt: ErrorKind.ENGINE_LOST,
}
_RETRY_AFTER_S: dict[type[PoolError], float] = {DirectoryUnreachable: 2.0, SessionUnread: 2.0}
_FIELDS: dict[type[PoolError], str] = {
    DialogueNotFound: "dialogue_idx",
    StateNotFound: "state",
    OtherOrigin: "state",
    AdapterNotFound: "adapter",
    OtherAdapter: "adapter",
    NameTaken: "name",
}
"""Where it is always the same field that is wrong."""


def as_service_error(
    error: Exception, field: str | None = "session_id", given: str | int | None = None
) -> ServiceError:
    """A pool's failure in the words of the one error table.

    `field`: what the request named wrongly, if anything, as `given`; where the failure does not say so itself.
    """
    if isinstance(error, PoolError):
        of_kind = _FIELDS.get(type(error))
        given = error.given if of_kind or error.given is not None else given
        field = of_kind or field
        kind, retry_after_s = _KINDS.get(type(error), ErrorKind.INTERNAL), _RETRY_AFTER_S.get(type(error))
        message = f"{error}; {MAY_BE_KEPT}" if isinstance(error, TurnInDoubt) else str(error)
        return ServiceError(kind, message, field=field, given=given, retry_after_s=retry_after_s)
    message = f"the state pool failed ({type(error).__name__}: {error}); the server's log says more"
    return ServiceError(ErrorKind.INTERNAL, message, field=field, given=given)


def named(error: BaseException) -> str:
    """What was caught, in a message; some have no text of their own."""
    return f"{type(error).__name__}: {error}".rstrip(": ")


def as_table(what: str, fields: Mapping[type[Exception], str] | None = None) -> Callable[[BaseException], ServiceError]:
    """A translation of failures into the table's words.

    `what`: could not be done, of a failure that nobody has thought of, which is a fault of ours: it is logged, and told
    as one. `fields`: of failures that are a request's, the field of it that was wrong.
    """
    of_fields = dict(fields or {})

    def translated(error: BaseException) -> ServiceError:
        if isinstance(error, ServiceError):
            return error
        field = next((field for kind, field in of_fields.items() if isinstance(error, kind)), None)
        if field is not None:
            given = getattr(error, "given", None)
            return ServiceError(ErrorKind.INVALID_FIELD, f"{field}: {error}", field=field, given=given)
        if isinstance(error, PoolError):
            return as_service_error(error)
        logger.error("%s", what, exc_info=error)
        return ServiceError(ErrorKind.INTERNAL, f"{what}: {type(error).__name__}: {error}")

    return translated
