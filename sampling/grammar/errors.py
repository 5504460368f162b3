"""What can go wrong with a grammar, and what of it is the client's."""

from __future__ import annotations


class GrammarError(Exception):
    """A grammar that cannot be served or followed any further; the message says why."""

    def __init__(self, message: str, place: str = "", field: str = "") -> None:
        super().__init__(message)
        self.field = field
        """which of several schemas, as the client calls it; "": there is one"""
        self.place = place
        """where in a schema, as in `.properties.age`; "": the whole"""


def first_line(error: str) -> str:
    """The first line of what llguidance says; the rest is its inner state."""
    return error.strip().partition("\n")[0]
