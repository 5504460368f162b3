"""Which of a prompt's tokens a row tells the log-probabilities of, and what cannot be scored. No torch."""

from __future__ import annotations

from rwkv_batch.core.sequence import NOTHING_SCORED
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.request import GenerateRequest


def scored_positions(request: GenerateRequest) -> range:
    """Positions of the request's prompt whose log-probabilities it wants."""
    wanted = request.prompt_logprobs
    return NOTHING_SCORED if wanted is None else range(wanted.start, len(request.prompt))


def check_scoring(request: GenerateRequest, vocab: int) -> None:
    """Raises ServiceError for what cannot be read without drawing, or told of a prompt."""
    wanted, session = request.prompt_logprobs, request.session
    if request.max_tokens < 1 and (request.max_tokens < 0 or session is not None):
        what = "0, or 1 in a session, whose turns end with an answer"
        raise _invalid_field("max_tokens", f"must be at least {what}, got {request.max_tokens}", request.max_tokens)
    if session is not None and (wanted is not None or request.candidates):
        raise _invalid_field(
            "session_id", "a session's turn cannot be scored; leave the session out", session.session_id
        )
    if request.candidates and (request.n != 1 or not all(request.candidates)):
        raise _invalid_field("candidates", "must have a token each, and n must be 1 beside them", request.n)
    if wanted is not None and not (wanted.start >= 1 and 0 <= wanted.top <= vocab):
        given = f"start {wanted.start}, top {wanted.top}"
        raise _invalid_field("prompt_logprobs", f"start must be at least 1 and top 0..{vocab}, got {given}", given)


def _invalid_field(field: str, message: str, given: object) -> ServiceError:
    return ServiceError(ErrorKind.INVALID_FIELD, f"{field}: {message}", field=field, given=given)
