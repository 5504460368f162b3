"""Where llguidance allows more than a schema does: the schema is made narrower, or refused.

Formats are said as patterns beside them, white space in patterns is ECMA's, and limits of numbers are those that a
double holds exactly: beyond them llguidance takes another number.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any

from sampling.grammar.error_location import Path, join_path, subschemas
from sampling.grammar.errors import GrammarError

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAY = f"^(?:[0-9]{{4}}-(?:0[13-9]|1[0-2])-|[0-9]{{4}}-02-(?:[01]|2[0-8])|{_LEAP_YEAR}-02-29)"
PATTERNS = {
    "date": _DAY,
    "time": r"^[0-9]{2}:[0-9]{2}:[0-5]",
    "date-time": f"{_DAY}[^:]{{2,5}}:[0-9]{{2}}:[0-5]",
    "email": r"^[^@]{1,64}@",
}
"""February has 29 days in leap years; leap seconds are there once in years; a mailbox has 64 bytes at most."""
LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
VALUES = ("const", "enum")
LARGEST = 2**53
"""Of a limit's size."""
_EXACT = range(-LARGEST, LARGEST + 1)
"""Integers that stay what they are: of others llguidance takes the double beside them."""
_READ = range(-(2**63), 2**64)
"""Integers that it reads at all."""
_EXACT_POWER = 22
"""Of ten, as a double."""
_PIECE = re.compile(r"\\.|.", re.DOTALL)


def narrow(schema: Any, strict: bool, place: str = "") -> None:
    """Change a schema and all schemas in it, in place.

    Raises GrammarError, naming the place, for limits that cannot be held to, which are left out if not `strict`, and
    for values that no answer could have.
    """
    if not isinstance(schema, dict):
        return
    if schema.get("uniqueItems") is False:  # says nothing, and llguidance knows no uniqueItems
        del schema["uniqueItems"]
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = to_ecma(schema["pattern"])
    _narrow_format(schema)
    for name in LIMITS:
        limit = schema.get(name)
        if isinstance(limit, int | float) and LARGEST < abs(limit) < math.inf:  # of others, see `check_numbers`
            if strict:
                raise GrammarError(f"{name} is beyond 2^53, where numbers are not exact: {limit}", place)
            del schema[name]
    for name in VALUES:
        check_numbers(schema.get(name), f"{place}.{name}", is_exact=True)
    for step, part in subschemas(schema):
        narrow(part, strict, place + step)


def check_numbers(value: Any, place: str = "", *, is_exact: bool = False) -> None:
    """Raises GrammarError, naming the place, for a number that is none in JSON, or that llguidance does not read.

    is_exact: also for one that it reads as another.
    """
    integers = _EXACT if is_exact else _READ
    waiting: list[tuple[Path, Any]] = [(((), place), value)]
    while waiting:
        path, value = waiting.pop()
        inner: list[tuple[Path, Any]] = []
        if isinstance(value, dict):
            inner = [((path, f".{name}"), part) for name, part in value.items()]
        elif isinstance(value, list):
            inner = [((path, f"[{index}]"), part) for index, part in enumerate(value)]
        elif isinstance(value, float) and not math.isfinite(value):
            raise GrammarError("NaN and numbers beyond 1.8e308 are not served", join_path(path))
        elif isinstance(value, float) and is_exact and not _is_read_exactly(value):
            raise GrammarError(
                f"numbers with so many digits or such an exponent are not served: {value}", join_path(path)
            )
        elif isinstance(value, int) and value not in integers:
            digits = len(str(abs(value)))
            served = f"{integers.start} to {integers.stop - 1}"
            raise GrammarError(f"integers of {digits} digits are not served beyond {served}", join_path(path))
        waiting += inner[::-1]


def _is_read_exactly(number: float) -> bool:
    """Whether digits and power of ten are both doubles: llguidance multiplies or divides the one by the other."""
    _, digits, exponent = Decimal(repr(number)).as_tuple()
    return int("".join(map(str, digits))) <= LARGEST and abs(int(exponent)) <= _EXACT_POWER


def _narrow_format(schema: dict[str, Any]) -> None:
    given = schema.get("format")
    pattern = PATTERNS.get(given) if isinstance(given, str) else None
    if pattern is None:
        return
    if "pattern" not in schema:
        schema["pattern"] = pattern
    elif isinstance(schema.setdefault("allOf", []), list):
        schema["allOf"].append({"pattern": pattern})


def to_ecma(pattern: str) -> str:
    """A pattern whose white space has the byte order mark among it, as JavaScript's."""
    made, in_class = [], False
    for piece in _PIECE.findall(pattern):
        if piece in ("[", "]"):
            in_class = piece == "["
        if piece == r"\s":
            made.append(r"\s\x{FEFF}" if in_class else r"[\s\x{FEFF}]")
        elif piece == r"\S" and not in_class:
            made.append(r"[^\s\x{FEFF}]")
        else:
            made.append(piece)
    return "".join(made)
