"""Writes a function's JSON Schema as one line: `f(a: string, b?: "x" | "y")`."""

from __future__ import annotations

import json
from typing import Any

_MAX_PARTS = 2000
"""Per signature. References can expand a small schema into a large text."""
_MAX_DEPTH = 8
_REFERENCES = ("#/$defs/", "#/definitions/")


def signature(name: str, description: str, parameters: dict[str, Any]) -> str:
    """Return one line of the tool list, with descriptions as comments."""
    line = f"{name}({_Signature(parameters).parameters()})"
    return f"{line} // {_one_line(description)}" if description.strip() else line


class _Signature:
    """Writes one schema. Parts that are too deep or too long become `object`."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._parts_left = _MAX_PARTS

    def parameters(self) -> str:
        """Return the text between the parentheses."""
        return self._properties(self._resolved(self._root), 0)

    def _properties(self, schema: dict[str, Any], depth: int) -> str:
        properties = schema.get("properties")
        required = schema.get("required")
        parts = []
        for name, part in properties.items() if isinstance(properties, dict) else ():
            mark = "" if isinstance(required, list) and name in required else "?"
            about = part.get("description") if isinstance(part, dict) else None
            comment = f" /* {_one_line(about)} */" if isinstance(about, str) and about.strip() else ""
            parts.append(f"{name}{mark}: {self._type(part, depth + 1)}{comment}")
        return ", ".join(parts)

    def _type(self, schema: Any, depth: int) -> str:
        self._parts_left -= 1
        if not isinstance(schema, dict):
            return "any"
        if depth > _MAX_DEPTH or self._parts_left < 0:
            return "object"
        schema = self._resolved(schema)
        if "const" in schema:
            return _literal(schema["const"])
        if isinstance(schema.get("enum"), list):
            return self._union([_literal(value) for value in schema["enum"]])
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(schema.get(key), list):
                return self._union([self._type(part, depth + 1) for part in schema[key]])
        kind = schema.get("type", "object" if "properties" in schema else "any")
        kinds = kind if isinstance(kind, list) else [kind]
        return self._union([self._plain(str(one), schema, depth) for one in kinds])

    def _plain(self, kind: str, schema: dict[str, Any], depth: int) -> str:
        if kind == "array":
            item = self._type(schema.get("items"), depth + 1)
            return f"({item})[]" if " | " in item else f"{item}[]"
        if kind == "object" and isinstance(schema.get("properties"), dict):
            return f"{{{self._properties(schema, depth)}}}"
        return kind

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return the target of a schema's $ref. Returns the schema itself without a valid one."""
        reference = schema.get("$ref")
        for start in _REFERENCES:
            if isinstance(reference, str) and reference.startswith(start):
                shared = self._root.get(start.split("/")[1])
                found = shared.get(reference.removeprefix(start)) if isinstance(shared, dict) else None
                return found if isinstance(found, dict) else schema
        return schema

    @staticmethod
    def _union(types: list[str]) -> str:
        return " | ".join(dict.fromkeys(types)) or "any"


def _literal(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _one_line(text: str) -> str:
    return " ".join(text.split())
