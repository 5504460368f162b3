"""Translates exceptions into ServiceError, the type that clients receive."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from rwkv_batch.errors import MAY_BE_KEPT, ErrorInfo, ErrorKind, ServiceError, invalid
from rwkv_batch.request import GenerateRequest
from rwkv_batch.tokenizer import END_OF_TEXT
from sampling.grammar.constraint import GrammarError, NoTokenLeftError
from state_pool import errors
from state_pool.session_key import without_owner

logger = logging.getLogger(__name__)

_KINDS: dict[type[errors.PoolError], tuple[ErrorKind, str]] = {
    errors.SessionBusy: (ErrorKind.SESSION_BUSY, ""),
    errors.SessionNotFound: (ErrorKind.SESSION_NOT_FOUND, ""),
    errors.DialogueNotFound: (ErrorKind.SESSION_NOT_FOUND, "dialogue_idx"),
    errors.InvalidSessionId: (ErrorKind.INVALID_FIELD, ""),
    errors.SessionUnusable: (ErrorKind.SESSION_UNUSABLE, ""),
    errors.SessionReadFailed: (ErrorKind.ENGINE_LOST, ""),
    errors.PoolFull: (ErrorKind.OVERLOADED, ""),
    errors.DatabaseTimeout: (ErrorKind.TIMEOUT, ""),
    errors.SessionTooLarge: (ErrorKind.BODY_TOO_LARGE, ""),
    errors.StateNotFound: (ErrorKind.STATE_NOT_FOUND, "state"),
    errors.AdapterNotFound: (ErrorKind.ADAPTER_NOT_FOUND, "adapter"),
    errors.NameTaken: (ErrorKind.NAME_TAKEN, "name"),
    errors.OriginMismatch: (ErrorKind.INVALID_FIELD, "state"),
    errors.AdapterMismatch: (ErrorKind.INVALID_FIELD, "adapter"),
    errors.StaleEpoch: (ErrorKind.SESSION_BUSY, ""),
    errors.DirectoryUnreachable: (ErrorKind.ENGINE_LOST, ""),
    errors.TurnInDoubt: (ErrorKind.ENGINE_LOST, ""),
}
"""Kind, and the field at fault of errors that always concern the same field."""
_RETRY_AFTER_S: dict[type[errors.PoolError], float] = {errors.DirectoryUnreachable: 2.0, errors.SessionReadFailed: 2.0}


def as_service_error(
    error: Exception, field: str | None = "session_id", given: str | int | None = None
) -> ServiceError:
    """Translate a failure of the state pool into a ServiceError.

    field, given: the request's field at fault and its value, unless the error names them
    """
    if isinstance(error, errors.PoolError):
        kind, own_field = _KINDS.get(type(error), (ErrorKind.INTERNAL, ""))
        given = error.given if own_field or error.given is not None else given
        field = own_field or field
        message = without_owner(f"{error}; {MAY_BE_KEPT}" if isinstance(error, errors.TurnInDoubt) else str(error))
        given = without_owner(given) if isinstance(given, str) else given
        return ServiceError(kind, message, field=field, given=given, retry_after_s=_RETRY_AFTER_S.get(type(error)))
    message = f"the state pool failed ({type(error).__name__}: {error}); the server's log says more"
    return ServiceError(ErrorKind.INTERNAL, message, field=field, given=given)


def describe_error(error: BaseException) -> str:
    """Return an exception's type and text."""
    return f"{type(error).__name__}: {error}".rstrip(": ")


def error_translator(
    failure: str, fields: Mapping[type[Exception], str] | None = None, pool_field: str = "session_id"
) -> Callable[[BaseException], ServiceError]:
    """Return a function that translates exceptions into ServiceError.

    failure: message for an unexpected exception, which is logged and becomes an internal error.
    fields: exceptions that a request causes, with the field at fault.
    pool_field: the field at fault for errors of the pool that name none.
    """
    fields_by_error = dict(fields or {})

    def translate(error: BaseException) -> ServiceError:
        if isinstance(error, ServiceError):
            return error
        field = next((field for kind, field in fields_by_error.items() if isinstance(error, kind)), None)
        if field is not None:
            return invalid(field, str(error), getattr(error, "given", None))
        if isinstance(error, errors.PoolError):
            return as_service_error(error, pool_field)
        logger.error("%s", failure, exc_info=error)
        reason = error.strerror if isinstance(error, OSError) else None  # its text has the server's path
        return ServiceError(ErrorKind.INTERNAL, f"{failure}: {type(error).__name__}: {reason or error}")

    return translate


def engine_lost_error(message: str) -> ErrorInfo:
    return ErrorInfo(kind=ErrorKind.ENGINE_LOST, message=message)


def out_of_memory_error(rows: int, tokens: int) -> ErrorInfo:
    """Return the error of jobs whose step did not fit.

    rows, tokens: the size of the step
    """
    message = (
        f"out of device memory: a step of {rows} rows and {tokens} tokens did not fit; "
        "retry in 5 s, send fewer rows at once, or lower prefill_tokens_per_step"
    )
    return ErrorInfo(kind=ErrorKind.OVERLOADED, message=message, retry_after_s=5)


SHUTDOWN_ERROR = ErrorInfo(
    kind=ErrorKind.DRAINING,
    message="the service was shut down before this answer was complete (drain_timeout_s); send the request again",
    retry_after_s=5,
)


def draining_error() -> ServiceError:
    return ServiceError(
        ErrorKind.DRAINING, "the service is shutting down and accepts no new requests; retry in 5 s", retry_after_s=5
    )


def grammar_failure(request: GenerateRequest, error: GrammarError) -> ErrorInfo:
    """Return the error of a row whose grammar cannot continue."""
    constraint = request.constraint
    assert constraint is not None
    field = constraint.field or constraint.form
    message = f"{field}: {error}"
    if isinstance(error, NoTokenLeftError) and (banned := _num_banned(request)):
        message = f"logit_bias: it bans {banned} tokens, and with them every token that {field} allows next; ban fewer"
        field = "logit_bias"
    return ErrorInfo(kind=ErrorKind.INVALID_FIELD, message=message, field=field)


def _num_banned(request: GenerateRequest) -> int:
    bias = request.sampling.logit_bias
    return sum(value == float("-inf") for value in bias.values()) - (request.ignore_eos and END_OF_TEXT in bias)
