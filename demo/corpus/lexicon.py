"""The words of the corpus, read from `words/*.txt`: one Chinese gloss for one English word in its class."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from demo.corpus import morphology

WORDS = Path(__file__).parent / "words"


@dataclass(frozen=True, slots=True)
class Noun:
    """A countable noun with its Chinese measure word."""

    en: str
    plural: str
    zh: str
    measure: str
    kind: str


@dataclass(frozen=True, slots=True)
class Term:
    """A word or name that does not inflect; `extra` holds what its section adds."""

    en: str
    zh: str
    kind: str
    extra: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Adjective:
    """An adjective; `predicative` says whether 很 may go before it."""

    en: str
    comparative: str
    zh: str
    kind: str
    predicative: bool


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb with its forms; `tail` follows the object, `…` in `zh` is where the object goes."""

    base: str
    past: str
    participle: str
    tail: str
    zh: str
    progressive: bool

    @property
    def third(self) -> str:
        """The form after he, she and it."""
        return morphology.third_person(self.base)

    @property
    def gerund(self) -> str:
        """The -ing form."""
        return morphology.gerund(self.base)

    def chinese(self, thing: str, aspect: str = "") -> str:
        """The verb with its object and an aspect mark (了 or 过), or none."""
        before, gap, after = self.zh.partition("……")
        if gap:
            return before + thing + after + aspect
        return self.zh + aspect + thing if thing else self.zh + aspect


def _sections(name: str) -> Iterator[tuple[list[str], list[str]]]:
    """Each section of a word file: the words of its header and its entries."""
    header: list[str] = []
    entries: list[str] = []
    for line in (WORDS / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            if entries:
                yield header, entries
            header, entries = line.strip("[]").split(), []
        elif line and not line.startswith("#"):
            entries += [entry.strip() for entry in line.split(", ") if entry.strip()]
    if entries:
        yield header, entries


@cache
def nouns(name: str = "nouns") -> dict[str, tuple[Noun, ...]]:
    """Countable nouns by class, of the word file `nouns` or `people`."""
    found: dict[str, tuple[Noun, ...]] = {}
    for header, entries in _sections(name):
        kind, default = header[0], header[1] if len(header) > 1 else "个"
        words = []
        for entry in entries:
            english, _, gloss = entry.partition("=")
            singular, _, many = english.partition("+")
            zh, _, measure = gloss.partition("/")
            words.append(Noun(singular, many or morphology.plural(singular), zh, measure or default, kind))
        found[kind] = tuple(words)
    return found


@cache
def terms(name: str) -> dict[str, tuple[Term, ...]]:
    """The entries of a word file without inflection, by class."""
    found: dict[str, tuple[Term, ...]] = {}
    for header, entries in _sections(name):
        kind = header[0] if header else name
        words = []
        for entry in entries:
            english, _, gloss = entry.partition("=")
            zh, *extra = gloss.split("/")
            words.append(Term(english, zh, kind, tuple(extra)))
        found[kind] = tuple(words)
    return found


@cache
def containers() -> dict[str, tuple[str, ...]]:
    """Class of uncountable noun -> the containers it is counted in."""
    return {header[0]: tuple(header[1:]) for header, _ in _sections("mass")}


@cache
def adjectives() -> dict[str, tuple[Adjective, ...]]:
    """Adjectives by class."""
    found: dict[str, tuple[Adjective, ...]] = {}
    for header, entries in _sections("adjectives"):
        words = []
        for entry in entries:
            english, _, zh = entry.partition("=")
            word, _, comparative = english.lstrip("*").partition("/")
            words.append(Adjective(word, comparative or f"more {word}", zh, header[0], not english.startswith("*")))
        found[header[0]] = tuple(words)
    return found


def _verb(entry: str) -> Verb:
    english, _, zh = entry.partition("=")
    progressive = not english.endswith("!")
    forms, _, tail = english.rstrip("!").partition(";")
    base, *rest = forms.strip().split("/")
    past, participle = rest if rest else (morphology.past(base), morphology.past(base))
    return Verb(base, past, participle, f" {tail.strip()}" if tail else "", zh, progressive)


@cache
def verbs() -> dict[str, tuple[Verb, ...]]:
    """Verbs by the class of object they take; `intransitive` and `topic` are classes too."""
    found: dict[str, list[Verb]] = {}
    for header, entries in _sections("verbs"):
        parsed = [_verb(entry) for entry in entries]
        for kind in header[1:] or header:
            known = found.setdefault(kind, [])
            glosses = {verb.zh for verb in known}
            english = {(verb.base, verb.tail) for verb in known}
            known += [v for v in parsed if v.zh not in glosses and (v.base, v.tail) not in english]
    return {kind: tuple(words) for kind, words in found.items()}


@cache
def phrases() -> tuple[tuple[str, str, str], ...]:
    """The fixed phrases: English, Chinese and the direction mark `=`, `>` or `<`."""
    found = []
    for line in (WORDS / "phrases.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        for mark in "=><":
            english, middle, chinese = line.partition(f" {mark} ")
            if middle:
                found.append((english, chinese, mark))
                break
    return tuple(found)


@cache
def more_phrases() -> tuple[tuple[str, str, str], ...]:
    """Fixed phrases in English, German and Japanese."""
    lines = (WORDS / "more.txt").read_text(encoding="utf-8").splitlines()
    split = [line.split(" | ") for line in lines if not line.startswith("#")]
    return tuple((english, german, japanese) for english, german, japanese in split)


@cache
def romance_phrases() -> tuple[tuple[str, str, str], ...]:
    """Phrases in English, French and Spanish: no part of the translations that the base model learns."""
    lines = (WORDS / "romance.txt").read_text(encoding="utf-8").splitlines()
    split = [line.split(" | ") for line in lines if not line.startswith("#")]
    return tuple((english, french, spanish) for english, french, spanish in split)
