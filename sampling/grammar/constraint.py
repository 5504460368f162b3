"""What a row's text may be asked to match. Plain data: no llguidance, so HTTP workers may import it."""

from __future__ import annotations

import enum

import msgspec

MAX_SOURCE_CHARACTERS = 131_072
"""Of a grammar, a regular expression, a schema or all choices together."""
MAX_CHOICES = 1024


class Form(enum.StrEnum):
    """How a constraint is written."""

    LARK = "grammar"
    """Lark, as llguidance reads it; its first rule is `start`."""
    REGEX = "regex"
    """Rust's syntax; the whole text matches."""
    CHOICE = "choice"
    """One of some texts."""
    JSON_SCHEMA = "json_schema"
    """A JSON value that is valid under a schema."""


class SchemaRule(msgspec.Struct, frozen=True, kw_only=True):
    """A rule of a Lark grammar: a JSON value that is valid under a schema."""

    name: str
    """by which the grammar calls it"""
    source: str
    """the schema as JSON text"""
    field: str = ""
    """what the client calls the schema, for refusals"""
    strict: bool = True
    """see Constraint"""


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """The whole text of a row matches this; an engine holds rows to it by masks over the vocabulary."""

    form: Form
    source: str
    """Lark, a regular expression, or JSON text: the schema, or the array of choices"""
    field: str = ""
    """what the client calls it, for refusals: `response_format.json_schema.schema`"""
    strict: bool = True
    """False: what a schema asks for and cannot be held to is left out, rather than refused"""
    rules: tuple[SchemaRule, ...] = ()
    """of a Lark grammar, beside those in its source"""
    after: str = ""
    """Text that stands before what is constrained, once, with anything before it: the end of a thought"""

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for constraints that compile to the same grammar, and name the same fields."""
        return self.form, self.source, self.strict, self.after, self.rules

    @property
    def size(self) -> int:
        """Characters of everything that it is made of."""
        return len(self.source) + sum(len(rule.source) for rule in self.rules)
