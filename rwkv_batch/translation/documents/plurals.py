"""Plural forms of languages, and the texts to translate for them.

A form is translated with a number that takes it, so "%d files" becomes "2 files" for the Russian form of 2 to 4.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from rwkv_batch.translation.documents.document import Texts, Unit
from rwkv_batch.translation.languages import language_code

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
