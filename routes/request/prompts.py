"""The prompt forms that the public RWKV-7 G1 weights were trained on, each in one place."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import dropwhile, groupby

from routes.request.bodies import DEFAULT_STOPS, Message, Template
from routes.request.tool_set import call_text

FIM_STOP = "✿"
END_OF_TEXT, BLANK_LINE = 0, 261
"""Token ids."""
TURN_SEPARATOR = "\n\n"
THINK_START = "<think"
_NEWLINES = re.compile(r"\n{2,}")
DEFAULT_TEMPLATE = Template.model_validate({"opening": "<think>\n</think>"})
"""What the weights were trained on."""
_SYSTEM_ROLES = ("system", "developer")
_TOOL_ROLES = ("tool", "function")


class Think(enum.StrEnum):
    """How long the model thinks before it answers."""

    OFF = "off"
    ON = "on"
    SHORT = "short"
    MEDIUM = "medium"
    LONG = "long"


@dataclass(frozen=True, slots=True)
class ThinkFormat:
    """What a mode puts into the prompt, and what ends its answer."""

    hint: str
    """at the end of the last turn of the user"""
    opening: str
    """at the beginning of the answer"""


THINK_FORMATS = {
    Think.ON: ThinkFormat("", THINK_START),
    Think.SHORT: ThinkFormat(" (think a bit)", THINK_START),
    Think.MEDIUM: ThinkFormat(" (think)", THINK_START),
    Think.LONG: ThinkFormat(" (think a lot)", THINK_START),
}
EFFORTS = {
    "none": Think.OFF,
    "minimal": Think.SHORT,
    "low": Think.SHORT,
    "medium": Think.MEDIUM,
    "high": Think.LONG,
    "xhigh": Think.LONG,
}
"""OpenAI's `reasoning_effort`."""


def answer_stops(think: Think, may_call: bool, template: Template | None = None) -> tuple[int | str, ...]:
    """What ends an answer unless the request says otherwise; a call may have blank lines before it."""
    if think is Think.OFF and not may_call:
        return DEFAULT_STOPS if template is None else (END_OF_TEXT, BLANK_LINE)
    # A thought has blank lines and may speak of the User: only a new label ends an answer that holds one.
    labels = DEFAULT_TEMPLATE if template is None else template
    return (END_OF_TEXT, *(f"{TURN_SEPARATOR}{label}:" for label in (labels.user, labels.system, labels.assistant)))


def _label(role: str, labels: Template) -> str:
    if role in _SYSTEM_ROLES:
        return labels.system
    return labels.assistant if role == "assistant" else labels.user


def think_mode(enable_think: bool) -> Think:
    """The mode of the family's switch."""
    return Think.ON if enable_think else Think.OFF


def format_turn(text: str) -> str:
    """Text of a turn: rounds are separated by blank lines, so runs of newlines collapse to one."""
    return _collapse_newlines(text).strip("\n")


def _collapse_newlines(text: str) -> str:
    return _NEWLINES.sub("\n", text.replace("\r\n", "\n").replace("\r", "\n"))


def chat(
    messages: Sequence[Message],
    think: Think,
    *,
    template: Template | None = None,
    continues: bool = False,
    listing: str = "",
    opening: str | None = None,
) -> str:
    """`System: …\\n\\nUser: …\\n\\nAssistant:` and the opening that lets the model think, or not.

    continues: the last message is the assistant's and is left open, with the white space at its end.
    listing: what the instructions at the beginning end with. opening: what the answer begins with instead.
    template: other words than the model was trained on.
    """
    labels = DEFAULT_TEMPLATE if template is None else template
    think_format = THINK_FORMATS.get(think, ThinkFormat("", labels.opening))
    messages = _sort_tool_results(messages)
    last_user = max((at for at, message in enumerate(messages) if message.role == "user"), default=None)
    rounds = [
        f"{_label(message.role, labels)}: {_content(message)}".rstrip(" ")
        + (think_format.hint if at == last_user else "")
        for at, message in enumerate(messages)
    ]
    if listing and messages and messages[0].role in _SYSTEM_ROLES:
        rounds[0] += ("\n" if messages[0].text.strip() else " ") + listing
    elif listing:
        rounds.insert(0, f"{labels.system}: {listing}")
    answer_prefix = think_format.opening if opening is None else opening
    if continues:
        answer_prefix = _collapse_newlines(messages[-1].text).lstrip()
    last = f"{labels.assistant}: {answer_prefix}" if answer_prefix else f"{labels.assistant}:"
    return TURN_SEPARATOR.join([*(rounds[:-1] if continues else rounds), last])


def _content(message: Message) -> str:
    text = format_turn(message.text)
    if message.role in _TOOL_ROLES:
        return f"Function output:\n{text}"
    calls = (format_turn(call_text(call.function.name, call.function.arguments)) for call in message.tool_calls or ())
    return "\n".join(filter(None, (text, *calls)))


def _sort_tool_results(messages: Sequence[Message]) -> list[Message]:
    """The results of several calls in the order of the calls: nothing else says which is which."""
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
    """What a session has not read yet: what follows the last answer, without the instructions at the beginning.

    A client that sends the same instructions with every turn gets them read once, when the session begins.
    """
    answers = [at for at, message in enumerate(messages) if message.role == "assistant"]
    if answers:
        return list(messages[answers[-1] + 1 :])
    return list(dropwhile(lambda message: message.role in _SYSTEM_ROLES, messages)) or list(messages)


def continuation_prompt(prompt: str) -> str:
    """A prompt as an existing session reads it: after the blank line that ended the round before."""
    return prompt if prompt.startswith(TURN_SEPARATOR) else TURN_SEPARATOR + prompt


def fill_in_the_middle(prefix: str, suffix: str) -> str:
    """The model goes on after `prefix`, towards `suffix`, and ends with FIM_STOP."""
    return f"✿prefix✿✿suffix✿{suffix}✿middle✿{prefix}"


def translation(source: str, target: str, text: str) -> str:
    """`English: …\\n\\nChinese:`, with English names of languages."""
    return f"{source}: {format_turn(text)}\n\n{target}:"
