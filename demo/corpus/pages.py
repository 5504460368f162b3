"""Translations that need more than their sentence: a page around it, terms, a form of address, markers, what came before.

The parts of a page are lines of the prompt before the text, as the service puts `context` there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from random import Random

from demo.corpus.documents import PROMPT_WEIGHT, STOP, Document, Segment, rounds
from demo.corpus.grammar import pick
from demo.corpus.translation import Pair, fresh_pair, prompt
from demo.corpus.words import tables

TERMS, POLITE, PLAIN = "Terms: ", "Style: polite", "Style: plain"
"""Lines of a page."""
PLACEHOLDERS = ("{name}", "{0}", "{{user}}", "${x}", "%s", "%1$s", "{count}", "<0/>")
_GROUPS = (("name-m", "他们"), ("name-f", "她们"), ("animal", "它们"))
_INTRODUCTIONS = (
    ("{0} and {1} live here", "{0}和{1}住在这里。"),
    ("This page is about {0} and {1}", "这个页面是关于{0}和{1}的。"),
    ("We all know {0} and {1}", "我们都认识{0}和{1}。"),
    ("{0} and {1} are in the garden", "{0}和{1}在花园里。"),
)
_MAX_TERMS = 5


@dataclass(frozen=True, slots=True)
class Case:
    """A sentence with what the model reads before it."""

    skill: str
    source: str
    target: str
    expected: tuple[str, ...]
    """Parts of the translation that the skill is about."""
    context: str = ""
    history: tuple[tuple[str, str], ...] = ()
    """Sentences before, with their translations."""
    terms: tuple[tuple[str, str], ...] = ()


@cache
def _nouns() -> dict[str, str]:
    """Return Chinese by English of nouns with at least two Chinese characters."""
    found = {}
    for name in ("animal", "fruit", "snack", "thing", "furniture", "clothes", "vehicle", "plant", "tool", "job"):
        for entry in tables()[name]:
            if len(entry["zh"]) > 1:
                found[entry["en"]] = entry["zh"]
    return found


@cache
def _names() -> dict[str, str]:
    return {entry["en"]: entry["zh"] for name in ("name-f", "name-m") for entry in tables()[name]}


def _sentence(rng: Random, pattern: str, chinese: str, held: bool) -> Pair:
    """Sample a sentence with the English pattern and Chinese text.

    The text is there once.
    """
    while True:
        pair = fresh_pair(rng, held=held)
        if re.search(pattern, pair.en) and pair.zh.count(chinese) == 1:
            return pair


def _word_in(rng: Random, words: dict[str, str], held: bool) -> tuple[Pair, str, str]:
    """Sample a sentence with exactly one occurrence of one of the words. Return it with English and Chinese."""
    while True:
        pair = fresh_pair(rng, held=held)
        found = [
            (word, words[word])
            for word in re.findall(r"[A-Za-z]+", pair.en)
            if word in words and pair.zh.count(words[word]) == 1 and len(re.findall(rf"\b{word}\b", pair.en)) == 1
        ]
        if found:
            return pair, *pick(rng, tuple(found))


def pronouns(rng: Random, *, held: bool = False) -> Case:
    """Sample a sentence with a "they" that needs context.

    Its Chinese depends on who was named before.
    """
    pair = _sentence(rng, r"\b[Tt]hey\b", "他们", held)
    group, pronoun = pick(rng, _GROUPS)
    two = rng.sample(tables()[group], 2)
    english, chinese = pick(rng, _INTRODUCTIONS)
    names = ["the " + one["en"] if group == "animal" else one["en"] for one in two]
    said = english.format(*names) + "."
    told = chinese.format(*(one["zh"] for one in two))
    case = Case("pronouns", pair.en, pair.zh.replace("他们", pronoun), (pronoun,))
    said = said[0].upper() + said[1:]
    if rng.random() < 0.3:
        return replace(case, skill="rolling", history=((said, told),))
    return replace(case, context=said)


def _other_term(rng: Random, chinese: str) -> str:
    """Return a term that is no translation of the word: other characters."""
    pool = "".join(_nouns().values())
    while True:
        term = "".join(pick(rng, tuple(pool)) for _ in range(rng.randint(2, 3)))
        if not set(term) & set(chinese):
            return term


def terms(rng: Random, *, held: bool = False) -> Case:
    """Sample a sentence with a word that its page translates differently."""
    pair, word, chinese = _word_in(rng, _nouns(), held)
    term = _other_term(rng, chinese)
    others = rng.sample(sorted(_nouns()), rng.randint(0, _MAX_TERMS))
    pairs = [(word, term), *((other, _other_term(rng, _nouns()[other])) for other in others if other != word)]
    rng.shuffle(pairs)
    line = TERMS + "; ".join(f"{one} = {other}" for one, other in pairs)
    target = pair.zh.replace(chinese, term)
    return Case("terms", pair.en, target, (term,), context=line, terms=((word, term),))


def inserted_terms(rng: Random, *, held: bool = False) -> Case:
    """Sample a sentence with the translation of a term in its place."""
    case = terms(rng, held=held)
    ((word, term),) = case.terms
    source = re.sub(rf"\b{word}\b", term, case.source)
    return replace(case, skill="inserted terms", source=source, context="")


def rolling_terms(rng: Random, *, held: bool = False) -> Case:
    """Sample a sentence with a word translated in the previous sentence."""
    case = terms(rng, held=held)
    ((word, term),) = case.terms
    before = (f"This is the {word}.", f"这是{term}。")
    return replace(case, skill="rolling", context="", history=(before,))


def address(rng: Random, *, held: bool = False) -> Case:
    """Sample a sentence with "you" in a polite or a plain form."""
    pair = _sentence(rng, r"\b[Yy]ou\b", "你", held)
    while "你们" in pair.zh:
        pair = _sentence(rng, r"\b[Yy]ou\b", "你", held)
    is_polite = rng.random() < 0.5
    word = "您" if is_polite else "你"
    return Case("address", pair.en, pair.zh.replace("你", word), (word,), context=POLITE if is_polite else PLAIN)


def markers(rng: Random, *, held: bool = False) -> Case:
    """Sample a sentence with a placeholder or with tags.

    The placeholder replaces a name; tags enclose a word.
    """
    if rng.random() < 0.5:
        pair, name, chinese = _word_in(rng, _names(), held)
        marker = pick(rng, PLACEHOLDERS)
        return Case("markers", pair.en.replace(name, marker), pair.zh.replace(chinese, marker), (marker,))
    pair, word, chinese = _word_in(rng, _names() | _nouns(), held)
    number = rng.randint(0, 3)
    opening, closing = f"<{number}>", f"</{number}>"
    return Case(
        "markers",
        re.sub(rf"\b{word}\b", f"{opening}{word}{closing}", pair.en),
        pair.zh.replace(chinese, f"{opening}{chinese}{closing}"),
        (opening, closing),
    )


SKILLS = {pronouns: 0.25, terms: 0.2, inserted_terms: 0.1, rolling_terms: 0.1, address: 0.15, markers: 0.2}


def page(rng: Random, case: Case) -> str:
    """Return the case's context among other lines of a page."""
    if not case.context:
        return ""
    lines = [fresh_pair(rng).en for _ in range(rng.randint(0, 6))]
    if case.skill != "pronouns":
        return "\n".join([case.context, *lines])
    lines = [line for line in lines if "hey" not in line]
    lines.insert(rng.randint(0, len(lines)), case.context)
    return "\n".join(lines)


def document(rng: Random) -> Document:
    """Sample a sentence with its page or with earlier text.

    Sometimes nothing on the page matters.
    """
    case = rng.choices(list(SKILLS), list(SKILLS.values()))[0](rng)
    context = page(rng, case)
    if not context and rng.random() < 0.3:
        context = "\n".join(fresh_pair(rng).en for _ in range(rng.randint(1, 5)))
    turns = [
        (prompt(source, english=True), f" {target}") for source, target in (*case.history, (case.source, case.target))
    ]
    before = (Segment(context + STOP, PROMPT_WEIGHT),) if context else ()
    return (*before, *rounds(turns))
