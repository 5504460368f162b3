"""Finds the part of a schema that cannot be compiled."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

MAX_VISITS = 200
"""Each part takes a fraction of a millisecond."""
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SHARED = (".$defs.", ".definitions.")
_SINGLE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")
_WHOLE = "#/$defs/whole"
Path = tuple[Any, ...]
"""() or (path of the parent, step). Paths are joined to text only when an error is reported."""
_INDEX = re.compile(r"0|[1-9][0-9]{0,9}")


def locate_error(schema: Any, error_of: Callable[[Any], str]) -> str:
    """Return the deepest part with an error of its own.

    Returns its path, as in `.properties.age`. "" is the schema itself. `error_of` returns the error of a schema, "" if
    there is none. A part that only refers to a bad part is not reported. Prefers a part with the same error as the
    whole schema; else takes a part with any error.
    """
    if not isinstance(schema, dict):
        return ""
    why, visits = error_of(schema), iter(range(MAX_VISITS))
    same_error = _locate_any(schema, lambda part: error_of(part).replace(_WHOLE[1:], "") == why, visits)
    return same_error or _locate_any(schema, lambda part: bool(error_of(part)), visits)


def _locate_any(schema: dict[str, Any], error_of: Callable[[Any], bool], visits: Iterator[int]) -> str:
    draft = {name: schema[name] for name in ("$schema",) if name in schema}
    without_refs = _map_refs(
        schema, lambda reference: None if resolve_ref(schema, reference) is not None else reference
    )
    for pointer in references(schema):
        part = resolve_ref(without_refs, pointer)
        if isinstance(part, dict) and next(visits, None) is not None and error_of({**part, **draft}):
            return _deepest(_place(schema, pointer), part, lambda one: error_of({**one, **draft}), visits)
    # No target is bad by itself: look for the error with the references in place.
    whole = _map_refs(schema, lambda reference: reference.replace("#", _WHOLE, 1))
    definitions = {**draft, "$defs": {"whole": {name: whole[name] for name in whole if name not in ("$schema", "$id")}}}
    return _deepest("", whole, lambda one: error_of({**one, **definitions}), visits)


def _deepest(place: str, part: Any, error_of: Callable[[Any], bool], visits: Iterator[int]) -> str:
    """Return the place of the deepest bad part inside `part`."""
    inner = _own_subschemas(part)
    while (found := next(inner, None)) is not None and next(visits, None) is not None:
        step, child = found
        if isinstance(child, dict) and error_of(child):
            place, inner = place + step, _own_subschemas(child)
    return place


def _own_subschemas(part: Any) -> Iterator[tuple[str, Any]]:
    """Yield the subschemas except shared definitions."""
    return (found for found in subschemas(part) if not found[0].startswith(_SHARED))


def _map_refs(schema: Any, to: Callable[[str], str | None]) -> Any:
    """Return a copy with mapped references; None removes a reference."""

    def replace(part: dict[str, Any]) -> dict[str, Any]:
        reference = part.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            moved = to(part.pop("$ref"))
            return part if moved is None else {**part, "$ref": moved}
        return part

    return json.loads(json.dumps(schema), object_hook=replace)


def references(schema: Any) -> Iterator[str]:
    """Yield "#" and each pointer reachable from it by references, once."""
    seen, waiting = {"#"}, ["#"]
    while waiting:
        pointer = waiting.pop(0)
        yield pointer
        parts = [resolve_ref(schema, pointer)]
        while parts:
            part = parts.pop()
            found = part.get("$ref") if isinstance(part, dict) else None
            if isinstance(found, str) and found.startswith("#") and found not in seen:
                seen.add(found)
                waiting.append(found)
            parts += [child for _, child in _own_subschemas(part)][::-1]


def resolve_ref(root: Any, reference: str) -> Any:
    """Resolve a reference within a schema. None for any other reference."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    found = root
    for name in _names(reference):
        found = _step_into(found, name)
    return found


def _place(root: Any, reference: str) -> str:
    """Convert a reference to a place, as in `.properties.age`."""
    found, place = root, ""
    for name in _names(reference):
        place += f"[{name}]" if isinstance(found, list) else f".{name}"
        found = _step_into(found, name)
    return place


def _names(reference: str) -> list[str]:
    return [step.replace("~1", "/").replace("~0", "~") for step in reference.split("/")[1:]]


def _step_into(value: Any, name: str) -> Any:
    if isinstance(value, list):
        return value[int(name)] if _INDEX.fullmatch(name) and int(name) < len(value) else None
    return value.get(name) if isinstance(value, dict) else None


def schema_at(schema: str, place: str) -> str:
    """Return the schema's part at a place. The whole schema if the part cannot be read."""
    try:
        return json.dumps(_value_at(json.loads(schema), place))
    except (ValueError, RecursionError):
        return schema


def _value_at(root: Any, place: str) -> Any:
    waiting = [(root, place)]
    while waiting:
        value, rest = waiting.pop()
        if not rest:
            return value
        steps = ((f".{name}", part) for name, part in value.items()) if isinstance(value, dict) else ()
        if isinstance(value, list):
            steps = ((f"[{index}]", part) for index, part in enumerate(value))
        waiting += [(part, rest[len(step) :]) for step, part in steps if rest.startswith(step)]
    return None


def join_path(path: Path) -> str:
    """Return a path as a place, as in `.properties.age`."""
    steps = []
    while path:
        path, step = path
        steps.append(step)
    return "".join(reversed(steps))


def subschemas(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield the schemas one level inside a schema, with their steps."""
    if not isinstance(schema, dict):
        return
    for name in _BY_NAME:
        for key, part in schema[name].items() if isinstance(schema.get(name), dict) else ():
            yield f".{name}.{key}", part
    for name in _LISTS:
        for index, part in enumerate(schema[name] if isinstance(schema.get(name), list) else ()):
            yield f".{name}[{index}]", part
    for name in _SINGLE:
        if isinstance(schema.get(name), dict):
            yield f".{name}", schema[name]
