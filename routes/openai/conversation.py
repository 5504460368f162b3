"""From a conversation's body to the engine's rows, whichever of OpenAI's routes it came by."""

from __future__ import annotations

from collections.abc import Sequence

from routes.context import Context
from routes.openai.request import ConversationBody
from routes.openai.response import openai_rows
from routes.request import prompts
from routes.request.bodies import Message, Template
from routes.request.session_turn import as_turn
from routes.request.toolbox import FENCE, Toolbox, begins_with_call
from rwkv_batch.request import GenerateRequest


async def conversation_rows(context: Context, body: ConversationBody, field: str) -> list[GenerateRequest]:
    """One row with `n` continuations, in its session if it has one. Raises ServiceError naming `field`.

    An existing session reads only what follows the last answer; its state holds the rest, tools among it.
    """
    messages = body.conversation
    whole = prompt_of(messages, body.think, body.toolbox, template=body.template, continues=body.continues)
    rows = await openai_rows(context, body, [whole], body.stops, field)
    if body.session_id is None:
        return rows
    opening = FENCE if body.form.is_call else None
    new = prompts.chat(prompts.new_messages(messages), body.think, template=body.template, opening=opening)
    return await as_turn(context, rows, whole, body.session_id, new, field, wait=body.wait)


def prompt_of(
    messages: Sequence[Message],
    think: prompts.Think,
    toolbox: Toolbox | None,
    *,
    template: Template | None = None,
    continues: bool = False,
) -> str:
    """The prompt of a whole conversation, whose answer may call what is in the toolbox."""
    listing = "" if toolbox is None else toolbox.listing
    begins_call = begins_with_call(toolbox, thinks=think is not prompts.Think.OFF, continues=continues)
    opening = FENCE if begins_call else None
    return prompts.chat(messages, think, template=template, continues=continues, listing=listing, opening=opening)
