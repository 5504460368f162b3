"""Prompt formats of the public RWKV-7 G1 weights."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from itertools import dropwhile, groupby

from routes.request.bodies import DEFAULT_STOPS, Template
from routes.request.messages import Message
from routes.request.tools import call_text
from rwkv_batch.turn_text import collapse_newlines, format_turn

FIM_STOP = "✿"
END_OF_TEXT, BLANK_LINE = 0, 261
"""Token ids."""
TURN_SEPARATOR = "\n\n"
THINK_START = "<think"
DEFAULT_TEMPLATE = Template.model_validate({"opening": "<think>\n</think>"})
"""The format that the weights were trained on."""
_SYSTEM_ROLES = ("system", "developer")
_TOOL_ROLES = ("tool", "function")


class Think(enum.StrEnum):
    """How long the model thinks before it answers."""

    OFF = "off"
    ON = "on"
    SHORT = "short"
    MEDIUM = "medium"
    LONG = "long"


_THINK_HINTS = {Think.SHORT: " (think a bit)", Think.MEDIUM: " (think)", Think.LONG: " (think a lot)"}
"""Text at the end of the user's last turn."""
EFFORTS = {
    "none": Think.OFF,
    "minimal": Think.SHORT,
    "low": Think.SHORT,
    "medium": Think.MEDIUM,
    "high": Think.LONG,
    "xhigh": Think.LONG,
}
"""Think mode of each OpenAI `reasoning_effort`."""


def answer_stops(think: Think, may_call: bool, template: Template | None = None) -> tuple[int | str, ...]:
    """Return the default stops of an answer. An answer with tool calls may have blank lines."""
    if think is Think.OFF and not may_call:
        return DEFAULT_STOPS if template is None else (END_OF_TEXT, BLANK_LINE)
    # A thought may have blank lines and the word User, so only a new label ends the answer.
    labels = DEFAULT_TEMPLATE if template is None else template
    return (END_OF_TEXT, *(f"{TURN_SEPARATOR}{label}:" for label in (labels.user, labels.system, labels.assistant)))


def _label(role: str, labels: Template) -> str:
    if role in _SYSTEM_ROLES:
        return labels.system
    return labels.assistant if role == "assistant" else labels.user


def think_mode(enable_think: bool) -> Think:
    return Think.ON if enable_think else Think.OFF


def chat(
    messages: Sequence[Message],
    think: Think,
    *,
    template: Template | None = None,
    continues: bool = False,
    listing: str = "",
    opening: str | None = None,
) -> str:
    """Return `System: …\\n\\nUser: …\\n\\nAssistant:` and the opening for the think mode.

    continues: the last message is the assistant's, and the answer continues it
    listing: text at the end of the system message, such as the list of tools
    opening: start of the answer, instead of the think mode's
    template: labels to use instead of the trained ones
    """
    labels = DEFAULT_TEMPLATE if template is None else template
    messages = _sort_tool_results(messages)
    last_user = max((i for i, message in enumerate(messages) if message.role == "user"), default=None)
    rounds = [
        f"{_label(message.role, labels)}: {turn_text(message)}".rstrip(" ")
        + (_THINK_HINTS.get(think, "") if i == last_user else "")
        for i, message in enumerate(messages)
    ]
    if listing and messages and messages[0].role in _SYSTEM_ROLES:
        rounds[0] += ("\n" if messages[0].text.strip() else " ") + listing
    elif listing:
        rounds.insert(0, f"{labels.system}: {listing}")
    answer_prefix = opening
    if answer_prefix is None:
        answer_prefix = labels.opening if think is Think.OFF else THINK_START
    if continues:
        answer_prefix = collapse_newlines(messages[-1].text).lstrip()
    last = f"{labels.assistant}: {answer_prefix}" if answer_prefix else f"{labels.assistant}:"
    return TURN_SEPARATOR.join([*(rounds[:-1] if continues else rounds), last])


def turn_text(message: Message) -> str:
    """Return a message as a prompt has it, after its label."""
    text = format_turn(message.text)
    if message.role in _TOOL_ROLES:
        return f"Function output:\n{text}"
    calls = (format_turn(call_text(call.function.name, call.function.arguments)) for call in message.tool_calls or ())
    return "\n".join(filter(None, (text, *calls)))


def _sort_tool_results(messages: Sequence[Message]) -> list[Message]:
    """Sort tool results into the order of their calls. The prompt format has no call ids."""
    ordered: list[Message] = []
    calls: list[str] = []
    for is_result, group in groupby(messages, lambda message: message.role in _TOOL_ROLES):
        turns = list(group)
        if is_result:
            turns.sort(key=lambda one: calls.index(one.tool_call_id) if one.tool_call_id in calls else len(calls))
        else:
            calls = [call.id for call in turns[-1].tool_calls or ()]
        ordered += turns
    return ordered


def new_messages(messages: Sequence[Message]) -> list[Message]:
    """Return the messages that a session has not seen: those after the last answer.

    Leading system messages are left out, so that a client may send them with every turn.
    """
    answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
    if answers:
        return list(messages[answers[-1] + 1 :])
    return list(dropwhile(lambda message: message.role in _SYSTEM_ROLES, messages)) or list(messages)


def continuation_prompt(prompt: str) -> str:
    """Return the prompt for an existing session: after the blank line that ends the previous turn."""
    return prompt if prompt.startswith(TURN_SEPARATOR) else TURN_SEPARATOR + prompt


def fill_in_the_middle(prefix: str, suffix: str) -> str:
    """Return the prompt for text between `prefix` and `suffix`. FIM_STOP ends the answer."""
    return f"✿prefix✿✿suffix✿{suffix}✿middle✿{prefix}"
