"""Restricts or refuses schemas that llguidance would enforce too loosely.

Formats get patterns, white space in patterns becomes ECMA's, and numeric limits must be exact as doubles: llguidance
would round others.

Schemas whose references loop so that no value is finite are refused. A list whose `next` may be null or absent is
finite. One whose `next` is required and is the same list never ends. Only references are followed; other keywords may
still rule out all values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from decimal import Decimal
from itertools import islice
from typing import Any

from sampling.grammar.constraint import GrammarError
from sampling.grammar.error_location import Path, join_path, resolve_ref, subschemas

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAY = f"^(?:[0-9]{{4}}-(?:0[13-9]|1[0-2])-|[0-9]{{4}}-02-(?:[01]|2[0-8])|{_LEAP_YEAR}-02-29)"
PATTERNS = {
    "date": _DAY,
    "time": r"^[0-9]{2}:[0-9]{2}:[0-5]",
    "date-time": f"{_DAY}[^:]{{2,5}}:[0-9]{{2}}:[0-5]",
    "email": r"^[^@]{1,64}@",
}
"""Restricts dates to real days (29 February in leap years), times to seconds below 60, mailboxes to 64 bytes."""
LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
VALUES = ("const", "enum")
LARGEST = 2**53
"""Largest absolute value of a limit"""
_EXACT = range(-LARGEST, LARGEST + 1)
"""Integers that a double holds exactly; llguidance rounds others."""
_READ = range(-(2**63), 2**64)
"""Integers that llguidance can parse."""
_EXACT_POWER = 22
"""Largest power of ten that a double holds exactly."""
_PIECE = re.compile(r"\\.|.", re.DOTALL)


def narrow(schema: Any, strict: bool, place: str = "") -> None:
    """Restrict a schema and all schemas in it, in place.

    Limits beyond 2^53 are removed if not `strict`. Raises GrammarError with the place for such limits if `strict`, and
    for values that no answer can have.
    """
    if not isinstance(schema, dict):
        return
    if schema.get("uniqueItems") is False:  # the default; llguidance refuses the keyword
        del schema["uniqueItems"]
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = to_ecma(schema["pattern"])
    _narrow_format(schema)
    for name in LIMITS:
        limit = schema.get(name)
        if isinstance(limit, int | float) and LARGEST < abs(limit) < math.inf:  # `check_numbers` handles the others
            if strict:
                raise GrammarError(
                    f"{name} {limit} is beyond 2^53, where numbers are not exact; use a smaller one", place
                )
            del schema[name]
    for name in VALUES:
        check_numbers(schema.get(name), f"{place}.{name}", is_exact=True)
    for step, part in subschemas(schema):
        narrow(part, strict, place + step)


def check_numbers(value: Any, place: str = "", *, is_exact: bool = False) -> None:
    """Check a schema's numbers.

    Raises GrammarError with the place for a number that llguidance cannot parse.

    Covers NaN and infinity. is_exact: also refuse a number that llguidance would round.
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
            raise GrammarError("NaN and numbers beyond 1.8e308 are not supported", join_path(path))
        elif isinstance(value, float) and is_exact and not _is_read_exactly(value):
            raise GrammarError(f"{value} has too many digits or too large an exponent to be exact", join_path(path))
        elif isinstance(value, int) and value not in integers:
            digits = len(str(abs(value)))
            supported = f"{integers.start} to {integers.stop - 1}"
            raise GrammarError(f"an integer of {digits} digits is out of range; use {supported}", join_path(path))
        waiting += inner[::-1]


def _is_read_exactly(number: float) -> bool:
    """Return whether digits and power of ten are exact doubles: llguidance multiplies or divides them."""
    _, digits, exponent = Decimal(repr(number)).as_tuple()
    return int("".join(map(str, digits))) <= LARGEST and abs(int(exponent)) <= _EXACT_POWER


def _narrow_format(schema: dict[str, Any]) -> None:
    name = schema.get("format")
    pattern = PATTERNS.get(name) if isinstance(name, str) else None
    if pattern is None:
        return
    if "pattern" not in schema:
        schema["pattern"] = pattern
    elif isinstance(schema.setdefault("allOf", []), list):
        schema["allOf"].append({"pattern": pattern})


def to_ecma(pattern: str) -> str:
    """Return a pattern whose white space includes the byte order mark. JavaScript's white space includes it too."""
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


MAX_VISITS = 50_000
"""Parts to visit; larger schemas pass unchecked."""
_WHY = "refers to itself so that no value can end; allow an alternative or make it optional"
_SKIPPED = (".$defs.", ".definitions.", ".not", ".if")


class _TooManyVisitsError(Exception):
    """More than MAX_VISITS parts."""


def check_terminates(schema: Any) -> None:
    """Check that a schema's values can end. Raises GrammarError with the first place whose values can never end."""
    try:
        termination = _Termination(schema)
        for path, part in _reachable(schema):
            if not termination.can_end(part):
                raise GrammarError(_WHY, join_path(path))
    except _TooManyVisitsError:
        return
    except RecursionError:
        raise GrammarError("the schema is nested too deeply") from None


class _Termination:
    """The references that have a finite value: a least fixed point."""

    def __init__(self, root: Any) -> None:
        """Raises _TooManyVisitsError, as `can_end` does."""
        self._visits = 0
        self._targets = {
            part["$ref"]: resolve_ref(root, part["$ref"]) for _, part in _reachable(root) if _has_ref(part)
        }
        self._terminating: set[int] = set()
        """ids of targets; several references may share one"""
        unresolved = {id(target): target for target in self._targets.values()}
        while found := {key for key, target in unresolved.items() if self.can_end(target)}:
            self._terminating |= found
            unresolved = {key: target for key, target in unresolved.items() if key not in found}

    def can_end(self, part: Any) -> bool:
        """Return whether `part` has a finite value. Uses the targets found so far."""
        self._visits += 1
        if self._visits > MAX_VISITS:
            raise _TooManyVisitsError
        if not isinstance(part, dict) or "const" in part or "enum" in part:
            return True
        if _has_ref(part) and id(self._targets[part["$ref"]]) not in self._terminating:
            return False
        if not all(map(self.can_end, _listed(part, "allOf"))):
            return False
        for name in ("anyOf", "oneOf"):
            if (branches := _listed(part, name)) and not any(map(self.can_end, branches)):
                return False
        return all(map(self.can_end, _required(part)))


def _has_ref(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("$ref"), str)


def _listed(part: dict[str, Any], name: str) -> list[Any]:
    found = part.get(name)
    return found if isinstance(found, list) else []


def _required(part: dict[str, Any]) -> Iterator[Any]:
    """Lazily yield the schemas that every object or array value must contain."""
    min_items = part.get("minItems", 0)
    if part.get("type") == "object" and isinstance(part.get("properties"), dict):
        properties = part["properties"]
        yield from (properties.get(name) if isinstance(name, str) else None for name in _listed(part, "required"))
    elif part.get("type") == "array" and isinstance(min_items, int):
        first = _listed(part, "prefixItems")
        yield from islice(first, min(max(min_items, 0), len(first)))
        if min_items > len(first):
            yield part.get("items")


def _reachable(root: Any) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield each part that constrains a value, once, with its path. Includes parts that constrain a part of a value."""
    seen: set[int] = set()
    waiting: list[tuple[Path, Any]] = [((), root)]
    while waiting:
        path, part = waiting.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        yield path, part
        inner = [((path, step), child) for step, child in subschemas(part) if not step.startswith(_SKIPPED)]
        waiting += inner[::-1]
        if _has_ref(part):
            waiting.append((path, resolve_ref(root, part["$ref"])))
