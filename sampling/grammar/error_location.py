"""Where in a schema the part lies that cannot be served."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

MAX_VISITS = 200
"""Parts that are compiled to find the place; each takes a fraction of a millisecond."""
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SHARED = (".$defs.", ".definitions.")
_SINGLE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")
_WHOLE = "#/$defs/whole"
Path = tuple[Any, ...]
"""() or (path of the part around it, step): texts are joined for the one place that is told."""
_INDEX = re.compile(r"0|[1-9][0-9]{0,9}")


def locate_error(schema: Any, error_of: Callable[[Any], str]) -> str:
    """The deepest part that has a fault of its own, as in `.properties.age`; "": the schema itself.

    `error_of` says why a schema cannot be served, "" if it can. A part that refers to what has the fault has none itself.
    Of several faults it is the schema's own: alone, a part may have others, and where none has this one, they tell.
    """
    if not isinstance(schema, dict):
        return ""
    why, visits = error_of(schema), iter(range(MAX_VISITS))
    same = _locate_any(schema, lambda part: error_of(part).replace(_WHOLE[1:], "") == why, visits)
    return same or _locate_any(schema, lambda part: bool(error_of(part)), visits)


def _locate_any(schema: dict[str, Any], error_of: Callable[[Any], bool], visits: Iterator[int]) -> str:
    draft = {name: schema[name] for name in ("$schema",) if name in schema}
    apart = _map_refs(schema, lambda reference: None if resolve_ref(schema, reference) is not None else reference)
    for pointer in references(schema):
        part = resolve_ref(apart, pointer)
        if isinstance(part, dict) and next(visits, None) is not None and error_of({**part, **draft}):
            return _deepest(_place(schema, pointer), part, lambda one: error_of({**one, **draft}), visits)
    # The references themselves are what cannot be served.
    whole = _map_refs(schema, lambda reference: reference.replace("#", _WHOLE, 1))
    definitions = {**draft, "$defs": {"whole": {name: whole[name] for name in whole if name not in ("$schema", "$id")}}}
    return _deepest("", whole, lambda one: error_of({**one, **definitions}), visits)


def _deepest(place: str, part: Any, error_of: Callable[[Any], bool], visits: Iterator[int]) -> str:
    """The place of the deepest part inside one, at this place, that has a fault, as far as one may look."""
    inner = _own_subschemas(part)
    while (found := next(inner, None)) is not None and next(visits, None) is not None:
        step, child = found
        if isinstance(child, dict) and error_of(child):
            place, inner = place + step, _own_subschemas(child)
    return place


def _own_subschemas(part: Any) -> Iterator[tuple[str, Any]]:
    """Its parts without those that others refer to."""
    return (found for found in subschemas(part) if not found[0].startswith(_SHARED))


def _map_refs(schema: Any, to: Callable[[str], str | None]) -> Any:
    """A copy with other references inside it; None: without."""

    def changed(part: dict[str, Any]) -> dict[str, Any]:
        reference = part.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            moved = to(part.pop("$ref"))
            return part if moved is None else {**part, "$ref": moved}
        return part

    return json.loads(json.dumps(schema), object_hook=changed)


def references(schema: Any) -> Iterator[str]:
    """What a value of it may be held to: the schema, "#", and what it refers to, each pointer once."""
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
    """What a reference inside a schema means; None for others."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    found = root
    for name in _names(reference):
        found = _step_into(found, name)
    return found


def _place(root: Any, reference: str) -> str:
    """A reference inside a schema as places are told."""
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
    """What a schema says at a place, as places are told; all of it where it cannot be read."""
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
    """A path as places are told."""
    steps = []
    while path:
        path, step = path
        steps.append(step)
    return "".join(reversed(steps))


def subschemas(schema: Any) -> Iterator[tuple[str, Any]]:
    """The schemas inside a schema, one level down, and how each is reached."""
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
