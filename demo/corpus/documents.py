"""A training document: prompts, answers and stops, and how much each counts in the loss."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

PROMPT_WEIGHT = 0.1
STOP = "\n\n"
HELD_OUT_ONE_IN = 50
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?")


@dataclass(frozen=True, slots=True)
class Segment:
    """A text that a server tokenises at once; `weight` is its weight in the loss."""

    text: str
    weight: float


Document = tuple[Segment, ...]


def rounds(turns: list[tuple[str, str]]) -> Document:
    """Return a document of prompts and answers. A stop ends each answer; the next prompt does not repeat it."""
    segments = []
    for prompt, answer in turns:
        weight = 0.0 if "<think" in prompt else PROMPT_WEIGHT  # the prompt decides whether to think, not the model
        segments += [Segment(prompt, weight), Segment(answer, 1.0), Segment(STOP, 1.0)]
    return tuple(segments)


def dialogue(
    script: list[tuple[str, str]], think: tuple[str, str] | None = None, system: str = ""
) -> list[tuple[str, str]]:
    """Return the prompts and answers of a chat. `think` skips the thoughts: the prompt's end, the answer's start."""
    opening, rest = think or ("", " ")
    turns = [(f"User: {asked}\n\nAssistant:{opening}", f"{rest}{answer}") for asked, answer in script]
    return [(f"System: {system}\n\n{turns[0][0]}", turns[0][1]), *turns[1:]] if system else turns


def text_of(document: Document) -> str:
    return "".join(segment.text for segment in document)


def held_out(meaning: str) -> bool:
    """Return whether only the evaluation uses a meaning. Case and punctuation do not matter."""
    normal = " ".join(_WORD.findall(meaning.lower()))
    digest = hashlib.blake2b(normal.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_ONE_IN == 0
