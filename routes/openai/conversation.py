"""Turns the body of a conversation into the engine's rows, for all OpenAI routes."""

from __future__ import annotations

from collections.abc import Sequence

from routes.context import Context
from routes.openai.formatter import openai_rows
from routes.openai.request import ConversationBody
from routes.request import prompts
from routes.request.bodies import Template
from routes.request.jobs import as_turn
from routes.request.messages import Message
from routes.request.tool_set import FENCE, ToolSet, begins_with_call
from rwkv_batch.request import GenerateRequest


async def conversation_rows(context: Context, body: ConversationBody, field: str) -> list[GenerateRequest]:
    """Return one row with `n` continuations, as a session turn if the body names one. Raises ServiceError.

    An existing session computes only the messages after the last answer. Its state has the rest, including the tools.
    """
    messages = body.conversation
    prompt = prompt_of(messages, body.think, body.tool_set, template=body.template, continues=body.continues)
    rows = await openai_rows(context, body, [prompt], body.stops, field)
    if body.session_id is None:
        return rows
    opening = FENCE if body.answer_format.opens_with_call else None
    new = prompts.chat(prompts.new_messages(messages), body.think, template=body.template, opening=opening)
    return await as_turn(context, rows, prompt, body.session_id, new, field, wait=body.wait)


def prompt_of(
    messages: Sequence[Message],
    think: prompts.Think,
    tool_set: ToolSet | None,
    *,
    template: Template | None = None,
    continues: bool = False,
) -> str:
    """Return the prompt of a whole conversation whose answer may call the tools of `tool_set`."""
    listing = "" if tool_set is None else tool_set.listing
    begins_call = begins_with_call(tool_set, thinks=think is not prompts.Think.OFF, continues=continues)
    opening = FENCE if begins_call else None
    return prompts.chat(messages, think, template=template, continues=continues, listing=listing, opening=opening)
