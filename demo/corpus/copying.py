"""Texts to be repeated word by word, also in languages that the model does not speak: an adapter can build on their tokens."""

from __future__ import annotations

from random import Random

from demo.corpus import lexicon
from demo.corpus.document import Document, rounds
from demo.corpus.nominal import invented_name, pick
from demo.corpus.translation import fresh_pair

ASKED = ("Repeat: {}", "Repeat after me: {}", "Say: {}", "Say this again: {}", "Copy this: {}", "Write: {}", "重复：{}")
LABELS = ("", "", "", "French: ", "Spanish: ")


def line(rng: Random) -> str:
    """A phrase, a mixture of words of several languages, a sentence of the grammar, or names and numbers."""
    draw = rng.random()
    if draw < 0.45:
        return pick(rng, LABELS) + pick(rng, pick(rng, lexicon.romance_phrases())[1:])
    if draw < 0.65:
        words = " ".join(pick(rng, lexicon.romance_phrases())[rng.randint(1, 2)] for _ in range(3)).split()
        rng.shuffle(words)
        return " ".join(words[:8])
    if draw < 0.8:
        pair = fresh_pair(rng)
        return pair.zh if rng.random() < 0.5 else pair.en
    return " ".join(invented_name(rng) if rng.random() < 0.5 else str(rng.randint(0, 99999)) for _ in range(3))


def document(rng: Random) -> Document:
    """One to three lines, each given back."""
    turns = []
    for _ in range(rng.randint(1, 3)):
        text = line(rng)
        turns.append((f"User: {pick(rng, ASKED).format(text)}\n\nAssistant:", f" {text}"))
    return rounds(turns)
