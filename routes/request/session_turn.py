"""Rows that continue a stored session."""

from __future__ import annotations

import msgspec

from routes.context import Context
from routes.request import prompts
from routes.request.generate_requests import encode, offload_if_large
from rwkv_batch.errors import invalid
from rwkv_batch.request import GenerateRequest, SessionTurn
from rwkv_batch.tokenizer import END_OF_TEXT


async def as_turn(
    context: Context,
    rows: list[GenerateRequest],
    prompt: str | list[int],
    session_id: str,
    resume: str | list[int],
    field: str,
    *,
    branch_from: int | None = None,
    wait: bool = True,
) -> list[GenerateRequest]:
    """Return the request's one row as a session turn. Raises ServiceError.

    prompt: prompt of a new session
    resume: prompt of an existing session, often the same
    """
    if len(rows) != 1:
        raise invalid(field, f"a session takes exactly one prompt per request, got {len(rows)}", len(rows))
    resume_ids = without_padding(rows[0].prompt) if resume == prompt else None
    ids = await offload_if_large(len(resume), _resume_ids, context, resume, resume_ids, field)
    turn = SessionTurn(session_id=session_id, resume_prompt=ids, branch_from=branch_from, wait=wait)
    return [msgspec.structs.replace(rows[0], session=turn)]


def _resume_ids(context: Context, resume: str | list[int], resume_ids: list[int] | None, field: str) -> list[int]:
    """Return the token ids of a turn after the previous one.

    resume_ids: token ids of `resume`, if it is already encoded

    Tokens are matched greedily from the left. If the added blank line is a token of its own, `resume_ids` stay valid.
    """
    if isinstance(resume, list):
        return encode(context.tokenizer, resume, field, context.config)
    text = prompts.continuation_prompt(resume)
    if resume_ids is None or text == resume:
        return encode(context.tokenizer, resume_ids or text, field, context.config)
    first = context.tokenizer.encode(text[: context.tokenizer.max_token_bytes])[:1]
    is_separate_token = context.tokenizer.decode_bytes(first) == prompts.TURN_SEPARATOR.encode()
    return encode(context.tokenizer, first + resume_ids if is_separate_token else text, field, context.config)


def without_padding(ids: list[int]) -> list[int]:
    """Return the ids without the token that `pad_zero` added. No text encodes to that token."""
    return ids[1:] if ids[0] == END_OF_TEXT else ids
