"""Constraints on a row's text. Plain data without llguidance, so HTTP workers may import it."""

from __future__ import annotations

import enum

import msgspec

MAX_SOURCE_CHARACTERS = 131_072
"""Limit for a grammar, a regular expression, a schema, or all choices together."""
MAX_CHOICES = 1024


class Form(enum.StrEnum):
    LARK = "grammar"
    """Lark as llguidance reads it; the first rule is `start`."""
    REGEX = "regex"
    """Rust's syntax; must match the whole text."""
    CHOICE = "choice"
    JSON_SCHEMA = "json_schema"
    """A JSON value that is valid under a schema."""


class SchemaRule(msgspec.Struct, frozen=True, kw_only=True):
    """A rule of a Lark grammar: a JSON value that is valid under a schema."""

    name: str
    source: str
    """as JSON text"""
    field: str = ""
    """the client's name of the schema, for error messages"""
    strict: bool = True
    """see Constraint"""


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """A pattern that a row's whole text must match; the engine enforces it with token masks."""

    form: Form
    source: str
    """Lark, a regular expression, or JSON text: the schema or the array of choices"""
    field: str = ""
    """the client's name of it, for error messages: `response_format.json_schema.schema`"""
    strict: bool = True
    """False: parts of a schema that cannot be enforced are ignored instead of refused"""
    rules: tuple[SchemaRule, ...] = ()
    """of a Lark grammar"""
    after: str = ""
    """Text that precedes the constrained part, after any other text: the end of the reasoning"""

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for constraints that compile to the same grammar and name the same fields."""
        return self.form, self.source, self.strict, self.after, self.rules

    @property
    def size(self) -> int:
        """Characters of all sources."""
        return len(self.source) + sum(len(rule.source) for rule in self.rules)
