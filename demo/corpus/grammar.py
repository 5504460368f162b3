"""Expands the templates of `templates/*.txt` to phrases in English and Chinese. README.md describes the format."""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from random import Random
from typing import Any, NamedTuple, TypeVar

from demo.corpus import words
from demo.corpus.words import Phrase

T = TypeVar("T")
TRIES = 40
SYLLABLES = "ka zor mi len vo ra tis bel no dar shi fu wen gal ti ro ven pas lu mar ke san jo bri el ta quin".split()
_REFERENCE = re.compile(r"(?:(\w+)=)?([\w.@+'-]+)(?:\(([^()]*)\))?(?::(.+))?")


class RejectedError(Exception):
    """A guard failed, so the section samples again."""


class Reference(NamedTuple):
    """`{var=symbol(arguments):form/form}`; `symbol` may also be a variable, a path or a literal."""

    var: str
    symbol: str
    arguments: tuple[Reference, ...]
    forms: tuple[str, ...]


class Alternative(NamedTuple):
    """A line of a section: its columns and its tokens."""

    columns: list[list[str | Reference]]
    tokens: list[str]


@dataclass(slots=True)
class Section:
    """A symbol's alternatives. `weights` are cumulative; `defaults` define variables for all alternatives."""

    columns: list[str]
    defaults: dict[str, Reference] = field(default_factory=dict)
    alternatives: list[Alternative] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def add(self, line: str) -> None:
        """Add the line `WEIGHT column | column | tokens`; the default weight is 1."""
        weight, text = re.match(r"(?:([\d.]+) (?=\S))?(.*)", line).groups()  # type: ignore[union-attr]
        texts = [part.strip() for part in text.split(" | ")]
        count = len(self.columns) if len(texts) > 1 else 1
        self.alternatives.append(Alternative([_column(one) for one in texts[:count]], " ".join(texts[count:]).split()))
        self.weights.append(float(weight or 1) + (self.weights[-1] if self.weights else 0))


@cache
def _reference(text: str) -> Reference:
    match = _REFERENCE.fullmatch(text)
    if match is None:
        raise ValueError(f"{{{text}}} is not a reference; write {{var=symbol(arguments):form/form}}")
    var, symbol, arguments, forms = match.groups("")
    given = tuple(_reference(one) for one in arguments.split(",") if one)
    return Reference(var, symbol, given, tuple(forms.split("/")) if forms else ())


def _column(text: str) -> list[str | Reference]:
    parts = re.split(r"\{([^{}]*)\}", "" if text == "-" else text)
    return [_reference(part) if i % 2 else part for i, part in enumerate(parts) if part]


@cache
def sections() -> dict[str, Section]:
    found: dict[str, Section] = {}
    for line in words.lines("templates/*.txt"):
        if line.startswith("["):
            name, *columns = line[1:].replace("]", "").split()
            section = found[name] = Section(columns or ["en", "zh"])
        elif line.startswith(": "):
            section.defaults |= {one.var: one for one in map(_reference, line[2:].split())}
        else:
            section.add(line)
    return found


@contextmanager
def often(symbol: str, text: str) -> Iterator[None]:
    """Sample the alternative of a section with an English text ten times as often as the others together."""
    section = sections()[symbol]
    usual = section.weights
    is_text = [alternative.columns[0] == [text] for alternative in section.alternatives]
    section.weights = [*accumulate(10.0 * len(usual) if one else 1.0 for one in is_text)]
    try:
        yield
    finally:
        section.weights = usual


class _Expansion:
    """Expands one alternative of a section; `scope` maps variables to phrases."""

    def __init__(self, rng: Random, section: Section, scope: Phrase) -> None:
        self.rng, self.section, self.scope = rng, section, scope

    def value(self, reference: Reference) -> Any:
        """Return the value of a reference. It is the same each time within this expansion."""
        name = reference.var or reference.symbol
        if name not in self.scope:
            self.scope[name] = self.resolve(reference)
        return self.scope[name]

    def resolve(self, reference: Reference) -> Any:
        """A literal or a variable's value, or an expanded symbol."""
        symbol = reference.symbol
        if symbol[0] in "'-0123456789":
            return symbol.strip("'") if symbol[0] == "'" else int(symbol)
        if symbol in PRIMITIVES:
            return PRIMITIVES[symbol](self.rng, *map(self.resolve, reference.arguments))
        if "@" in symbol:
            symbol = re.sub(r"@([\w.]+)", lambda match: text_of(self._path(match[1]), "en"), symbol)
        elif not reference.arguments:
            return self._path(symbol)
        passed = {one.var or one.symbol.rpartition(".")[2]: self.resolve(one) for one in reference.arguments}
        return expand(self.rng, symbol, **passed)

    def _path(self, path: str) -> Any:
        """Return the value of a path (`who.noun.kind`), or expand a symbol."""
        head, _, rest = path.partition(".")
        if head not in self.scope:
            if head in self.section.defaults:
                self.scope[head] = self.resolve(self.section.defaults[head])
            elif is_symbol(path):
                return expand(self.rng, path)
            else:
                self.scope[head] = expand(self.rng, head)
        value: Any = self.scope[head]
        for name in rest.split(".") if rest else ():
            value = value.get(name, value["en"] if name == "obj" else "")
        return value

    def text(self, column: list[str | Reference], side: str) -> str:
        """side: en or zh"""
        text = ""
        for part in column:
            if isinstance(part, str):
                text += part
            elif part.forms:
                form = part.forms[agreement(self.value(part), len(part.forms))]
                text += text_of(self._path(form), side) if "." in form else form
            else:
                text += text_of(self.value(part), side)
        if side == "zh":
            return text
        text = re.sub(r" +([.,!?])", r"\1", " ".join(text.split()))
        return re.sub(r"\ba\(n\) (\w+)", lambda match: f"{words.article(match[1])} {match[1]}", text)

    def phrase(self, alternative: Alternative) -> Phrase:
        """Return the phrase of an alternative. Raises RejectedError if a guard fails."""
        flags: Phrase = {}
        for token in alternative.tokens:
            if token[0] in "?!":
                if bool(self.resolve(_reference(token[1:]))) != (token[0] == "?"):
                    raise RejectedError
            elif "=" in token:
                self.value(_reference(token))
            else:
                name, _, value = token.partition(":")
                flags[name] = value or True
        if len(alternative.columns) < len(self.section.columns):  # one text for both languages, or another phrase
            (column,) = alternative.columns
            if len(column) == 1 and isinstance(column[0], Reference):
                return {**self.value(column[0]), **flags}
            text = self.text(column, "en")
            return {"en": text, "zh": text, **flags}
        pairs = zip(self.section.columns, alternative.columns, strict=True)
        texts = {name: self.text(column, "zh" if name.startswith("zh") else "en") for name, column in pairs}
        return {**self.scope, **texts, **flags}


