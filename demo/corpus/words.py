"""Loads the word tables of `words/*.txt` and inflects English words. README.md describes the format."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent
Phrase = dict[str, Any]
"""A word or a phrase: `en`, `zh`, further forms, flags and the phrases it consists of."""
VOWELS = "aeiou"
UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
).split()
DIGITS = "零一二三四五六七八九"
PREFIXES = {"adjectives": "adj.", "verbs": "verb.", "ui": "ui."}


def lines(pattern: str) -> Iterator[str]:
    """Leave out blank lines and comments."""
    for file in sorted(ROOT.glob(pattern)):
        yield from (line for line in file.read_text(encoding="utf-8").splitlines() if line and line[0] != "#")


@cache
def phrase_table(name: str) -> tuple[tuple[str, ...], ...]:
    """Lines are split at ` | `."""
    return tuple(tuple(line.split(" | ")) for line in lines(f"phrases/{name}.txt"))


def plural(noun: str) -> str:
    """`cherry tree` -> `cherry trees`, `box` -> `boxes`, `story` -> `stories`."""
    if noun.endswith("y") and noun[-2] not in VOWELS:
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(("s", "x", "z", "ch", "sh")) else "s")


def _doubles(word: str) -> bool:
    """Whether a verb doubles its last consonant: `stop` does, `open` and `play` do not."""
    if word in ("begin", "forget", "prefer", "babysit", "quit"):
        return True
    ends = len(word) > 2 and word[-1] not in VOWELS + "wxy" and word[-2] in VOWELS
    return ends and sum(c in VOWELS for c in word) == 1


def inflect(verb: str) -> tuple[str, str, str]:
    """Return a verb phrase's third person, regular past and -ing form."""
    head, space, rest = verb.partition(" ")
    third = {"be": "is", "have": "has", "do": "does", "go": "goes"}.get(head, plural(head))
    stem = head + head[-1] if _doubles(head) else head
    past = head + "d" if head.endswith("e") else stem + "ed"
    if head.endswith("y") and head[-2] not in VOWELS:
        past = head[:-1] + "ied"
    if head.endswith("ie"):
        stem = head[:-2] + "y"
    elif head.endswith("e") and not head.endswith(("ee", "ye", "be")):
        stem = head[:-1]
    return third + space + rest, past + space + rest, stem + "ing" + space + rest


def article(word: str) -> str:
    """`a` or `an`, by the first sound."""
    lower = word.lower()
    if lower.startswith(("uni", "use", "europ", "one", "ukulele", "user")):
        return "a"
    return "an" if lower[0] in VOWELS or lower.startswith(("hour", "honest")) else "a"


def number(value: int) -> Phrase:
    """Return a number in words up to 20, in digits above. `zh` precedes a measure word, `plain` does not."""
    en = zh = str(value)
    if value <= 20:
        tens, units = divmod(value, 10)
        zh = ("" if tens < 2 else DIGITS[tens]) + ("十" if tens else "") + (DIGITS[units] if units or not tens else "")
        en = UNITS[value]
    return {"en": en, "zh": "两" if value == 2 else zh, "plain": zh, "digits": str(value)}


def _noun(kind: str, english: str, gloss: str, default: str) -> Phrase:
    singular, _, many = english.partition("+")
    zh, _, measure = gloss.partition("/")
    forms = {"plural": many or plural(singular), "m": measure or default, "long": len(zh) > 2}
    return {"en": singular, "zh": zh, "kind": kind, **forms}


def _term(kind: str, english: str, gloss: str, _: str) -> Phrase:
    zh, x, y = [*gloss.split("/"), "", ""][:3]
    human = kind.startswith("name-")
    return {"en": english, "zh": zh, "x": x, "y": y, "plural": plural(english), "kind": kind, "human": human}


def _adjective(kind: str, english: str, zh: str, _: str) -> Phrase:
    word, _, comparative = english.lstrip("*").partition("/")
    bare = kind == "origin" or zh in tuple("大小新旧长短圆方胖坏")  # no 的 before a noun
    pred = kind != "origin" and not english.startswith("*")
    forms = {"more": comparative or f"more {word}", "zh_attr": zh if bare else f"{zh}的"}
    return {"en": word, "zh": zh, **forms, "pred": pred, kind: True}


def _verb(kind: str, english: str, zh: str, _: str) -> Phrase:
    bare = english.rstrip("!~")
    forms, _, tail = bare.partition(";")
    base, *given = forms.strip().split("/")
    third, regular, gerund = inflect(base)
    past, participle = given or (regular, regular)
    before, gap, after = zh.partition("……")
    word = {"en": base, "zh": zh, "third": third, "past": past, "participle": participle, "gerund": gerund}
    word |= {"kind": kind, "tail": tail.strip(), "rest": base[3:], "zh_a": before, "zh_b": after, "gap": bool(gap)}
    for name, aspect in (("le", "了"), ("guo", "过")):  # 吃了饭, but 给他打电话了
        word |= {f"{name}_a": "" if gap else aspect, f"{name}_b": aspect if gap else ""}
    word |= {"zh_no": "没" if zh == "有" else "不", "zh_bare": before.removeprefix("很"), "be": base.startswith("be ")}
    moves = base.startswith(("go ", "take ", "come ", "stay ", "travel"))
    return word | {"progressive": "!" not in english, "state": english != bare and "~" in english[-2:], "moves": moves}


@cache
def tables() -> dict[str, list[Phrase]]:
    """Return all words by table name: `fruit`, `city`, `adj.color`, `verb.drink`, `ui.noun`."""
    found: dict[str, list[Phrase]] = {}
    parsers = {"nouns": _noun, "people": _noun, "adjectives": _adjective, "verbs": _verb}
    for file in sorted(ROOT.glob("words/*.txt")):
        parse, prefix = parsers.get(file.stem, _term), PREFIXES.get(file.stem, "")
        for line in lines(f"words/{file.name}"):
            if line.startswith("["):
                kind, *rest = line.strip("[]").split()
                continue
            for one in rest if kind == "transitive" else [kind]:
                table = found.setdefault(prefix + one, [])
                for english, _, gloss in (entry.partition("=") for entry in line.split(", ")):
                    word = (_term if one.startswith("name-") else parse)(one, english, gloss, (*rest, "个")[0])
                    known = parse is _verb and any(
                        word["zh"] == w["zh"] or (word["en"], word["tail"]) == (w["en"], w["tail"]) for w in table
                    )
                    if not known:
                        table.append(word)
    return found
