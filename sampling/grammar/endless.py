"""Schemas that refer to themselves so that no value can end: an answer would go on for ever, or nowhere.

A list whose `next` may be null or left out ends; one whose `next` is required, and is such a list again, does not. What
else a schema says may rule values out too; here only references are followed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from sampling.grammar.errors import GrammarError
from sampling.grammar.schema_place import Path, joined, parts_of, pointed

MOST_LOOKS = 50_000
"""Parts looked at; a schema that takes more is let pass."""
_WHY = "refers to itself so that no value can end; allow something else beside it, or let it be left out"
_NOT_ENTERED = (".$defs.", ".definitions.", ".not", ".if")


class _TooManyLooksError(Exception):
    """MOST_LOOKS were not enough."""


def check_ends(schema: Any) -> None:
    """Raises GrammarError, naming the first place where a value could begin that never ends."""
    try:
        ends = _Ends(schema)
        for path, part in _reached(schema):
            if not ends.of(part):
                raise GrammarError(_WHY, joined(path))
    except _TooManyLooksError:
        return
    except RecursionError:
        raise GrammarError("the schema is nested too deeply") from None


class _Ends:
    """Which references lead to something that has a value which ends: a least fixed point."""

    def __init__(self, root: Any) -> None:
        """Raises _TooManyLooksError, as `of` does."""
        self._looks = 0
        self._targets = {part["$ref"]: pointed(root, part["$ref"]) for _, part in _reached(root) if _refers(part)}
        self._ending: set[int] = set()
        """ids of targets, which may have several names"""
        open_ones = {id(target): target for target in self._targets.values()}
        while found := {key for key, target in open_ones.items() if self.of(target)}:
            self._ending |= found
            open_ones = {key: target for key, target in open_ones.items() if key not in found}

    def of(self, part: Any) -> bool:
        """Whether a value of it may end, by what is known so far."""
        self._looks += 1
        if self._looks > MOST_LOOKS:
            raise _TooManyLooksError
        if not isinstance(part, dict) or "const" in part or "enum" in part:
            return True
        if _refers(part) and id(self._targets[part["$ref"]]) not in self._ending:
            return False
        if not all(map(self.of, _listed(part, "allOf"))):
            return False
        for name in ("anyOf", "oneOf"):
            if (branches := _listed(part, name)) and not any(map(self.of, branches)):
                return False
        return all(map(self.of, _needed(part)))


def _refers(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("$ref"), str)


def _listed(part: dict[str, Any], name: str) -> list[Any]:
    found = part.get(name)
    return found if isinstance(found, list) else []


def _needed(part: dict[str, Any]) -> Iterator[Any]:
    """The schemas of what every value of an object or an array has in it; no work is done for those not asked for."""
    least = part.get("minItems", 0)
    if part.get("type") == "object" and isinstance(part.get("properties"), dict):
        named = part["properties"]
        yield from (named.get(name) if isinstance(name, str) else None for name in _listed(part, "required"))
    elif part.get("type") == "array" and isinstance(least, int):
        first = _listed(part, "prefixItems")
        yield from islice(first, min(max(least, 0), len(first)))
        if least > len(first):
            yield part.get("items")


def _reached(root: Any) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every part that a value or a part of one may be held to, each once, and how it is reached."""
    seen: set[int] = set()
    waiting: list[tuple[Path, Any]] = [((), root)]
    while waiting:
        path, part = waiting.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        yield path, part
        inner = [((path, step), child) for step, child in parts_of(part) if not step.startswith(_NOT_ENTERED)]
        waiting += inner[::-1]
        if _refers(part):
            waiting.append((path, pointed(root, part["$ref"])))
