"""The prompt forms that the public RWKV-7 G1 weights were trained on, each in one place."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import dropwhile, groupby

from routes.request.bodies import DEFAULT_STOPS, Message
from routes.request.toolbox import call_text

FIM_STOP = "✿"
ROUND_BREAK = "\n\n"
THINKING = "<think"
_NEWLINES = re.compile(r"\n{2,}")
_SPEAKERS = {
    "system": "System",
    "developer": "System",
    "user": "User",
    "assistant": "Assistant",
    "tool": "User",
    "function": "User",
}
_INSTRUCTORS = ("system", "developer")
_TOOLS = ("tool", "function")


class Think(enum.StrEnum):
    """How long the model thinks before it answers."""

    OFF = "off"
    ON = "on"
    SHORT = "short"
    MEDIUM = "medium"
    LONG = "long"


@dataclass(frozen=True, slots=True)
class ThinkForm:
    """What a mode puts into the prompt, and what ends its answer."""

    hint: str
    """at the end of the last turn of the user"""
    opening: str
    """at the beginning of the answer"""
    stops: tuple[int | str, ...]


# A thought has blank lines and may speak of the User: only a new label ends an answer that holds one.
_AFTER_THOUGHT: tuple[int | str, ...] = (0, "\n\nUser:", "\n\nSystem:", "\n\nAssistant:")
THINK_FORMS = {
    Think.OFF: ThinkForm("", "<think>\n</think>", DEFAULT_STOPS),
    Think.ON: ThinkForm("", THINKING, _AFTER_THOUGHT),
    Think.SHORT: ThinkForm(" (think a bit)", THINKING, _AFTER_THOUGHT),
    Think.MEDIUM: ThinkForm(" (think)", THINKING, _AFTER_THOUGHT),
    Think.LONG: ThinkForm(" (think a lot)", THINKING, _AFTER_THOUGHT),
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


def answer_stops(think: Think, may_call: bool) -> tuple[int | str, ...]:
    """What ends an answer unless the request says otherwise; a call may have blank lines before it."""
    return _AFTER_THOUGHT if may_call else THINK_FORMS[think].stops


def think_mode(enable_think: bool) -> Think:
    """The mode of the family's switch."""
    return Think.ON if enable_think else Think.OFF


def one_turn(text: str) -> str:
    """Text of a turn: rounds are separated by blank lines, so runs of newlines collapse to one."""
    return _one_break(text).strip("\n")


def _one_break(text: str) -> str:
    return _NEWLINES.sub("\n", text.replace("\r\n", "\n").replace("\r", "\n"))


def chat(
    messages: Sequence[Message], think: Think, *, continues: bool = False, listing: str = "", opening: str | None = None
) -> str:
    """`System: …\\n\\nUser: …\\n\\nAssistant:` and the opening that lets the model think, or not.

    continues: the last message is the assistant's and is left open, with the white space at its end.
    listing: what the instructions at the beginning end with. opening: what the answer begins with instead.
    """
    form = THINK_FORMS[think]
    messages = _results_in_order(messages)
    last_user = max((at for at, message in enumerate(messages) if message.role == "user"), default=None)
    rounds = [
        f"{_SPEAKERS[message.role]}: {_content(message)}".rstrip(" ") + (form.hint if at == last_user else "")
        for at, message in enumerate(messages)
    ]
    if listing and messages and messages[0].role in _INSTRUCTORS:
        rounds[0] += ("\n" if messages[0].text.strip() else " ") + listing
    elif listing:
        rounds.insert(0, f"System: {listing}")
    if continues:
        begun = _one_break(messages[-1].text).lstrip()
        return ROUND_BREAK.join([*rounds[:-1], f"Assistant: {begun}" if begun else "Assistant:"])
    return ROUND_BREAK.join([*rounds, f"Assistant: {form.opening if opening is None else opening}"])


def _content(message: Message) -> str:
    text = one_turn(message.text)
    if message.role in _TOOLS:
        return f"Function output:\n{text}"
    calls = (one_turn(call_text(call.function.name, call.function.arguments)) for call in message.tool_calls or ())
    return "\n".join(filter(None, (text, *calls)))


def _results_in_order(messages: Sequence[Message]) -> list[Message]:
    """The results of several calls in the order of the calls: nothing else says which is which."""
    ordered: list[Message] = []
    calls: list[str] = []
    for is_result, group in groupby(messages, lambda message: message.role in _TOOLS):
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
    return list(dropwhile(lambda message: message.role in _INSTRUCTORS, messages)) or list(messages)


def resumed(prompt: str) -> str:
    """A prompt as an existing session reads it: after the blank line that ended the round before."""
    return prompt if prompt.startswith(ROUND_BREAK) else ROUND_BREAK + prompt


def fill_in_the_middle(prefix: str, suffix: str) -> str:
    """The model goes on after `prefix`, towards `suffix`, and ends with FIM_STOP."""
    return f"✿prefix✿✿suffix✿{suffix}✿middle✿{prefix}"


def translation(source: str, target: str, text: str) -> str:
    """`English: …\\n\\nChinese:`, with English names of languages."""
    return f"{source}: {one_turn(text)}\n\n{target}:"
