"""Where in a schema the part lies that cannot be served."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

MOST_LOOKS = 200
"""Parts that are compiled to find the place; each takes a fraction of a millisecond."""
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")
_SHARED = ("$defs", "definitions")


def place_of_fault(schema: Any, fault: Callable[[Any], str]) -> str:
    """The deepest part that has a fault of its own, as in `.properties.age`; "": the schema itself.

    `fault` says why a schema cannot be served, "" if it can.
    """
    shared = {name: schema[name] for name in _SHARED if isinstance(schema, dict) and name in schema}
    place, part, looks = "", schema, 0
    while True:
        for step, child in parts_of(part):
            looks += 1
            if looks > MOST_LOOKS:
                return place
            if isinstance(child, dict) and fault({**shared, **child}):
                place, part = place + step, child
                break
        else:
            return place


def parts_of(schema: Any) -> Iterator[tuple[str, Any]]:
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
