"""How a world says that something is wrong."""

from __future__ import annotations


class Violation(BaseException):
    """Something that must never happen has happened; no handler of the product may take it for a failure of its own."""


def demand(holds: object, message: str) -> None:
    """Raises Violation unless it holds."""
    if not holds:
        raise Violation(message)
