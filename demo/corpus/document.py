"""A training document: prompts, answers and stops, and how much each counts in the loss."""

from __future__ import annotations

from dataclasses import dataclass

PROMPT_WEIGHT = 0.1
STOP = "\n\n"


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of text that a server would tokenise at once; `weight` is its share in the loss."""

    text: str
    weight: float


Document = tuple[Segment, ...]


def rounds(turns: list[tuple[str, str]], *, last_stop: str = STOP) -> Document:
    """A document of prompts and answers; each answer ends with a blank line, which the next prompt does not repeat."""
    segments = []
    for index, (prompt, answer) in enumerate(turns):
        weight = 0.0 if "<think" in prompt else PROMPT_WEIGHT  # whether to think is the prompt's to say
        segments += [Segment(prompt, weight), Segment(answer, 1.0)]
        segments.append(Segment(STOP if index + 1 < len(turns) else last_stop, 1.0))
    return tuple(segments)


def text_of(document: Document) -> str:
    """The whole text."""
    return "".join(segment.text for segment in document)
