"""Translations that need more than their sentence: a page around it, terms, a form of address, markers, what came before.

The prompts are those of the service (`rwkv_batch.translation.prompts`), so the model reads what the service writes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from random import Random

from demo.corpus.documents import PROMPT_WEIGHT, Document, Segment, rounds
from demo.corpus.grammar import often, pick
from demo.corpus.translation import Pair, fresh_pair
from demo.corpus.words import tables
from rwkv_batch.translation import markers as shown
from rwkv_batch.translation.context import Example
from rwkv_batch.translation.glossary import GlossaryMode
from rwkv_batch.translation.languages import language_name
from rwkv_batch.translation.plan import Query
from rwkv_batch.translation.prompt_forms import PromptForm
from rwkv_batch.translation.prompts import FORMALITIES, shared_prompt, term_line, translation_prompt
from rwkv_batch.translation.segments import Split, split_text

POLITE, PLAIN = FORMALITIES["more"], FORMALITIES["less"]
PLACEHOLDERS = ("{name}", "{0}", "{1}", "{{user}}", "${x}", "%s", "%1$s", "%2$s", "{count}", "{city}", "%(name)s")
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
    style: str = ""
    """Lines before the page."""
    context: str = ""
    """The line of the page that matters."""
    history: tuple[tuple[str, str], ...] = ()
    """Sentences before, with their translations."""
    terms: tuple[tuple[str, str], ...] = ()
    listed: tuple[tuple[str, str], ...] = ()
    """Terms directly before the sentence."""
    english: bool = True
    """Whether the source is English."""


@cache
def _nouns() -> dict[str, str]:
    """Return Chinese by English of nouns that are no verbs, with at least two Chinese characters."""
    verbs = {entry["en"] for name, table in tables().items() if name.startswith("verb") for entry in table}
    found = {}
    for name in ("animal", "fruit", "snack", "thing", "furniture", "clothes", "vehicle", "plant", "tool", "job"):
        for entry in tables()[name]:
            if len(entry["zh"]) > 1 and entry["en"] not in verbs:
                found[entry["en"]] = entry["zh"]
    return found


@cache
def _names() -> dict[str, str]:
    return {entry["en"]: entry["zh"] for name in ("name-f", "name-m") for entry in tables()[name]}


def _sentence(rng: Random, pronoun: str, chinese: str, held: bool) -> Pair:
    """Sample a sentence with a pronoun, whose Chinese text is there once."""
    with often("pronoun", pronoun):
        while True:
            pair = fresh_pair(rng, held=held)
            if re.search(rf"\b{pronoun}\b", pair.en, re.IGNORECASE) and pair.zh.count(chinese) == 1:
                return pair


def _words_once(pair: Pair, words: dict[str, str]) -> list[tuple[str, str]]:
    """Return the words that occur once in both texts, in English and Chinese."""
    english = re.findall(r"[A-Za-z]+|\d+", pair.en)
    known = [(word, words[word]) for word in english if word in words]
    return [(en, zh) for en, zh in known if english.count(en) == 1 and pair.zh.count(zh) == 1]


def _word_in(rng: Random, words: dict[str, str], held: bool) -> tuple[Pair, str, str]:
    """Sample a sentence with one of the words. Return it with the word in English and Chinese."""
    while True:
        pair = fresh_pair(rng, held=held)
        if found := _words_once(pair, words):
            return pair, *pick(rng, tuple(found))


def pronouns(rng: Random, *, held: bool = False) -> Case:
    """Sample a sentence with a "they" that needs context. Its Chinese depends on who was named before."""
    pair = _sentence(rng, "they", "他们", held)
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


@cache
def _term_characters() -> tuple[str, ...]:
    return tuple("".join(_nouns().values()))


def _other_term(rng: Random, chinese: str) -> str:
    """Return a term without the characters of a text, so it is no translation of its words."""
    while True:
        term = "".join(pick(rng, _term_characters()) for _ in range(rng.randint(2, 3)))
        if not set(term) & set(chinese):
            return term


def terms(rng: Random, *, held: bool = False) -> Case:
    """Sample a sentence with one or two words that a list of terms translates differently."""
    pair, *found = _word_in(rng, _nouns(), held)
    words = [(found[0], found[1])]
    if rng.random() < 0.3:
        words += [one for one in _words_once(pair, _nouns()) if one[0] != found[0]][:1]
    target, pairs = pair.zh, list[tuple[str, str]]()
    for word, chinese in words:
        pairs.append((word, _other_term(rng, pair.zh)))
        target = target.replace(chinese, pairs[-1][1])
    others = [one for one in rng.sample([*_nouns()], rng.randint(0, _MAX_TERMS)) if one not in dict(words)]
    lines = [*pairs, *((other, _other_term(rng, _nouns()[other])) for other in others)]
    rng.shuffle(lines)
    expected = tuple(term for _, term in pairs)
    return Case("terms", pair.en, target, expected, style=term_line(lines), terms=tuple(pairs))


def listed_terms(rng: Random, *, held: bool = False) -> Case:
    """Sample a sentence with its own list of terms, as the service writes a glossary's."""
    case = terms(rng, held=held)
    return replace(case, skill="listed terms", style="", listed=case.terms)


