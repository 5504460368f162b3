"""The prompt forms that the public RWKV-7 G1 weights were trained on, each in one place."""

from __future__ import annotations

import re
from collections.abc import Sequence

from routes.bodies import Message

FIM_STOP = "✿"
THINKING = "<think"
_NO_THINKING = "<think>\n</think>"
_NEWLINES = re.compile(r"\n{2,}")
_SPEAKERS = {
    "system": "System",
    "developer": "System",
    "user": "User",
    "assistant": "Assistant",
    "tool": "User",
    "function": "User",
}


def one_turn(text: str) -> str:
    """Text of a turn: rounds are separated by blank lines, so runs of newlines collapse to one."""
    return _NEWLINES.sub("\n", text.replace("\r\n", "\n").replace("\r", "\n")).strip("\n")


def chat(messages: Sequence[Message], enable_think: bool) -> str:
    """`System: …\\n\\nUser: …\\n\\nAssistant:` and the opening that lets the model think, or not."""
    rounds = []
    for message in messages:
        text = one_turn(message.text)
        if message.role in ("tool", "function"):
            text = f"Function output:\n{text}"
        rounds.append(f"{_SPEAKERS[message.role]}: {text}".rstrip(" "))
    return "\n\n".join([*rounds, f"Assistant: {THINKING if enable_think else _NO_THINKING}"])


def fill_in_the_middle(prefix: str, suffix: str) -> str:
    """The model goes on after `prefix`, towards `suffix`, and ends with FIM_STOP."""
    return f"✿prefix✿✿suffix✿{suffix}✿middle✿{prefix}"


def translation(source: str, target: str, text: str) -> str:
    """`English: …\\n\\nChinese:`, with English names of languages."""
    return f"{source}: {one_turn(text)}\n\n{target}:"
