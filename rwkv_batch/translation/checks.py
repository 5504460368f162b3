"""Finds translations that are certainly wrong."""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Iterable

from rwkv_batch.translation.languages import language_name, letters_in_script
from rwkv_batch.translation.markers import PLACEHOLDERS

_REVIEWED = 10
"""Translations that a person should read, at most."""
_MIN_WORDS, _MIN_LETTERS = 3, 8
"""Shorter texts may be names, which many languages copy. Letters are of scripts without spaces between words."""
_MAX_GROWTH, _MAX_SHORT = 8, 200
"""A translation above both the source times `_MAX_GROWTH` and `_MAX_SHORT` characters is too long."""
_MAX_SHRINKAGE, _MIN_LONG = 12, 100
"""A text above both its translation times `_MAX_SHRINKAGE` and `_MIN_LONG` characters lost something."""
_WORD = re.compile(r"[^\W\d_]+")
_REPETITION = re.compile(r"(?=(\S.{0,59}?)\1{5})", re.DOTALL)
_NUMBER = re.compile(r"\d+(?:[.,'\u00a0\u202f]\d+)*")
_UNITS = (
    "miles?|feet|foot|inch(?:es)?|pounds?|ounces?|gallons?|yards?|acres?|mph|ft|lbs?|oz|euros?|dollars?|cents?|percent"
)
_WORDS = r"100\b|(?:25|50|75)\s?(?:%|percent)"
"""Amounts that languages write in words, like a half."""
_AMOUNT = re.compile(
    rf"[$€£¥]\s?({_NUMBER.pattern})"
    rf"|(?<![\d.,])(?<!\d['\u00a0\u202f])(?!{_WORDS})({_NUMBER.pattern})\s?(?:[€£¥]|%(?!\w)|(?:{_UNITS})\b)"
)
"""Money, percentages, and units that languages write in their own way."""
_SIGNS = {
    "%": r"[%％٪]|百分|[\d一二三四五六七八九]\s?[成割]|パーセント|"
    "프로|퍼센트|percent|per ?cent|prozent|pour ?cent|por ?cien|процент|yüzde|प्रतिशत",
    "$": "[$＄]|美金|(?<![欧歐])元|ドル|달러|dollar|d[oó]lar|доллар|usd",
    "€": "€|欧元|歐元|ユーロ|유로|euro|евро|eur",
    "£": "[£￡]|英镑|英鎊|ポンド|파운드|pound|pfund|livre|libra|sterlin|фунт|gbp",
    "¥": "[¥￥円]|(?<![欧歐美])元|엔|위안|yen|yuan|иен|юан|jpy|cny|rmb",
}
"""How languages write them. In others, a translation with the sign itself is found."""
_NEGATIVE = re.compile(rf"(?<![^\s(（])[-\u2212]({_NUMBER.pattern})")
_BELOW = re.compile(
    rf"(?:[-\u2212\u2013]|零下|0下|负|負|マイナス|영하|minus|moins|menos|meno|минус)\s?({_NUMBER.pattern})",
    re.IGNORECASE,
)
_TEN = re.compile("(?<![一二两兩三四五六七八九])十")
_NUMERALS = str.maketrans("零〇一二两兩三四五六七八九", "0012223456789", "十百千")
_MIN_DIGITS = 3
_INVENTED = re.compile(r"</?\d+/?>|[<>](?!\s?\d)|[{}]")
"""A tag as models see it, or a character of markers. A comparison like `< 5` is none."""
_QUOTES = str.maketrans("《》〈〉«»‹›", "<><><><>")
"""Quotation marks that a translation may write as < and >."""
_MARKER = re.compile(PLACEHOLDERS)
_MAX_CHECKED = 4000


