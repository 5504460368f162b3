"""Translation documents: `English: …\\n\\nChinese: …` and the other way, canonical or in the variants people type."""

from __future__ import annotations

from random import Random

from demo.corpus import lexicon
from demo.corpus.document import Document, rounds
from demo.corpus.nominal import pick
from demo.corpus.sentences import Pair, sentence
from demo.corpus.split import held_out

CONTRACTIONS = (
    ("do not ", "don't "), ("does not ", "doesn't "), ("did not ", "didn't "), ("will not ", "won't "), ("cannot ", "can't "), ("is not ", "isn't "),
    ("are not ", "aren't "), ("should not ", "shouldn't "), ("I am ", "I'm "), ("he is ", "he's "), ("she is ", "she's "),
    ("they are ", "they're "), ("we are ", "we're "), ("you are ", "you're "), ("it is ", "it's "), ("I will ", "I'll "),
    ("I have already ", "I've already "), ("we have already ", "we've already "), ("could not ", "couldn't "), ("that is ", "that's "),
)  # fmt: skip
MARKS = {".": "。", "!": "！", "?": "？"}
SIDES = ("English", "Chinese")


def fresh_pair(rng: Random, *, held: bool = False) -> Pair:
    """A pair of the grammar on the training side, or on the held-out side of the split."""
    while True:
        pair = sentence(rng)
        if held:
            if held_out(pair.meanings[0]):
                return pair
        elif not any(held_out(meaning) for meaning in pair.meanings):
            return pair


def contracted(rng: Random, text: str) -> str:
    """The English with contractions, as people write it."""
    for long, short in CONTRACTIONS:
        for one, other in ((long, short), (long[0].upper() + long[1:], short[0].upper() + short[1:])):
            if text.startswith(one) or f" {one}" in text:
                text = text.replace(one, other)
    return text


def unmarked(en: str, zh: str) -> tuple[str, str]:
    """Both sides without their final mark."""
    if en[-1:] in MARKS and not en.endswith("...") and MARKS[en[-1]] == zh[-1:]:
        return en[:-1], zh[:-1]
    return en, zh


def _typed(rng: Random, en: str, zh: str) -> tuple[str, str]:
    """The pair with English in the casing and marks of a hurried writer."""
    draw = rng.random()
    if draw < 0.55:
        return en, zh
    if draw < 0.75:
        return contracted(rng, en), zh
    if draw < 0.85:
        en, zh = unmarked(en, zh)
    if draw > 0.95:
        return (en.upper() if len(en) < 40 else en), zh
    if draw > 0.9:
        return (" ".join(w[:1].upper() + w[1:] for w in en.split(" ")) if len(en) < 40 else en), zh
    return en[0].lower() + en[1:], zh


def _phrase(rng: Random) -> tuple[str, str, str]:
    en, zh, mark = pick(rng, lexicon.phrases())
    if rng.random() < 0.35:
        en, zh = unmarked(en, zh)
    elif rng.random() < 0.25 and en[-1:] not in "?":
        bare = unmarked(en, zh)
        end = pick(rng, ".!")
        if bare[1][-1:] not in "。！？…" and bare[0][-1:] not in ".!?":
            en, zh = bare[0] + end, bare[1] + MARKS[end]
    return en, zh, mark


def pair_to_translate(rng: Random) -> tuple[str, str, bool]:
    """A source, its translation and whether the source is English."""
    to_chinese = rng.random() < 0.5
    if rng.random() < 0.14:
        while True:
            en, zh, mark = _phrase(rng)
            if mark == "=" or (mark == ">") == to_chinese:
                break
    else:
        pair = fresh_pair(rng)
        en, zh = pair.en, pair.zh
        if rng.random() < 0.05:
            en, zh = unmarked(en, zh)
        elif rng.random() < 0.04:
            more = fresh_pair(rng)
            if en[-1] in MARKS and more.en[-1] in MARKS:
                en, zh = f"{en} {more.en}", f"{zh}{more.zh}"
    if not to_chinese:
        return zh, en, False
    en, zh = _typed(rng, en, zh)
    return en, zh, True


def prompt(source: str, *, english: bool) -> str:
    """The prompt that asks for a translation."""
    one, other = SIDES if english else SIDES[::-1]
    return f"{one}: {source}\n\n{other}:"


def document(rng: Random) -> Document:
    """One translation, seldom a few in a row."""
    turns = []
    for _ in range(1 if rng.random() < 0.9 else rng.randint(2, 4)):
        source, target, english = pair_to_translate(rng)
        turns.append((prompt(source, english=english), f" {target}"))
    return rounds(turns)
