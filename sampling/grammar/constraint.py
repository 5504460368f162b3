"""Constraints on a row's text. Plain data without llguidance, so HTTP workers may import it."""

from __future__ import annotations

import enum
import re

import msgspec

MAX_SOURCE_CHARACTERS = 131_072
"""Limit for a grammar, a regular expression, a schema, or all choices together."""
MAX_CHOICES = 1024
EARLY_ENDS = (0, 261)
"""Tokens that end a translation: the end of the text and a blank line, ids of the World tokenizer.

If one is sampled before a `RequiredText` is complete, the model reads a part of what is missing instead.
"""
UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\U00020000-\U0003ffff"
"""Characters of scripts whose words have no spaces between them: Thai, Lao, Burmese, Khmer, Japanese, Chinese, Korean.

Korean has spaces, but its words are followed by particles.
"""
RESERVE = 4
"""A `RequiredText` is completed when its row has only so many more tokens left than that needs."""
THINK_END = "</think>"
"""End of a thought. A constraint may apply to the text after it."""


class Form(enum.StrEnum):
    LARK = "grammar"
    """Lark as llguidance reads it; the first rule is `start`."""
    REGEX = "regex"
    """Rust's syntax; must match the whole text."""
    CHOICE = "choice"
    JSON_SCHEMA = "json_schema"
    """A JSON value that is valid under a schema."""
    REQUIRED_TEXT = "required_text"
    """A `RequiredText` as JSON. Only the service's own routes make it."""


class RequiredText(msgspec.Struct, frozen=True, kw_only=True):
    """Markers that a text needs once, and words it needs."""

    markers: tuple[str, ...] = ()
    """None is the beginning of another. Equal ones are needed as often as they are here."""
    partners: tuple[int, ...] = ()
    """Per marker the index of its closing or opening tag, or -1. These pairs nest."""
    ordered: tuple[int, ...] = ()
    """Indices of markers that keep their order."""
    leads: str = ""
    """ASCII characters that begin markers. No other text has them."""
    words: tuple[tuple[tuple[str, ...], int], ...] = ()
    """Forms of a word, one of which is needed, and how often. Whole words, in any case."""
    ends: tuple[str, ...] = ()
    """Strings that end the text."""


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
    thought_tokens: int | None = None
    """maximum tokens of the reasoning, after which THINK_END is forced; None: no limit"""

    @property
    def key(self) -> tuple[object, ...]:
        """A key that is equal for equal constraints.

        Equal for constraints that compile to the same grammar and name the same fields.
        """
        return self.form, self.source, self.strict, self.after, self.rules

    @property
    def size(self) -> int:
        """Characters of all sources."""
        return len(self.source) + sum(len(rule.source) for rule in self.rules)


_OPTION = re.compile(r"oneOf constraints are not supported\. Enable 'coerce_one_of' option[^\n]*")

MAX_MESSAGE = 300
"""llguidance repeats its input."""


class GrammarError(Exception):
    """A grammar that cannot be compiled or matched any further; the message says why."""

    def __init__(self, message: str, place: str = "", field: str = "") -> None:
        super().__init__(message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}...")
        self.field = field
        """if there are several schemas"""
        self.place = place
        """place in a schema, as in `.properties.age`; "": the whole"""


class TooComplexError(GrammarError):
    """The continuations of the text exceed a limit of the matcher."""

    def __init__(self, why: str) -> None:
        super().__init__(f"takes too much to follow: {why}")


class NoTokenLeftError(GrammarError):
    """A sampled token violates the grammar: no allowed token had a chance."""


def exceeds_limit(why: str) -> bool:
    """See compiler.py."""
    return "(limit " in why


def in_one_line(error: str) -> str:
    """Return the first line and any regular-expression errors; the rest is llguidance's state."""
    error = _OPTION.sub("more than one branch of oneOf may match; write anyOf", error)
    first, *others = error.strip().split("\n")
    why = (line.removeprefix("error: ") for line in others if line.startswith("error: "))
    return " ".join([first, *why])
