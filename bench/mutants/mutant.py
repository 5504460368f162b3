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
    """expected to see it, the quickest first"""
    in_ci: bool = False

    @property
    def name(self) -> str:
        """For `--only` and the table."""
        return f"{self.file.removesuffix('.py')}: {self.effect}"


Change = tuple[str, str, str]


def of(file: str, tests: Iterable[str], changes: Iterable[Change], ci: Iterable[int] = ()) -> list[Mutant]:
    """Mutants of one file: (snippet, replacement, effect) each; `ci`: which of them CI runs."""
    chosen, tests = set(ci), tuple(tests)
    return [Mutant(file, *change, tests, number in chosen) for number, change in enumerate(changes)]
