"""Translation documents: `English: …\\n\\nChinese: …` and the reverse, also in the variants that people type."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from demo.corpus.documents import Document, held_out, rounds
from demo.corpus.grammar import expand, pick
from demo.corpus.words import Phrase, phrase_table

MARKS = {".": "。", "!": "！", "?": "？"}
SIDES = ("English", "Chinese")
_PERSONAL = re.compile(r"\b(I|[Mm]y|me|number)\b")


@dataclass(frozen=True, slots=True)
class Pair:
    """A sentence in both languages. It is held out if one of its `meanings` is."""

    en: str
    zh: str
    meanings: tuple[str, ...]


def _clauses(phrase: Phrase) -> Iterator[str]:
    """Yield the English of all clauses within a phrase."""
    for value in phrase.values():
        if isinstance(value, dict):
            if value.get("key"):
                yield value["en"]
            yield from _clauses(value)


def sentence(rng: Random) -> Pair:
    """Sample a sentence on either side of the split."""
    said = expand(rng, "sentence")
    en = said["en"]
    return Pair(en[0].upper() + en[1:], said["zh"], (en, *_clauses(said)))


def fresh_pair(rng: Random, *, held: bool = False) -> Pair:
    """Sample a sentence of the training side, or of the held-out side."""
    while True:
        pair = sentence(rng)
        if held_out(pair.meanings[0]) if held else not any(map(held_out, pair.meanings)):
            return pair


def pair_phrase(rng: Random) -> Phrase:
    """Sample a sentence of the training side as a phrase. `personal`: it may be taken for a fact."""
    pair = fresh_pair(rng)
    marks = {"statement": pair.en[-1] == ".", "question": pair.en[-1] == "?"}
    return {"en": pair.en, "zh": pair.zh, "personal": bool(_PERSONAL.search(pair.en)), **marks}


def contracted(text: str) -> str:
    for long, short in phrase_table("contractions"):
        for one, other in ((long, short), (long[0].upper() + long[1:], short[0].upper() + short[1:])):
            if text.startswith(f"{one} ") or f" {one} " in text:
                text = text.replace(f"{one} ", f"{other} ")
    return text


def reworded(rng: Random, text: str) -> str:
    """Return Chinese in other words, which the model reads but never writes."""
    for usual, other, chance in phrase_table("rewordings"):
        if usual in text and rng.random() < float(chance):
            text = text.replace(usual, other)
    return text


def unmarked(en: str, zh: str) -> tuple[str, str]:
    """Return both sides without their final mark."""
    if en[-1:] in MARKS and not en.endswith("...") and MARKS[en[-1]] == zh[-1:]:
        return en[:-1], zh[:-1]
    return en, zh


def _typed(rng: Random, en: str, zh: str) -> tuple[str, str]:
    """Return the pair, perhaps with its English typed in another way.

    It then has contractions, other case or no final mark.
    """
    share = rng.random()
    if share < 0.55:
        return en, zh
    if share < 0.75:
        return contracted(en), zh
    if share > 0.9:
        loud = en.upper() if share > 0.95 else " ".join(word[:1].upper() + word[1:] for word in en.split(" "))
        return (loud if len(en) < 40 else en), zh
    if share < 0.85:
        en, zh = unmarked(en, zh)
    return en[0].lower() + en[1:], zh


def _fixed_phrase(rng: Random, to_chinese: bool) -> tuple[str, str]:
    """Sample a phrase of `phrases/chinese.txt` for one direction. It may get another final mark."""
    while True:
        (line,) = pick(rng, phrase_table("chinese"))
        en, mark, zh = next(parts for sign in "=><" if (parts := line.partition(f" {sign} "))[1])
        if mark.strip() == "=" or (mark.strip() == ">") == to_chinese:
            break
    bare_en, bare_zh = unmarked(en, zh)
    if rng.random() < 0.35:
        return bare_en, bare_zh
    if rng.random() < 0.25 and en[-1:] != "?" and bare_zh[-1:] not in "。！？…" and bare_en[-1:] not in ".!?":
        end = pick(rng, (".", "!"))
        return bare_en + end, bare_zh + MARKS[end]
    return en, zh


def pair_to_translate(rng: Random) -> tuple[str, str, bool]:
    """Sample a source, its translation and whether the source is English."""
    to_chinese = rng.random() < 0.5
    if rng.random() < 0.14:
        en, zh = _fixed_phrase(rng, to_chinese)
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
        return (reworded(rng, zh) if rng.random() < 0.35 else zh), en, False
    en, zh = _typed(rng, en, zh)
    return en, zh, True


def prompt(source: str, *, english: bool) -> str:
    """Return the prompt for a translation."""
    one, other = SIDES if english else SIDES[::-1]
    return f"{one}: {source}\n\n{other}:"


def fixed(rng: Random, table: str, names: tuple[str, ...], *, to_other: float, bare: float) -> tuple[str, str]:
    """Sample prompt and answer of a phrase table.

    Its columns are English and `names`.
    `to_other` is the share of translations from English, `bare` the share without the final mark.
    """
    english, *others = pick(rng, phrase_table(table))
    name, other = pick(rng, tuple(zip(names, others, strict=True)))
    if rng.random() < bare and english[-1] in MARKS and not english.endswith("..."):
        english, other = english[:-1], other[:-1]
    if rng.random() < to_other:
        return f"English: {english}\n\n{name}:", f" {other}"
    return f"{name}: {other}\n\nEnglish:", f" {english}"


def document(rng: Random) -> Document:
    """Sample one translation, rarely a few in a row."""
    if rng.random() < 0.025:
        return rounds([fixed(rng, "german_japanese", ("German", "Japanese"), to_other=0.5, bare=0.3)])
    turns = []
    for _ in range(1 if rng.random() < 0.9 else rng.randint(2, 4)):
        source, target, english = pair_to_translate(rng)
        turns.append((prompt(source, english=english), f" {target}"))
    return rounds(turns)
