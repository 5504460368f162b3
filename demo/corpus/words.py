"""Loads the word tables of `words/*.txt` and inflects English words by rule.

A line of a table lists entries `english=中文`, separated by ", ". The file decides what follows a slash:
nouns and people: `singular+plural=中文/measure word`; adjectives: `word/comparative=中文`;
verbs: `base/past/participle; rest of the phrase=中文`; other files: `english=中文/x/y`.
Marks: `*` before an adjective: never after 很. `!` after a verb: no progressive form. `~`: the verb names a state.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

WORDS = Path(__file__).parent / "words"
Phrase = dict[str, Any]
"""A word or a phrase: `en`, `zh`, further forms, flags and the phrases it consists of."""
VOWELS = "aeiou"
UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
).split()
DIGITS = "零一二三四五六七八九"
ATTRIBUTIVE_ALONE = frozenset("大小新旧长短圆方胖坏")
"""Adjectives that need no 的 before a noun."""


def plural(noun: str) -> str:
    """`cherry tree` -> `cherry trees`, `box` -> `boxes`, `story` -> `stories`."""
    if noun.endswith("y") and noun[-2] not in VOWELS:
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(("s", "x", "z", "ch", "sh")) else "s")


def _doubles(word: str) -> bool:
    """Whether a verb doubles its last consonant: `stop` does, `open` and `play` do not."""
    if word in ("begin", "forget", "prefer", "babysit", "quit"):
        return True
    if len(word) < 3 or word[-1] in VOWELS + "wxy" or word[-2] not in VOWELS:
        return False
    return sum(c in VOWELS for c in word) == 1


def inflect(verb: str) -> tuple[str, str, str]:
    """Return the third person, the regular past and the -ing form of `go to school`."""
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
    """Return `a` or `an` by the first sound of a word."""
    lower = word.lower()
    if lower.startswith(("uni", "use", "europ", "one", "ukulele", "user")):
        return "a"
    return "an" if lower[0] in VOWELS or lower.startswith(("hour", "honest")) else "a"


def number(value: int) -> Phrase:
    """Return a number as words up to 20, as digits above. `zh` precedes a measure word, `plain` does not."""
    zh = str(value)
    if value <= 20:
        tens, units = divmod(value, 10)
        zh = ("" if tens < 2 else DIGITS[tens]) + ("十" if tens else "") + (DIGITS[units] if units or not tens else "")
    en = UNITS[value] if value <= 20 else str(value)
    return {"en": en, "zh": "两" if value == 2 else zh, "plain": zh, "digits": str(value), "many": True}


def _noun(kind: str, english: str, gloss: str, default: str) -> Phrase:
    singular, _, many = english.partition("+")
    zh, _, measure = gloss.partition("/")
    word: Phrase = {"en": singular, "zh": zh, "plural": many or plural(singular), "m": measure or default, "kind": kind}
    return word | {"long": len(zh) > 2}


def _term(kind: str, english: str, gloss: str, _: str) -> Phrase:
    zh, x, y = [*gloss.split("/"), "", ""][:3]
    return {"en": english, "zh": zh, "x": x, "y": y, "plural": plural(english), "kind": kind}


def _adjective(kind: str, english: str, zh: str, _: str) -> Phrase:
    word, _, comparative = english.lstrip("*").partition("/")
    bare = kind == "origin" or zh in ATTRIBUTIVE_ALONE
    pred = kind != "origin" and not english.startswith("*")
    forms = {"more": comparative or f"more {word}", "zh_attr": zh if bare else f"{zh}的"}
    return {"en": word, "zh": zh, **forms, "pred": pred, kind: True}


def _verb(kind: str, english: str, zh: str, _: str) -> Phrase:
    forms, _, tail = english.rstrip("!~").partition(";")
    base, *given = forms.strip().split("/")
    third, regular, gerund = inflect(base)
    past, participle = given or (regular, regular)
    before, gap, after = zh.partition("……")
    word = {"en": base, "zh": zh, "third": third, "past": past, "participle": participle, "gerund": gerund}
    word |= {
        "tail": tail.strip(),
        "zh_a": before,
        "zh_b": after,
        "rest": base[3:],
        "zh_bare": before.removeprefix("很"),
        "kind": kind,
    }
    for field, aspect in (("le", "了"), ("guo", "过")):  # 吃了饭, but 给他打电话了
        word |= {f"{field}_a": "" if gap else aspect, f"{field}_b": aspect if gap else ""}
    marks = english[len(english.rstrip("!~")) :]
    flags = {"gap": bool(gap), "progressive": "!" not in marks, "state": "~" in marks, "be": base.startswith("be ")}
    moves = base.startswith(("go ", "take ", "come ", "stay ", "travel"))
    return {**word, **flags, "moves": moves, "zh_no": "没" if zh == "有" else "不"}


PARSERS = {"nouns": _noun, "people": _noun, "adjectives": _adjective, "verbs": _verb}
PREFIXES = {"adjectives": "adj.", "verbs": "verb.", "ui": "ui."}


def _entries(file: Path) -> Iterator[tuple[list[str], list[tuple[str, str]]]]:
    """Yield the header words and the (english, gloss) entries of each section."""
    for section in file.read_text(encoding="utf-8").split("\n[")[1:]:
        header, _, body = section.partition("]\n")
        lines = [line for line in body.splitlines() if not line.startswith("#")]
        pairs = [entry.partition("=")[::2] for line in lines for entry in line.split(", ") if entry]
        yield header.split(), pairs


@cache
def tables() -> dict[str, list[Phrase]]:
    """Return all words by table name: `fruit`, `city`, `adj.color`, `verb.drink`, `ui.noun`."""
    found: dict[str, list[Phrase]] = {}
    for file in sorted(WORDS.glob("*.txt")):
        parse = PARSERS.get(file.stem, _term)
        for (kind, *rest), pairs in _entries(file):
            is_name = kind.startswith("name-")
            kinds = rest if kind == "transitive" else [kind]
            for one in kinds:
                words = found.setdefault(PREFIXES.get(file.stem, "") + one, [])
                for english, gloss in pairs:
                    word = (_term if is_name else parse)(one, english, gloss, rest[0] if rest else "个")
                    known = file.stem == "verbs" and any(
                        word["zh"] == w["zh"] or (word["en"], word["tail"]) == (w["en"], w["tail"]) for w in words
                    )
                    if not known:
                        words.append(word | {"human": is_name})
    return found


@cache
def phrase_table(name: str) -> tuple[tuple[str, ...], ...]:
    """Return the lines of `phrases/NAME.txt`, split at ` | `."""
    text = (WORDS.parent / "phrases" / f"{name}.txt").read_text(encoding="utf-8")
    return tuple(tuple(line.split(" | ")) for line in text.splitlines() if line and not line.startswith("#"))
