"""ICU messages: the texts of their plurals and choices are translated, in the forms of the target language."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from rwkv_batch.translation.documents.document import Slot, Texts, Unit
from rwkv_batch.translation.documents.plurals import plural_forms
from rwkv_batch.translation.segments import has_letters

_CHOICE = re.compile(r"\{\s*(\w{1,64})\s*,\s*(plural|selectordinal|select)\s*,\s*(offset:\s*\d+\s*)?")
_BRANCH = re.compile(r"\s*(=?[\w.-]{1,64})\s*\{")
_MAX_MESSAGE = 10_000
_MAX_TEXTS = 64
"""Texts of a message."""


def is_icu(text: str) -> bool:
    """Return whether a text has a translatable ICU plural or choice."""
    return len(text) <= _MAX_MESSAGE and _CHOICE.search(text) is not None and _parsed(text) is not None


@dataclass(slots=True)
class _Choice:
    head: str
    kind: str
    start: int
    end: int
    branches: dict[str, str] = field(default_factory=dict)


def _parsed(text: str) -> _Choice | None:
    """Return a message's first choice. None if braces do not close."""
    found = _CHOICE.search(text)
    if found is None:
        return None
    made = _Choice(found.group().strip(), found[2], found.start(), 0)
    at = found.end()
    while (branch := _BRANCH.match(text, at)) is not None:
        end = _closing(text, branch.end())
        if end < 0:
            return None
        made.branches[branch[1]] = text[branch.end() : end]
        at = end + 1
    closing = re.compile(r"\s*\}").match(text, at)
    if closing is None or "other" not in made.branches:
        return None
    made.end = closing.end()
    return made


def _closing(text: str, at: int) -> int:
    """Return the position of the brace that closes the one before `at`. Quoted braces do not count."""
    depth, is_quoted = 1, False
    for found in re.compile(r"''|'(?=[{}#])|'|[{}]").finditer(text, at):
        one = found.group()
        if one == "'":
            is_quoted = not is_quoted and text[found.end() : found.end() + 1] in ("{", "}", "#")
        elif one in "{}" and not is_quoted:
            depth += 1 if one == "{" else -1
            if not depth:
                return found.start()
    return -1


def icu_slot(message: str, note: str, language: str, put: Callable[[str], None]) -> Slot:
    """Return the slot of an ICU message. Each branch is translated with the text around the choice."""
    texts = list(_full_texts(message, language))[:_MAX_TEXTS]
    units = tuple(Unit(text, note=note) for text in dict.fromkeys(texts) if has_letters(text))

    def put_message(translations: Texts) -> None:
        if None not in translations:
            known = {unit.text: text or "" for unit, text in zip(units, translations, strict=True)}
            put(_rebuilt(message, language, lambda text: known.get(text, text)))

    return Slot(units, put_message)


def _branches(choice: _Choice, language: str) -> dict[str, str]:
    """Return the branches that the language needs. A missing one has the text of `other`."""
    if choice.kind == "select":
        return choice.branches
    categories = [category for category, _ in plural_forms(language)[1]]
    exact = {name: text for name, text in choice.branches.items() if name.startswith("=")}
    wanted = [*categories, *(["other"] if "other" not in categories else [])]
    if choice.kind == "selectordinal":
        wanted = list(choice.branches)
    return exact | {name: choice.branches.get(name, choice.branches["other"]) for name in wanted}


def _full_texts(message: str, language: str) -> list[str]:
    """Return a text for each combination of branches."""
    choice = _parsed(message)
    if choice is None:
        return [message]
    before, after = message[: choice.start], message[choice.end :]
    found: list[str] = []
    for text in _branches(choice, language).values():
        found += _full_texts(before + text + after, language)
        if len(found) > _MAX_TEXTS:
            break
    return found


def _rebuilt(message: str, language: str, translated: Callable[[str], str]) -> str:
    """Return the message with each branch as a whole translation: no text stays around the choice."""
    choice = _parsed(message)
    if choice is None:
        return translated(message)
    before, after = message[: choice.start], message[choice.end :]
    parts = (
        f"{name} {{{_rebuilt(before + text + after, language, translated)}}}"
        for name, text in _branches(choice, language).items()
    )
    return f"{choice.head} {' '.join(parts)}}}"
