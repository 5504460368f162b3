"""Fill-in-the-middle documents: a sentence with a gap, its two ends first, its middle last."""

from __future__ import annotations

from random import Random

from demo.corpus.document import PROMPT_WEIGHT, Document, Segment
from demo.corpus.translation import fresh_pair

FLOWER = "✿"


def prompt(prefix: str, suffix: str) -> str:
    """The prompt whose continuation belongs between prefix and suffix."""
    return f"✿prefix✿✿suffix✿{suffix}✿middle✿{prefix}"


def document(rng: Random) -> Document:
    """A gap in an English or a Chinese sentence."""
    pair = fresh_pair(rng)
    if rng.random() < 0.5:
        words = pair.en.split(" ")
        first, last = sorted(rng.randint(0, len(words)) for _ in range(2))
        parts = [" ".join(words[:first]), " ".join(words[first:last]), " ".join(words[last:])]
        if first and last > first:
            parts[1] = f" {parts[1]}"
        if last and last < len(words):
            parts[2] = f" {parts[2]}"
    else:
        first, last = sorted(rng.randint(0, len(pair.zh)) for _ in range(2))
        parts = [pair.zh[:first], pair.zh[first:last], pair.zh[last:]]
    before, middle, after = parts
    return Segment(prompt(before, after), PROMPT_WEIGHT), Segment(middle, 1.0), Segment(FLOWER, 1.0)
