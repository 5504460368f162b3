"""Expands the templates of `templates/*.txt` to phrases in English and Chinese. README.md describes the format."""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from demo.corpus import words
from demo.corpus.words import Phrase

T = TypeVar("T")
TEMPLATES = Path(__file__).parent / "templates"
TRIES = 40
_REFERENCE = re.compile(r"(?:(\w+)=)?([\w.@+-]+)(?:\(([^()]*)\))?(?::(.+))?")
_ARTICLE = re.compile(r"\b(a)\(n\) (\w+)")
_SPACE = re.compile(r" +([.,!?])")
SYLLABLES = "ka zor mi len vo ra tis bel no dar shi fu wen gal ti ro ven pas lu mar ke san jo bri el ta quin".split()


class RejectedError(Exception):
    """A guard failed: the section samples another alternative."""


def pick(rng: Random, items: tuple[T, ...] | list[T]) -> T:
    """Sample one item uniformly."""
    return items[int(rng.random() * len(items))]


@dataclass(frozen=True, slots=True)
class Reference:
    """`{var=symbol(arguments):form/form}`; without `=`, `symbol` is a variable, a path or a symbol."""

    var: str
    symbol: str
    arguments: tuple[str, ...]
    forms: tuple[str, ...]


@dataclass(slots=True)
class Alternative:
    """A line of a section: its columns and its tokens."""

    columns: list[list[str | Reference]]
    tokens: list[str]


@dataclass(slots=True)
class Section:
    """A symbol's alternatives. `defaults` are variables that are expanded when a template first uses them."""

    columns: list[str]
    defaults: dict[str, Reference] = field(default_factory=dict)
    alternatives: list[Alternative] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)


@cache
def _reference(text: str) -> Reference:
    match = _REFERENCE.fullmatch(text)
    if match is None:
        raise ValueError(f"{{{text}}} is not a reference; write {{var=symbol(arguments):form/form}}")
    var, symbol, arguments, forms = match.groups()
    return Reference(
        var or "", symbol, tuple(filter(None, (arguments or "").split(","))), tuple(forms.split("/")) if forms else ()
    )


def _column(text: str) -> list[str | Reference]:
    parts = re.split(r"\{([^{}]*)\}", text)
    return [_reference(part) if i % 2 else part for i, part in enumerate(parts) if part and text != "-"]


def _add(section: Section, line: str) -> None:
    """Add the line `WEIGHT column | column | tokens` to a section. The weight is 1 by default."""
    weight, text = re.match(r"(?:([\d.]+) (?= *\S))?(.*)", line).groups()  # type: ignore[union-attr]
    texts = [part.strip() for part in text.split(" | ")]
    count = len(section.columns) if len(texts) > 1 else 1
    tokens = " ".join(texts[count:]).split()
    section.alternatives.append(Alternative([_column(text) for text in texts[:count]], tokens))
    section.weights.append(float(weight or 1) + (section.weights[-1] if section.weights else 0))


@cache
def sections() -> dict[str, Section]:
    """Read all template files."""
    found: dict[str, Section] = {}
    section = Section([])
    for file in sorted(TEMPLATES.glob("*.txt")):
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith("["):
                name, *columns = line[1:].replace("]", "").split()
                section = found[name] = Section(columns or ["en", "zh"])
            elif line.startswith(": "):
                section.defaults |= {ref.var: ref for ref in map(_reference, line[2:].split())}
            elif line and not line.startswith("#"):
                _add(section, line)
    return found


