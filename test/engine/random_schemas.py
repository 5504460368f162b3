"""Random JSON schemas from a seed, both supported and unsupported."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]
DEPTH = 3
UNSUPPORTED = 0.04
"""Share of parts with an unsupported keyword."""
_WORDS = ("alpha", "beta", "gamma", "né", "a b", 'q"uote', "back\\slash", "日本", "x", "")
_PATTERNS = ("^[a-z]{2,5}$", "^(foo|bar)+$", "[0-9]", "^\\d{3}-\\d{2}$", "^[^a]*$", "z$")
_FORMATS = ("date", "time", "date-time", "email", "ipv4", "uuid", "uri", "hostname")


def random_schema(draw: random.Random) -> Schema:
    """A schema with definitions that may refer to each other."""
    names = [f"d{i}" for i in range(draw.choice((0, 0, 1, 2)))]
    schema = _part(draw, DEPTH, names)
    if names:
        schema["$defs"] = {name: _part(draw, DEPTH - 1, names) for name in names}
    return schema


def _part(draw: random.Random, depth: int, names: list[str]) -> Schema:
    leaves = [_string, _string, _integer, _number, _enum, _const, _simple]
    if depth == 0:
        return draw.choice(leaves)(draw)
    kinds = [_object, _object, _array, _union]
    if names and depth < DEPTH:
        kinds.append(_reference)
    made = draw.choice(kinds)(draw, depth, names) if draw.random() < 0.7 else draw.choice(leaves)(draw)
    if draw.random() < UNSUPPORTED:
        unserved: tuple[Schema, ...] = (
            {"not": {"type": "null"}},
            {"if": {"type": "string"}, "then": {"minLength": 1}},
            {"uniqueItems": True},
            {"contains": {"type": "integer"}},
            {"dependentRequired": {"a": ["b"]}},
            {"propertyNames": {"maxLength": 3}},
        )
        made |= draw.choice(unserved)
    return made


def _simple(draw: random.Random) -> Schema:
    return draw.choice(({"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"]}, {"type": "boolean"}))


def _string(draw: random.Random) -> Schema:
    schema: Schema = {"type": "string"}
    kind = draw.randrange(5)
    if kind == 0:
        least = draw.randrange(4)
        schema |= {"minLength": least, "maxLength": least + draw.randrange(8)}
    elif kind == 1:
        schema["pattern"] = draw.choice(_PATTERNS)
    elif kind == 2:
        schema["format"] = draw.choice(_FORMATS)
    elif kind == 3:
        schema["maxLength"] = draw.randrange(12)
    return schema


def _integer(draw: random.Random) -> Schema:
    schema: Schema = {"type": "integer"}
    low = draw.randrange(-1000, 1000)
    if draw.random() < 0.5:
        schema[draw.choice(("minimum", "exclusiveMinimum"))] = low
    if draw.random() < 0.6:
        schema[draw.choice(("maximum", "exclusiveMaximum"))] = low + draw.randrange(2, 500)
    if draw.random() < 0.2:
        schema["multipleOf"] = draw.choice((1, 2, 5, 10))
    return schema


def _number(draw: random.Random) -> Schema:
    low = draw.choice((-2.5, 0, 0.125, 3))
    return draw.choice(({"type": "number"}, {"type": "number", "minimum": low, "maximum": low + 10.75}))


def _enum(draw: random.Random) -> Schema:
    values = [draw.choice((draw.choice(_WORDS), draw.randrange(-9, 99), None, True, 1.5)) for _ in range(3)]
    return {"enum": [value for at, value in enumerate(values) if value not in values[:at]]}


def _const(draw: random.Random) -> Schema:
    return {"const": draw.choice((draw.choice(_WORDS), 7, None, False, {"a": [1, "b"]}, []))}


def _object(draw: random.Random, depth: int, names: list[str]) -> Schema:
    keys = draw.sample([word for word in _WORDS if word], draw.randrange(4))
    schema: Schema = {"type": "object", "properties": {key: _part(draw, depth - 1, names) for key in keys}}
    schema["required"] = [key for key in keys if draw.random() < 0.6]
    rest = draw.randrange(4)
    if rest < 2:
        schema["additionalProperties"] = False
    elif rest == 2:
        schema["additionalProperties"] = _part(draw, 0, names)
    if draw.random() < 0.15:
        schema["minProperties"] = draw.randrange(3)
    if draw.random() < 0.15:
        schema["maxProperties"] = draw.randrange(1, 5)
    if draw.random() < 0.1:
        schema["patternProperties"] = {"^x-": _part(draw, 0, names)}
    return schema


def _array(draw: random.Random, depth: int, names: list[str]) -> Schema:
    schema: Schema = {"type": "array", "items": _part(draw, depth - 1, names)}
    if draw.random() < 0.3:
        schema["prefixItems"] = [_part(draw, 0, names) for _ in range(draw.randrange(1, 3))]
    if draw.random() < 0.4:
        schema["minItems"] = draw.randrange(3)
    if draw.random() < 0.7:
        schema["maxItems"] = schema.get("minItems", 0) + draw.randrange(3)
    return schema


def _union(draw: random.Random, depth: int, names: list[str]) -> Schema:
    parts = [_part(draw, depth - 1, names) for _ in range(draw.randrange(1, 4))]
    return {draw.choice(("anyOf", "anyOf", "oneOf", "allOf")): parts}


def _reference(draw: random.Random, depth: int, names: list[str]) -> Schema:
    return {"$ref": f"#/$defs/{draw.choice(names)}"}