def rolling_terms(rng: Random, *, held: bool = False) -> Case:
    """Sample a sentence with a word translated in the previous sentence."""
    case = terms(rng, held=held)
    before = tuple((f"This is the {word}.", f"这是{term}。") for word, term in case.terms)
    return replace(case, skill="rolling", style="", history=before)


def address(rng: Random, *, held: bool = False) -> Case:
    """Sample a sentence with "you" in a polite or a plain form."""
    pair = _sentence(rng, "you", "你", held)
    while "你们" in pair.zh:
        pair = _sentence(rng, "you", "你", held)
    is_polite = rng.random() < 0.5
    word = "您" if is_polite else "你"
    return Case("address", pair.en, pair.zh.replace("你", word), (word,), style=POLITE if is_polite else PLAIN)


_OPENING, _CLOSING, _SINGLE = "<>", "</>", "</ >"
"""Kinds of tags until their order, and so their numbers, are known."""


def markers(rng: Random, *, held: bool = False) -> Case:
    """Sample a sentence with placeholders or tags, as the service shows them to the model."""
    while True:
        english, chinese, kinds = _marked(rng, fresh_pair(rng, held=held))
        is_english = rng.random() < 0.65
        source, target = (english, chinese) if is_english else (chinese, english)
        names = _names_of_markers(source, kinds)
        source, target = ("".join(names.get(one, one) for one in text) for text in (source, target))
        segments = [*split_text(source, shown.MarkerOptions(), Split.NONE, "en" if is_english else "zh")]
        if [one.shown() for one in segments if isinstance(one, shown.Segment) and one.markers] == [source]:
            return Case("markers", source, target, tuple(names.values()), english=is_english)


def _names_of_markers(source: str, kinds: dict[str, str]) -> dict[str, str]:
    found = [character for character in source if character in kinds]
    names: dict[str, str] = {}
    for index, character in enumerate(found):
        kind = kinds[character]
        opening = found.index(chr(ord(character) - 1)) if kind == _CLOSING else index
        tags = {_OPENING: f"<{index}>", _CLOSING: f"</{opening}>", _SINGLE: f"<{index}/>"}
        names[character] = tags.get(kind, kind)
    return names


