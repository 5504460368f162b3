"""A row that continues a stored session instead of standing alone."""

from __future__ import annotations

import msgspec

from routes.context import Context
from routes.request import prompts
from routes.request.generate_requests import encode, invalid
from rwkv_batch.request import GenerateRequest, SessionTurn


def as_turn(
    context: Context,
    rows: list[GenerateRequest],
    session_id: str,
    resume: str | list[int],
    field: str,
    *,
    branch_from: int | None = None,
    wait: bool = True,
) -> list[GenerateRequest]:
    """The one row of a request as a turn; `resume` is what an existing session reads. Raises ServiceError."""
    if len(rows) != 1:
        raise invalid(field, f"a session takes exactly one prompt a request, got {len(rows)}", len(rows))
    prompt = prompts.resumed(resume) if isinstance(resume, str) else resume
    ids = encode(context.tokenizer, prompt, field, context.config)
    turn = SessionTurn(session_id=session_id, resume_prompt=ids, branch_from=branch_from, wait=wait)
    return [msgspec.structs.replace(rows[0], session=turn)]
