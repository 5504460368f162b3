"""The prompt forms that the public RWKV-7 G1 weights were trained on, each in one place."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import dropwhile, groupby

from routes.request.bodies import DEFAULT_STOPS, Message, Template
from routes.request.toolbox import call_text

FIM_STOP = "✿"
END_OF_TEXT, BLANK_LINE = 0, 261
"""Token ids."""
ROUND_BREAK = "\n\n"
THINKING = "<think"
_NEWLINES = re.compile(r"\n{2,}")
STANDARD = Template.model_validate({"opening": "<think>\n</think>"})
"""What the weights were trained on."""
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


THINK_FORMS = {
    Think.ON: ThinkForm("", THINKING),
    Think.SHORT: ThinkForm(" (think a bit)", THINKING),
    Think.MEDIUM: ThinkForm(" (think)", THINKING),
    Think.LONG: ThinkForm(" (think a lot)", THINKING),
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
    words = STANDARD if template is None else template
    return (END_OF_TEXT, *(f"{ROUND_BREAK}{label}:" for label in (words.user, words.system, words.assistant)))


def _label(role: str, words: Template) -> str:
    if role in _INSTRUCTORS:
        return words.system
    return words.assistant if role == "assistant" else words.user


def think_mode(enable_think: bool) -> Think:
    """The mode of the family's switch."""
    return Think.ON if enable_think else Think.OFF


def one_turn(text: str) -> str:
    """Text of a turn: rounds are separated by blank lines, so runs of newlines collapse to one."""
    return _one_break(text).strip("\n")


def _one_break(text: str) -> str:
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
    words = STANDARD if template is None else template
    form = THINK_FORMS.get(think, ThinkForm("", words.opening))
    messages = _results_in_order(messages)
    last_user = max((at for at, message in enumerate(messages) if message.role == "user"), default=None)
    rounds = [
        f"{_label(message.role, words)}: {_content(message)}".rstrip(" ") + (form.hint if at == last_user else "")
        for at, message in enumerate(messages)
    ]
    if listing and messages and messages[0].role in _INSTRUCTORS:
        rounds[0] += ("\n" if messages[0].text.strip() else " ") + listing
    elif listing:
        rounds.insert(0, f"{words.system}: {listing}")
    begun = form.opening if opening is None else opening
    if continues:
        begun = _one_break(messages[-1].text).lstrip()
    last = f"{words.assistant}: {begun}" if begun else f"{words.assistant}:"
    return ROUND_BREAK.join([*(rounds[:-1] if continues else rounds), last])


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