def _marked(rng: Random, pair: Pair) -> tuple[str, str, dict[str, str]]:
    """Return both texts with private characters as markers, and the kinds of these.

    A placeholder replaces a name or a number. Tags enclose a word.
    """
    english, chinese = pair.en, pair.zh
    digits = {one: one for one in re.findall(r"\d+", english)}
    once = [one for words in (_names(), _nouns(), digits) for one in _words_once(pair, words)]
    chosen = rng.sample(once, min(len(once), rng.choices((1, 2, 3), (60, 28, 12))[0]))
    placeholders = rng.sample(PLACEHOLDERS, 3)
    kinds: dict[str, str] = {}
    for number, (en, zh) in enumerate(chosen):
        first, last = chr(0xE000 + 2 * number), chr(0xE001 + 2 * number)
        if en not in _nouns() and rng.random() < 0.65:
            kinds[first] = _SINGLE if rng.random() < 0.2 else placeholders[number]
            new_en = new_zh = first
        else:
            kinds |= {first: _OPENING, last: _CLOSING}
            new_en, new_zh = (f"{first}{one}{last}" for one in (en, zh))
        english, chinese = re.sub(rf"\b{en}\b", new_en, english), chinese.replace(zh, new_zh)
    return english, chinese, kinds


SKILLS = {pronouns: 0.2, terms: 0.22, listed_terms: 0.14, rolling_terms: 0.12, address: 0.12, markers: 0.2}


def _page(rng: Random, case: Case) -> str:
    """Return lines of a page, with the case's context among them. Sometimes nothing on the page matters."""
    if not case.context and rng.random() < 0.6:
        return ""
    count = rng.randint(*rng.choices(((0, 6), (7, 12), (13, 20)), (75, 17, 8))[0])
    lines = [fresh_pair(rng).en for _ in range(count)]
    if rng.random() < 0.2:  # the service takes a request's own texts as its page
        lines.insert(rng.randint(0, len(lines)), case.source)
    if case.skill in ("pronouns", "rolling"):
        lines = [line for line in lines if "hey" not in line]
    if case.context:
        lines.insert(rng.randint(0, len(lines)), case.context)
    return "\n".join(lines)


def _history(rng: Random, case: Case) -> tuple[tuple[str, str], ...]:
    """Return the case's earlier translations among others."""
    if not case.history:
        return ()
    pairs = [fresh_pair(rng) for _ in range(rng.choices((0, 1, 2, 4, 7), (40, 20, 20, 12, 8))[0])]
    history = [(pair.en, pair.zh) for pair in pairs if "hey" not in pair.en and not _has_term(case, pair.en)]
    for one in case.history:
        history.insert(rng.randint(0, len(history)), one)
    return tuple(history)


def _has_term(case: Case, text: str) -> bool:
    return any(re.search(rf"\b{word}\b", text) for word, _ in case.terms)


def styled(rng: Random, case: Case) -> Case:
    """Return the case, sometimes with a form of address that its target then has."""
    if case.style or rng.random() > 0.15 or "你们" in case.target:
        return case
    is_polite = rng.random() < 0.5
    target = case.target.replace("你", "您") if is_polite else case.target
    return replace(case, style=POLITE if is_polite else PLAIN, target=target)


def query(rng: Random, case: Case) -> Query:
    """Return what the service would translate: the sentence with its style, a page and earlier translations."""
    source, target = ("en", "zh") if case.english else ("zh", "en")
    history = tuple(Example(language_name(source), *pair) for pair in _history(rng, case))
    context = "\n".join(filter(None, (case.style, _page(rng, case))))
    return Query(source, target, case.source, context, history, terms=case.listed, mode=GlossaryMode.HINT)


def prompt_of(asked: Query) -> str:
    """Return the prompt after `shared_prompt`."""
    return translation_prompt(asked, PromptForm.TERM_LIST)


def document(rng: Random) -> Document:
    """Sample a case as the service sends it."""
    case = styled(rng, rng.choices(list(SKILLS), list(SKILLS.values()))[0](rng))
    asked = query(rng, case)
    shared = shared_prompt(asked)
    before = (Segment(shared, PROMPT_WEIGHT),) if shared else ()
    return (*before, *rounds([(prompt_of(asked), f" {case.target}")]))
