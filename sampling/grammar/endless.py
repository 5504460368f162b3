"""Schemas that refer to themselves so that no value can end: an answer would go on for ever, or nowhere.

A list whose `next` may be null or left out ends; one whose `next` is required, and is such a list again, does not. What
else a schema says may rule values out too; here only references are followed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sampling.grammar.errors import GrammarError
from sampling.grammar.schema_place import parts_of

MOST_LOOKS = 50_000
"""Parts looked at; a schema that takes more is let pass."""
_WHY = "refers to itself so that no value can end; allow something else beside it, or let it be left out"
_NOT_ENTERED = (".$defs.", ".definitions.", ".not", ".if")


def check_ends(schema: Any) -> None:
    """Raises GrammarError, naming the first place where a value could begin that never ends."""
    try:
        ends = _Ends(schema)
        for place, part in _reached(schema):
            if ends.looks > MOST_LOOKS:
                return
            if not ends.of(part):
                raise GrammarError(_WHY, place)
    except RecursionError:
        raise GrammarError("the schema is nested too deeply") from None


class _Ends:
    """Which references lead to something that has a value which ends: a least fixed point."""

    def __init__(self, root: Any) -> None:
        self.looks = 0
        self._targets = {part["$ref"]: _pointed(root, part["$ref"]) for _, part in _reached(root) if _refers(part)}
        self._ending: set[str] = set()
        while self.looks <= MOST_LOOKS:
            open_ones = ((name, target) for name, target in self._targets.items() if name not in self._ending)
            found = {name for name, target in open_ones if self.of(target)}
            if not found:
                break
            self._ending |= found

    def of(self, part: Any) -> bool:
        """Whether a value of it may end, by what is known so far."""
        self.looks += 1
        if not isinstance(part, dict) or "const" in part or "enum" in part:
            return True
        if _refers(part) and part["$ref"] not in self._ending:
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


def _needed(part: dict[str, Any]) -> list[Any]:
    """The schemas of what every value of an object or an array has in it."""
    if part.get("type") == "object" and isinstance(part.get("properties"), dict):
        return [part["properties"].get(name) for name in _listed(part, "required") if isinstance(name, str)]
    least = part.get("minItems", 0)
    if part.get("type") == "array" and isinstance(least, int):
        first = _listed(part, "prefixItems")
        return first[:least] if least <= len(first) else [*first, part.get("items")]
    return []


def _pointed(root: Any, reference: str) -> Any:
    """What a reference inside the schema means; None, which ends, for others."""
    if not reference.startswith("#"):
        return None
    found = root
    for step in reference[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = dict(zip(map(str, range(len(found))), found, strict=True))
        found = found.get(name) if isinstance(found, dict) else None
    return found if reference == "#" or reference.startswith("#/") else None


def _reached(root: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every part that a value or a part of one may be held to, each once, and how it is reached."""
    seen: set[int] = set()
    waiting = [("", root)]
    while waiting:
        place, part = waiting.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        yield place, part
        inner = [(place + step, child) for step, child in parts_of(part) if not step.startswith(_NOT_ENTERED)]
        waiting += inner[::-1]
        if _refers(part):
            waiting.append((place, _pointed(root, part["$ref"])))
