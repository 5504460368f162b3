"""What can go wrong with a grammar, and what of it is the client's."""

from __future__ import annotations

import re

_OPTION = re.compile(r"oneOf constraints are not supported\. Enable 'coerce_one_of' option[^\n]*")

MAX_MESSAGE = 300
"""Characters of a refusal: llguidance repeats what it was given."""


class GrammarError(Exception):
    """A grammar that cannot be served or followed any further; the message says why."""

    def __init__(self, message: str, place: str = "", field: str = "") -> None:
        super().__init__(message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}...")
        self.field = field
        """which of several schemas, as the client calls it; "": there is one"""
        self.place = place
        """where in a schema, as in `.properties.age`; "": the whole"""


class TooComplexError(GrammarError):
    """What may follow is too much to be kept account of."""

    def __init__(self, why: str) -> None:
        super().__init__(f"takes too much to follow: {why}")


class NoTokenLeftError(GrammarError):
    """A token was drawn that the grammar does not allow: those that it allows had no chance to be drawn."""


def exceeds_limit(why: str) -> bool:
    """Whether what llguidance says is that one of its limits (compiler.py) was passed."""
    return "(limit " in why


def in_one_line(error: str) -> str:
    """What llguidance says first, and what is wrong with a regular expression; the rest is its inner state."""
    error = _OPTION.sub("more than one branch of oneOf may match; write anyOf", error)
    first, *others = error.strip().split("\n")
    why = (line.removeprefix("error: ") for line in others if line.startswith("error: "))
    return " ".join([first, *why])
