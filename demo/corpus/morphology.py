"""English inflection by rule, for the words the lexicon does not spell out."""

from __future__ import annotations

VOWELS = "aeiou"
UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
).split()
CHINESE_DIGITS = "零一二三四五六七八九"


def _sibilant(word: str) -> bool:
    return word.endswith(("s", "x", "z", "ch", "sh"))


def _doubles(word: str) -> bool:
    """Whether a verb doubles its last consonant: `stop` -> `stopped`, not `open` or `play`."""
    if word in ("begin", "forget", "prefer", "babysit", "quit"):
        return True
    if len(word) < 3 or word[-1] in VOWELS + "wxy" or word[-2] not in VOWELS:
        return False
    return sum(c in VOWELS for c in word) == 1


def plural(noun: str) -> str:
    """`cherry tree` -> `cherry trees`, `box` -> `boxes`, `story` -> `stories`."""
    if noun.endswith("y") and noun[-2] not in VOWELS:
        return noun[:-1] + "ies"
    return noun + ("es" if _sibilant(noun) else "s")


def _head(verb: str) -> tuple[str, str]:
    head, _, rest = verb.partition(" ")
    return head, f" {rest}" if rest else ""


def third_person(verb: str) -> str:
    """`go to school` -> `goes to school`."""
    head, rest = _head(verb)
    special = {"be": "is", "have": "has", "do": "does", "go": "goes"}
    return special.get(head, plural(head)) + rest


def past(verb: str) -> str:
    """The regular past tense and participle: `stop` -> `stopped`."""
    head, rest = _head(verb)
    if head.endswith("e"):
        head += "d"
    elif head.endswith("y") and head[-2] not in VOWELS:
        head = head[:-1] + "ied"
    else:
        head += (head[-1] if _doubles(head) else "") + "ed"
    return head + rest


def gerund(verb: str) -> str:
    """`lie to` -> `lying to`, `run` -> `running`."""
    head, rest = _head(verb)
    if head.endswith("ie"):
        head = head[:-2] + "y"
    elif head.endswith("e") and not head.endswith(("ee", "ye", "be")):
        head = head[:-1]
    elif _doubles(head):
        head += head[-1]
    return head + "ing" + rest


def article(word: str) -> str:
    """`a` or `an`, by the sound a word begins with."""
    lower = word.lower()
    if lower.startswith(("uni", "use", "europ", "one", "ukulele", "user")):
        return "a"
    return "an" if lower[0] in VOWELS or lower.startswith(("hour", "honest")) else "a"


def spelled(number: int) -> str:
    """An English number: in words up to twenty, in digits above."""
    return UNITS[number] if number <= 20 else str(number)


def chinese(number: int, *, counting: bool = True) -> str:
    """A Chinese number: in characters up to twenty, in digits above; 两 before a measure word."""
    if number > 20:
        return str(number)
    if number == 2 and counting:
        return "两"
    if number < 10:
        return CHINESE_DIGITS[number]
    tens, units = divmod(number, 10)
    return ("" if tens == 1 else CHINESE_DIGITS[tens]) + "十" + (CHINESE_DIGITS[units] if units else "")
