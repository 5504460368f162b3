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


def random_schema(rng: random.Random) -> Schema:
    """A schema with definitions that may refer to each other."""
    names = [f"d{i}" for i in range(rng.choice((0, 0, 1, 2)))]
    schema = _part(rng, DEPTH, names)
    if names:
        schema["$defs"] = {name: _part(rng, DEPTH - 1, names) for name in names}
    return schema


def _part(rng: random.Random, depth: int, names: list[str]) -> Schema:
    leaves = [_string, _string, _integer, _number, _enum, _const, _simple]
    if depth == 0:
        return rng.choice(leaves)(rng)
    kinds = [_object, _object, _array, _union]
    if names and depth < DEPTH:
        kinds.append(_reference)
    made = rng.choice(kinds)(rng, depth, names) if rng.random() < 0.7 else rng.choice(leaves)(rng)
    if rng.random() < UNSUPPORTED:
        unserved: tuple[Schema, ...] = (
            {"not": {"type": "null"}},
            {"if": {"type": "string"}, "then": {"minLength": 1}},
            {"uniqueItems": True},
            {"contains": {"type": "integer"}},
            {"dependentRequired": {"a": ["b"]}},
            {"propertyNames": {"maxLength": 3}},
        )
        made |= rng.choice(unserved)
    return made


def _simple(rng: random.Random) -> Schema:
    return rng.choice(({"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"]}, {"type": "boolean"}))


def _string(rng: random.Random) -> Schema:
    schema: Schema = {"type": "string"}
    kind = rng.randrange(5)
    if kind == 0:
        minimum = rng.randrange(4)
        schema |= {"minLength": minimum, "maxLength": minimum + rng.randrange(8)}
    elif kind == 1:
        schema["pattern"] = rng.choice(_PATTERNS)
    elif kind == 2:
        schema["format"] = rng.choice(_FORMATS)
    elif kind == 3:
        schema["maxLength"] = rng.randrange(12)
    return schema


def _integer(rng: random.Random) -> Schema:
    schema: Schema = {"type": "integer"}
    low = rng.randrange(-1000, 1000)
    if rng.random() < 0.5:
        schema[rng.choice(("minimum", "exclusiveMinimum"))] = low
    if rng.random() < 0.6:
        schema[rng.choice(("maximum", "exclusiveMaximum"))] = low + rng.randrange(2, 500)
    if rng.random() < 0.2:
        schema["multipleOf"] = rng.choice((1, 2, 5, 10))
    return schema


def _number(rng: random.Random) -> Schema:
    low = rng.choice((-2.5, 0, 0.125, 3))
    return rng.choice(({"type": "number"}, {"type": "number", "minimum": low, "maximum": low + 10.75}))


def _enum(rng: random.Random) -> Schema:
    values = [rng.choice((rng.choice(_WORDS), rng.randrange(-9, 99), None, True, 1.5)) for _ in range(3)]
    return {"enum": [value for i, value in enumerate(values) if value not in values[:i]]}


def _const(rng: random.Random) -> Schema:
    return {"const": rng.choice((rng.choice(_WORDS), 7, None, False, {"a": [1, "b"]}, []))}


def _object(rng: random.Random, depth: int, names: list[str]) -> Schema:
    keys = rng.sample([word for word in _WORDS if word], rng.randrange(4))
    schema: Schema = {"type": "object", "properties": {key: _part(rng, depth - 1, names) for key in keys}}
    schema["required"] = [key for key in keys if rng.random() < 0.6]
    rest = rng.randrange(4)
    if rest < 2:
        schema["additionalProperties"] = False
    elif rest == 2:
        schema["additionalProperties"] = _part(rng, 0, names)
    if rng.random() < 0.15:
        schema["minProperties"] = rng.randrange(3)
    if rng.random() < 0.15:
        schema["maxProperties"] = rng.randrange(1, 5)
    if rng.random() < 0.1:
        schema["patternProperties"] = {"^x-": _part(rng, 0, names)}
    return schema


def _array(rng: random.Random, depth: int, names: list[str]) -> Schema:
    schema: Schema = {"type": "array", "items": _part(rng, depth - 1, names)}
    if rng.random() < 0.3:
        schema["prefixItems"] = [_part(rng, 0, names) for _ in range(rng.randrange(1, 3))]
    if rng.random() < 0.4:
        schema["minItems"] = rng.randrange(3)
    if rng.random() < 0.7:
        schema["maxItems"] = schema.get("minItems", 0) + rng.randrange(3)
    return schema


def _union(rng: random.Random, depth: int, names: list[str]) -> Schema:
    parts = [_part(rng, depth - 1, names) for _ in range(rng.randrange(1, 4))]
    return {rng.choice(("anyOf", "anyOf", "oneOf", "allOf")): parts}


def _reference(rng: random.Random, depth: int, names: list[str]) -> Schema:
    return {"$ref": f"#/$defs/{rng.choice(names)}"}
