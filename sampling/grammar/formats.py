"""What formats forbid and llguidance's expressions for them allow, said as patterns beside them."""

from __future__ import annotations

from typing import Any

from sampling.grammar.schema_place import parts_of

PATTERNS = {
    "time": r"^[0-9]{2}:[0-9]{2}:[0-5]",
    "date-time": r"^[^:]{13}:[0-9]{2}:[0-5]",
    "email": r"^[^@]{1,64}@",
}
"""Leap seconds are there once in years; a mailbox has 64 bytes at most."""


def narrow_formats(schema: Any) -> None:
    """Add these patterns to a schema and all schemas in it, in place."""
    if not isinstance(schema, dict):
        return
    given = schema.get("format")
    pattern = PATTERNS.get(given) if isinstance(given, str) else None
    if pattern is not None:
        if "pattern" not in schema:
            schema["pattern"] = pattern
        elif isinstance(schema.setdefault("allOf", []), list):
            schema["allOf"].append({"pattern": pattern})
    for _, part in parts_of(schema):
        narrow_formats(part)
