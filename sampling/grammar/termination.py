"""Refuses schemas whose references loop so that no value is finite.

A list whose `next` may be null or absent is finite. One whose `next` is required and is the same list never ends.
Only references are followed; other keywords may still rule out all values.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from sampling.grammar.constraint import GrammarError
from sampling.grammar.error_location import Path, join_path, resolve_ref, subschemas

MAX_VISITS = 50_000
"""Parts to visit; larger schemas pass unchecked."""
_WHY = "refers to itself so that no value can end; allow an alternative or make it optional"
_SKIPPED = (".$defs.", ".definitions.", ".not", ".if")


class _TooManyVisitsError(Exception):
    """More than MAX_VISITS parts."""


def check_terminates(schema: Any) -> None:
    """Raises GrammarError with the first place whose values can never end."""
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
        """Return whether `part` has a finite value, by the targets found so far."""
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
    """Yield the schemas that every value of an object or array must contain, lazily."""
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
    """Yield each part that constrains a value or a part of one, once, with its path."""
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
