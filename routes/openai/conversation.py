"""From a conversation's body to the engine's rows, whichever of OpenAI's routes it came by."""

from __future__ import annotations

from routes.context import Context
from routes.openai.request import ConversationBody
from routes.openai.response import openai_rows
from routes.request import prompts
from routes.request.session_turn import as_turn
from routes.request.toolbox import FENCE
from rwkv_batch.request import GenerateRequest


async def conversation_rows(context: Context, body: ConversationBody, field: str) -> list[GenerateRequest]:
    """One row with `n` continuations, in its session if it has one. Raises ServiceError naming `field`.

    An existing session reads only what follows the last answer; its state holds the rest, tools among it.
    """
    opening = FENCE if body.form.is_call else None
    listing = "" if body.toolbox is None else body.toolbox.listing
    messages = body.conversation
    whole = prompts.chat(messages, body.think, continues=body.continues, listing=listing, opening=opening)
    rows = await openai_rows(context, body, [whole], body.stops, field)
    if body.session_id is None:
        return rows
    new = prompts.chat(prompts.new_messages(messages), body.think, opening=opening)
    return await as_turn(context, rows, whole, body.session_id, new, field, wait=body.wait)
