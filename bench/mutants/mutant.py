"""What a mutant is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One wrong change."""

    file: str
    snippet: str
    """occurs exactly once in the file"""
    replacement: str
    effect: str
    """what it does to a user"""
    tests: tuple[str, ...]
    """expected to see it, files or single tests, the quickest first"""
    in_ci: bool = False

    @property
    def name(self) -> str:
        """For `--only` and the table."""
        return f"{self.file.removesuffix('.py')}: {self.effect}"


Change = tuple[str, str, str] | tuple[str, str, str, str]
"""Snippet, replacement, effect, and the single test that is known to see it if one is."""


def of(file: str, tests: Iterable[str], changes: Iterable[Change], ci: Iterable[int] = ()) -> list[Mutant]:
    """Mutants of one file, each with a test of its own before `tests`; `ci`: which of them CI runs."""
    chosen, tests = set(ci), tuple(tests)
    return [
        Mutant(file, snippet, replacement, effect, (*own, *tests), number in chosen)
        for number, (snippet, replacement, effect, *own) in enumerate(changes)
    ]
