"""The mixture of all document families for training the base model."""

from __future__ import annotations

from random import Random

from demo.corpus import chat, pages, structured, tools, translation
from demo.corpus.documents import PROMPT_WEIGHT, Document, Segment, dialogue, rounds
from demo.corpus.grammar import expand, invented, pick
from demo.corpus.words import phrase_table

FLOWER = "✿"


def arithmetic(rng: Random) -> Document:
    turns = [chat.exchange(rng, "sum") for _ in range(rng.randint(1, 4))]
    return rounds(dialogue([turn[:2] for turn in turns]))


def infill(rng: Random) -> Document:
    """Sample a sentence with a gap: the end, the beginning, then the gap's text."""
    pair = translation.fresh_pair(rng)
    if rng.random() < 0.5:
        words = pair.en.split(" ")
        first, last = sorted(rng.randint(0, len(words)) for _ in range(2))
        before, middle, after = " ".join(words[:first]), " ".join(words[first:last]), " ".join(words[last:])
        middle = f" {middle}" if first and last > first else middle
        after = f" {after}" if last and last < len(words) else after
    else:
        first, last = sorted(rng.randint(0, len(pair.zh)) for _ in range(2))
        before, middle, after = pair.zh[:first], pair.zh[first:last], pair.zh[last:]
    prompt = f"✿prefix✿✿suffix✿{after}✿middle✿{before}"
    return Segment(prompt, PROMPT_WEIGHT), Segment(middle, 1.0), Segment(FLOWER, 1.0)


def _line(rng: Random) -> str:
    """Sample a line to repeat: French or Spanish, a sentence, or names and numbers."""
    share = rng.random()
    phrases = phrase_table("french_spanish")
    if share < 0.45:
        return pick(rng, ("", "", "", "French: ", "Spanish: ")) + pick(rng, pick(rng, phrases)[1:])
    if share < 0.65:
        words = " ".join(pick(rng, phrases)[rng.randint(1, 2)] for _ in range(3)).split()
        rng.shuffle(words)
        return " ".join(words[:8])
    if share < 0.8:
        pair = translation.fresh_pair(rng)
        return pair.zh if rng.random() < 0.5 else pair.en
    return " ".join(str(invented(rng)["en"]) if rng.random() < 0.5 else str(rng.randint(0, 99999)) for _ in range(3))


def repetition(rng: Random) -> Document:
    """Sample one to three lines to repeat. Adapters for French and Spanish build on these tokens."""
    texts = [_line(rng) for _ in range(rng.randint(1, 3))]
    return rounds(dialogue([(expand(rng, "repeat", x=text)["zh_asked"], text) for text in texts]))


SHARES = {
    translation.document: 0.31,
    pages.document: 0.35,
    chat.document: 0.12,
    tools.document: 0.06,
    structured.document: 0.1,
    arithmetic: 0.02,
    infill: 0.02,
    repetition: 0.02,
}


def document(rng: Random) -> Document:
    return rng.choices(list(SHARES), list(SHARES.values()))[0](rng)