class _Expansion:
    """Expands one alternative of a section; `scope` maps variables to phrases."""

    def __init__(self, rng: Random, section: Section, scope: Phrase) -> None:
        self.rng, self.section, self.scope = rng, section, scope

    def lookup(self, path: str) -> Any:
        """Return the value of a variable, of a path such as `who.noun.kind`, or of a new symbol."""
        scope = self.scope
        if path in scope:
            return scope[path]
        head, _, rest = path.partition(".")
        if head not in scope:
            if head in self.section.defaults:
                scope[head] = self.expand(self.section.defaults[head])
            elif is_symbol(path):
                scope[path] = expand(self.rng, path)
                return scope[path]
            else:
                scope[head] = expand(self.rng, head)
        value: Any = scope[head]
        for name in rest.split(".") if rest else ():
            value = value["en"] if name == "obj" and "obj" not in value else value.get(name, "")
        return value

    def expand(self, reference: Reference) -> Any:
        """Return the value of a variable, or expand `symbol(arguments)`."""
        symbol = re.sub(r"@([\w.]+)", lambda match: text_of(self.lookup(match[1]), "en"), reference.symbol)
        if symbol in PRIMITIVES:
            return PRIMITIVES[symbol](self.rng, *map(self._operand, reference.arguments))
        if symbol in self.scope or not ("@" in reference.symbol or is_symbol(symbol)):
            return self.lookup(symbol)
        scope = {}
        for argument in reference.arguments:
            name, _, value = argument.rpartition("=")
            passed = value.strip("'") if value.startswith("'") else self.expand(_reference(value))
            scope[name or value.rpartition(".")[2]] = passed
        return expand(self.rng, symbol, **scope)

    def _operand(self, text: str) -> Any:
        """Return an argument of a primitive: an integer, a variable's phrase, or the text itself."""
        if text.lstrip("-").isdecimal():
            return int(text)
        head = text.partition(".")[0]
        return self.lookup(text) if head in self.scope or head in self.section.defaults else text

    def value(self, reference: Reference) -> Any:
        """Return what a reference in a column stands for."""
        if reference.var or reference.arguments or "@" in reference.symbol:
            var = reference.var or reference.symbol
            if var not in self.scope:
                self.scope[var] = self.expand(reference)
            return self.scope[var]
        return self.lookup(reference.symbol)

    def text(self, column: list[str | Reference], side: str) -> str:
        """Return the text of a column; `side` is en or zh."""
        parts = []
        for part in column:
            if isinstance(part, str):
                parts.append(part)
            elif part.forms:
                form = part.forms[agreement(self.value(part), len(part.forms))]
                parts.append(text_of(self.lookup(form), side) if "." in form else form)
            else:
                parts.append(text_of(self.value(part), side))
        text = "".join(parts)
        if side == "zh":
            return text
        text = _SPACE.sub(r"\1", " ".join(text.split()))
        return _ARTICLE.sub(lambda match: f"{words.article(match[2])} {match[2]}", text) if "(n)" in text else text

    def phrase(self, alternative: Alternative) -> Phrase:
        """Return the phrase of an alternative. Raises RejectedError if a guard fails."""
        extra: Phrase = {}
        for token in alternative.tokens:
            if token[0] in "?!":
                guard = _reference(token[1:])
                value = self.expand(guard) if guard.arguments else self.lookup(guard.symbol)
                if bool(value) != (token[0] == "?"):
                    raise RejectedError
            elif "=" in token:
                reference = _reference(token)
                if reference.var not in self.scope:
                    self.scope[reference.var] = self.expand(reference)
            else:
                name, _, value = token.partition(":")
                extra[name] = value or True
        if len(alternative.columns) < len(self.section.columns):  # one text for both languages, or another phrase
            (first,) = alternative.columns
            if len(first) == 1 and isinstance(first[0], Reference):
                return {**self.value(first[0]), **extra}
            text = self.text(first, "en")
            return {"en": text, "zh": text, **extra}
        texts = {
            name: self.text(column, "zh" if name.startswith("zh") else "en")
            for name, column in zip(self.section.columns, alternative.columns, strict=True)
        }
        return {**self.scope, **texts, **extra}


def agreement(subject: Phrase, forms: int) -> int:
    """Return 0 for a third person singular, 2 for `I` if there are three forms, else 1."""
    person = int(subject.get("person", 3))
    if subject.get("many") or person == 2:
        return 1
    return 0 if person == 3 else min(forms - 1, 2)


def text_of(value: Any, side: str) -> str:
    """Return a phrase's text on one side; a string is itself."""
    return value.get(side, "") if isinstance(value, dict) else str(value)


def is_symbol(name: str) -> bool:
    """Return whether `expand` accepts a name."""
    return name in PRIMITIVES or name in sections() or name in words.tables() or "+" in name


def expand(rng: Random, symbol: str, **scope: Any) -> Phrase:
    """Sample a phrase of a symbol: a primitive, a section of templates, a word table, or a union `a+b`.

    An unknown `a.b` falls back to `a`. Raises KeyError for an unknown symbol.
    """
    if symbol in PRIMITIVES:
        return PRIMITIVES[symbol](rng)
    if "+" in symbol:
        return expand(rng, pick(rng, symbol.split("+")), **scope)
    if symbol in words.tables():
        return pick(rng, words.tables()[symbol])
    if symbol not in sections():
        if "." not in symbol:
            raise KeyError(f"unknown symbol {symbol}; add a section or a word table of this name")
        return expand(rng, symbol.rpartition(".")[0], **scope)
    return _sample(rng, sections()[symbol], scope)


def render(rng: Random, template: str, **scope: Any) -> Phrase:
    """Sample a phrase of a template that is not in a section, such as `{city}` or `{fruit.plural} | {fruit}`."""
    return _sample(rng, _inline(template), scope)


@cache
def _inline(template: str) -> Section:
    section = Section(["en", "zh"])
    _add(section, template)
    return section


def _sample(rng: Random, section: Section, scope: Phrase) -> Phrase:
    for _ in range(TRIES):
        chosen = section.alternatives[bisect(section.weights, rng.random() * section.weights[-1])]
        try:
            return _Expansion(rng, section, dict(scope)).phrase(chosen)
        except RejectedError:
            continue
    raise RejectedError(f"no alternative of {TRIES} passed its guards: {section.columns}")


def _integer(rng: Random, low: int, high: int) -> Phrase:
    value = str(rng.randint(low, high))
    return {"en": value, "zh": value, "two": value.zfill(2)}


def _slice(rng: Random, table: str, first: int, last: int) -> Phrase:
    return pick(rng, words.tables()[table][first : last or None])


def invented(rng: Random) -> Phrase:
    """Sample a name that does not exist, so that the model learns to copy names."""
    name = "".join(pick(rng, SYLLABLES) for _ in range(rng.randint(2, 3))).capitalize()
    return {"en": name, "zh": name, "human": True}


def _other(rng: Random, subject: Phrase) -> Phrase:
    """Sample a person who is not the subject."""
    for _ in range(20):
        found = expand(rng, "person")
        same = found.get("person") == subject.get("person") and "person" in found
        if not same and found["zh"] not in subject["zh"] and subject["zh"] not in found["zh"]:
            return found
    return expand(rng, "name")


PRIMITIVES: dict[str, Callable[..., Any]] = {
    "number": lambda rng, low, high: words.number(rng.randint(low, high)),
    "int": _integer,
    "slice": _slice,
    "invented": invented,
    "other": _other,
    "same": lambda _, one, other: one["en"] == other["en"],
}
