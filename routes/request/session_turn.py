"""A row that continues a stored session instead of standing alone."""

from __future__ import annotations

import msgspec

from routes.context import Context
from routes.request import prompts
from routes.request.generate_requests import encode, off_loop
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
    """The one row of a request as a turn. Raises ServiceError.

    prompt: what the row was made of, for a new session; resume: what an existing one reads, mostly the same.
    """
    if len(rows) != 1:
        raise invalid(field, f"a session takes exactly one prompt a request, got {len(rows)}", len(rows))
    known = without_padding(rows[0].prompt) if resume == prompt else None
    ids = await off_loop(len(resume), _resume_ids, context, resume, known, field)
    turn = SessionTurn(session_id=session_id, resume_prompt=ids, branch_from=branch_from, wait=wait)
    return [msgspec.structs.replace(rows[0], session=turn)]


def _resume_ids(context: Context, resume: str | list[int], known: list[int] | None, field: str) -> list[int]:
    """Token ids of a turn after the round before; `known`: those of `resume` itself, if it has been tokenised.

    Tokens are the longest that fit, from the left: if the blank line put before the text is a token of its own, what
    follows it is tokenised as it was.
    """
    if isinstance(resume, list):
        return encode(context.tokenizer, resume, field, context.config)
    text = prompts.resumed(resume)
    if known is None or text == resume:
        return encode(context.tokenizer, known or text, field, context.config)
    first = context.tokenizer.encode(text[: context.tokenizer.longest_token])[:1]
    is_apart = context.tokenizer.decode_bytes(first) == prompts.ROUND_BREAK.encode()
    return encode(context.tokenizer, first + known if is_apart else text, field, context.config)


def without_padding(ids: list[int]) -> list[int]:
    """A prompt's ids without the token that `pad_zero` put before them; no text has that token."""
    return ids[1:] if ids[0] == END_OF_TEXT else ids
