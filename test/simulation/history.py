"""Histories: the tokens of a row or a session, and their initial state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, SupportsIndex, overload

from rwkv_batch.request import GenerateRequest
from test.simulation.device import fold


@dataclass(frozen=True)
class Beginning:
    """The initial state of a row: its mixture's states or one, and its adapter."""

    bases: tuple[int, ...] = (0,)
    mark: int = 0
    """the adapter's, 0 for none"""

    @property
    def is_mixture(self) -> bool:
        """Whether it has several states."""
        return len(self.bases) > 1


PLAIN = Beginning()


class History(list[int]):
    """Token ids and their initial state."""

    def __init__(self, tokens: Iterable[int] = (), began: Beginning = PLAIN) -> None:
        super().__init__(tokens)
        self.began = began

    @overload
    def __getitem__(self, at: SupportsIndex) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> History: ...
    def __getitem__(self, at: SupportsIndex | slice) -> int | History:
        """Return a part with the same initial state."""
        return History(super().__getitem__(at), self.began) if isinstance(at, slice) else super().__getitem__(at)

    def __add__(self, more: list[Any]) -> History:
        return History([*self, *more], self.began)

    @property
    def states(self) -> tuple[int, ...]:
        """The state of each member after the tokens."""
        return tuple(fold(base, self, self.began.mark) for base in self.began.bases)

    @property
    def stored(self) -> int:
        """The stored state; for a mixture, a hash of its tokens."""
        return fold(0, self, self.began.mark) if self.began.is_mixture else self.states[0]

    def is_like(self, other: History) -> bool:
        """Return whether initial state and tokens are equal."""
        return self == other and self.began == other.began


def shares_of(request: GenerateRequest) -> list[float]:
    """Return the weights of a mixture's members; [1.0] for another row."""
    total = sum(weight for _, weight in request.mixture)
    return [weight / total for _, weight in request.mixture] or [1.0]


def began_of(tokens: list[int]) -> Beginning:
    """Return the tokens' initial state; for a plain list the zero state."""
    return tokens.began if isinstance(tokens, History) else PLAIN
