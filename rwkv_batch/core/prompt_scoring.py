"""Checks scoring requests and selects the prompt positions to score. No torch."""

from __future__ import annotations

from rwkv_batch.core.sequence import NOTHING_SCORED
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.request import GenerateRequest


def scored_positions(request: GenerateRequest) -> range:
    scoring = request.prompt_logprobs
    return NOTHING_SCORED if scoring is None else range(scoring.start, len(request.prompt))


def check_scoring(request: GenerateRequest, vocab: int) -> None:
    """Raises ServiceError."""
    scoring, session = request.prompt_logprobs, request.session
    if request.max_tokens < 1 and (request.max_tokens < 0 or session is not None):
        least = "at least 0, and at least 1 in a session"
        raise _invalid_field("max_tokens", f"must be {least}, got {request.max_tokens}", request.max_tokens)
    if session is not None and (scoring is not None or request.candidates):
        message = "a session's turn cannot be scored; leave the session out"
        raise _invalid_field("session_id", message, session.session_id)
    if request.candidates and (request.n != 1 or not all(request.candidates)):
        raise _invalid_field("candidates", "each must have at least one token, and n must be 1", request.n)
    if scoring is not None and not (scoring.start >= 1 and 0 <= scoring.top <= vocab):
        given = f"start {scoring.start}, top {scoring.top}"
        raise _invalid_field("prompt_logprobs", f"start must be at least 1 and top 0..{vocab}, got {given}", given)


def _invalid_field(field: str, message: str, given: object) -> ServiceError:
    return ServiceError(ErrorKind.INVALID_FIELD, f"{field}: {message}", field=field, given=given)
