"""Plural forms of languages, and the texts to translate for them. Also for ICU messages, which have such forms.

A form is translated with a number that takes it, so "%d files" becomes "2 files" for the Russian form of 2 to 4.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from rwkv_batch.translation.documents.document import Slot, Texts, Unit
from rwkv_batch.translation.languages import language_code
from rwkv_batch.translation.segments import has_letters

_NONE = "ja ko zh vi th id ms lo my km jv su bo ka yue to wo"
_SLAVIC = "(n%10==1 && n%100!=11 ? 0 : n%10>=2 && n%10<=4 && (n%100<10 || n%100>=20) ? 1 : 2)"
_RULES: tuple[tuple[str, str, tuple[tuple[str, int], ...]], ...] = (
    (_NONE, "0", (("other", 5),)),
    ("fr pt oc br am hi bn fa tg ti mg ln fil tr uz", "(n > 1)", (("one", 1), ("other", 5))),
    ("ru uk be sr hr bs", _SLAVIC, (("one", 1), ("few", 2), ("many", 5))),
    ("pl", "(n==1 ? 0 : n%10>=2 && n%10<=4 && (n%100<10 || n%100>=20) ? 1 : 2)", (("one", 1), ("few", 2), ("many", 5))),
    ("cs sk", "(n==1 ? 0 : n>=2 && n<=4 ? 1 : 2)", (("one", 1), ("few", 2), ("other", 5))),
    ("ro", "(n==1 ? 0 : n==0 || (n%100>0 && n%100<20) ? 1 : 2)", (("one", 1), ("few", 2), ("other", 20))),
    ("lt", "(n%10==1 && n%100!=11 ? 0 : n%10>=2 && (n%100<10 || n%100>=20) ? 1 : 2)",
     (("one", 1), ("few", 2), ("other", 10))),
    ("lv", "(n%10==1 && n%100!=11 ? 0 : n!=0 ? 1 : 2)", (("one", 1), ("other", 2), ("zero", 0))),
    ("sl", "(n%100==1 ? 0 : n%100==2 ? 1 : n%100==3 || n%100==4 ? 2 : 3)",
     (("one", 1), ("two", 2), ("few", 3), ("other", 5))),
    ("ga", "(n==1 ? 0 : n==2 ? 1 : n<7 ? 2 : n<11 ? 3 : 4)",
     (("one", 1), ("two", 2), ("few", 3), ("many", 7), ("other", 20))),
    ("ar", "(n==0 ? 0 : n==1 ? 1 : n==2 ? 2 : n%100>=3 && n%100<=10 ? 3 : n%100>=11 ? 4 : 5)",
     (("zero", 0), ("one", 1), ("two", 2), ("few", 3), ("many", 11), ("other", 100))),
)  # fmt: skip
"""Languages, gettext's formula, and each form's CLDR category with a number that takes it."""
_OTHERS = "(n != 1)", (("one", 1), ("other", 5))


def plural_forms(language: str) -> tuple[str, tuple[tuple[str, int], ...]]:
    """Return gettext's `Plural-Forms` of a language, and its forms: CLDR category and a number that takes it."""
    code = language_code(language)
    formula, forms = next((rule[1:] for rule in _RULES if code in rule[0].split()), _OTHERS)
    return f"nplurals={len(forms)}; plural={formula};", forms


Finish = Callable[[Texts], dict[str, str]]


def plural_units(
    singular: Unit, plural: Unit, language: str, placeholder: re.Pattern[str]
) -> tuple[tuple[Unit, ...], Finish]:
    """Return the texts to translate, and a function for the result.

    The function returns the forms of their translations by category.

    placeholder: finds the number's place in a text
    """
    _, forms = plural_forms(language)
    units: list[Unit] = []
    marks: list[tuple[str, str, str]] = []
    for category, number in forms:
        unit = singular if category == "one" and len(forms) > 1 else plural
        found = [one.group() for one in placeholder.finditer(unit.text)]
        is_shown = len(found) == 1 and category not in ("one", "other") and not re.search(r"\d", unit.text)
        units.append(replace(unit, text=unit.text.replace(found[0], str(number))) if is_shown else unit)
        marks.append((category, str(number) if is_shown else "", found[0] if is_shown else ""))

    def finish(texts: Texts) -> dict[str, str]:
        if None in texts:
            return {}
        *of_forms, general = [text or "" for text in texts]
        found = {}
        for (category, number, mark), text in zip(marks, of_forms, strict=True):
            parts = re.split(rf"(?<!\d){number}(?!\d)", text) if number else []
            found[category] = text if not number else mark.join(parts) if len(parts) == 2 else general
        return {**found, "other": found.get("other", general)}

    return (*units, plural), finish


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