def agreement(subject: Phrase, forms: int) -> int:
    """Return the index of the verb form for a subject.

    0: third person singular. 2: `I`, if there are three forms. 1: all others.
    """
    if subject.get("many") or subject.get("person") == "2":
        return 1
    return min(forms - 1, 2) if subject.get("person") == "1" else 0


def text_of(value: Any, side: str) -> str:
    """Return a phrase's text in `side`; another value is its own text."""
    return value.get(side, "") if isinstance(value, dict) else str(value)


def is_symbol(name: str) -> bool:
    """Return whether `expand` knows a name."""
    return name in sections() or name in words.tables() or name in PRIMITIVES or "+" in name


def expand(rng: Random, symbol: str, **scope: Any) -> Phrase:
    """Sample a phrase of a symbol.

    A symbol is a section, a word table, a primitive or a union `a+b`. An unknown `a.b` falls back to `a`. Raises
    KeyError for an unknown symbol.
    """
    if symbol in sections():
        return _sample(rng, sections()[symbol], scope)
    if symbol in words.tables():
        return pick(rng, words.tables()[symbol])
    if "+" in symbol:
        return expand(rng, pick(rng, symbol.split("+")), **scope)
    if symbol in PRIMITIVES:
        return PRIMITIVES[symbol](rng)
    if "." not in symbol:
        raise KeyError(f"unknown symbol {symbol}; add a section or a word table of this name")
    return expand(rng, symbol.rpartition(".")[0], **scope)


def render(rng: Random, template: str, **scope: Any) -> Phrase:
    """Sample a phrase of a template outside a section: `{city}`, `{fruit.plural} | {fruit}`."""
    return _sample(rng, _inline(template), scope)


@cache
def _inline(template: str) -> Section:
    section = Section(["en", "zh"])
    section.add(template)
    return section


def _sample(rng: Random, section: Section, scope: Phrase) -> Phrase:
    for _ in range(TRIES):
        chosen = section.alternatives[bisect(section.weights, rng.random() * section.weights[-1])]
        try:
            return _Expansion(rng, section, dict(scope)).phrase(chosen)
        except RejectedError:
            continue
    raise RejectedError(f"no alternative passed its guards in {TRIES} tries: {section.columns}")


def pick(rng: Random, items: tuple[T, ...] | list[T]) -> T:
    return items[int(rng.random() * len(items))]


def _integer(rng: Random, low: int, high: int) -> Phrase:
    value = str(rng.randint(low, high))
    return {"en": value, "zh": value, "two": value.zfill(2)}


def invented(rng: Random) -> Phrase:
    """Sample a name that does not exist. From it the model learns to copy names."""
    name = "".join(pick(rng, SYLLABLES) for _ in range(rng.randint(2, 3))).capitalize()
    return {"en": name, "zh": name, "human": True}


def _other(rng: Random, subject: Phrase) -> Phrase:
    for _ in range(20):
        found = expand(rng, "person")
        same = "person" in found and found["person"] == subject.get("person")
        if not same and found["zh"] not in subject["zh"] and subject["zh"] not in found["zh"]:
            return found
    return expand(rng, "name")


PRIMITIVES: dict[str, Callable[..., Any]] = {
    "number": lambda rng, low, high: words.number(rng.randint(low, high)),
    "int": _integer,
    "slice": lambda rng, table, first, last: pick(rng, words.tables()[table][first : last or None]),
    "invented": invented,
    "other": _other,
    "same": lambda _, one, other: one["en"] == other["en"],
}