def least_certain(confidences: Iterable[float | None]) -> set[int]:
    """Return the indices of the ten lowest confidences, at most a third of all. None: not known."""
    known = [(confidence, index) for index, confidence in enumerate(confidences) if confidence is not None]
    return {index for _, index in heapq.nsmallest(min(_REVIEWED, len(known) // 3), known)}


def problem(source: str, answer: str, source_lang: str, target_lang: str, *, is_cut: bool = False) -> str:
    """Return the problem of a translation, like "is empty". "": there is none."""
    if not answer.strip():
        return "is empty"
    if _WORD.search(_MARKER.sub("", source)) and not re.search(r"\w", _MARKER.sub("", answer)):
        return "has no words"
    if is_cut or len(answer) > max(_MAX_GROWTH * len(source), _MAX_SHORT):
        return "is much longer than the text"
    if len(source) > max(_MAX_SHRINKAGE * len(answer), _MIN_LONG):
        return "is much shorter than the text"
    allowed = source.translate(_QUOTES)
    if invented := next((one for one in _INVENTED.findall(answer) if one not in allowed), ""):
        return f"has {invented}, which the text does not have"
    if _repeats(answer) and not _repeats(source):
        return "repeats itself"
    if language_name(source_lang) == language_name(target_lang) or not _is_prose(source):
        return ""
    if source.strip().casefold() == answer.strip().casefold():
        return "is a copy of the text"
    own, letters = letters_in_script(answer, target_lang)
    is_latin = letters_in_script("a", target_lang)[0] > 0
    if letters >= _MIN_LETTERS and (2 * own < letters if is_latin else not own):
        return f"is not in the script of {language_name(target_lang)}"
    missing = _lost_number(source[:_MAX_CHECKED], answer)
    return f"lacks the number {missing}" if missing else ""


def _is_prose(text: str) -> bool:
    """Return whether the text is long enough for checks. A text of only names is not enough."""
    words = _WORD.findall(text[:_MAX_CHECKED])
    if words and not words[0].isascii():
        return sum(map(len, words)) >= _MIN_LETTERS
    return len(words) >= _MIN_WORDS and any(word.islower() for word in words)


def _repeats(text: str) -> bool:
    return _REPETITION.search(text[-_MAX_CHECKED:]) is not None


def _lost_number(source: str, answer: str) -> str:
    """Return a number that the answer lacks: a long one, an amount, or a negative one. "": there is none.

    Only the digits are compared, without zeros at both ends: $5 million is 500万美元, and $5.50 is 5,5 Dollar.
    """
    answers = answer, _TEN.sub("一", answer).translate(_NUMERALS)
    given = _most(_NUMBER, answers)
    for number in _found(_NUMBER, source):
        digits = re.sub(r"\D", "", number)
        if len(digits) >= _MIN_DIGITS and not digits.endswith("00") and _key(number) not in given:
            return number
    if amount := _missing(_AMOUNT, source, given):
        return amount
    amounts = [found.group() for found in _AMOUNT.finditer(source)]
    for sign, words in _SIGNS.items():
        amount = next((one for one in amounts if sign in one), "")
        if amount and re.search(words, answer, re.IGNORECASE) is None:
            return amount
    negative = _missing(_NEGATIVE, source, _most(_BELOW, answers))
    return negative and f"-{negative}"


def _missing(pattern: re.Pattern[str], source: str, given: Counter[str]) -> str:
    """Return the first number that the source has more often than it is given."""
    found = _found(pattern, source)
    lost = Counter(map(_key, found)) - given
    return next((number for number in found if _key(number) in lost), "")


def _key(number: str) -> str:
    return re.sub(r"\D", "", number).strip("0")


def _found(pattern: re.Pattern[str], text: str) -> list[str]:
    """Return the number of each match."""
    return [found[found.lastindex or 0] for found in pattern.finditer(text)]


def _most(pattern: re.Pattern[str], texts: Iterable[str]) -> Counter[str]:
    """Return how often numbers are in the text that has them most often, by their keys."""
    most: Counter[str] = Counter()
    for text in texts:
        most |= Counter(map(_key, _found(pattern, text)))
    return most
