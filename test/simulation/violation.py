"""The exception for a violated invariant."""

from __future__ import annotations


class Violation(BaseException):
    """A violated invariant. The product's handlers must not catch it."""


def demand(holds: object, message: str) -> None:
    """Raises Violation unless `holds`."""
    if not holds:
        raise Violation(message)
