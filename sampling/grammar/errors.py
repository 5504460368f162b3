"""Errors of grammars, and the wording of llguidance's messages."""

from __future__ import annotations

import re

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
