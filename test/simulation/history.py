"""Histories: the tokens of a row or a session, and what they are read from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, SupportsIndex, overload

from rwkv_batch.request import GenerateRequest
from test.simulation.device import fold


@dataclass(frozen=True)
class Beginning:
    """What a row is read from: the states of its mixture, or one; and under what."""

    bases: tuple[int, ...] = (0,)
    mark: int = 0
    """of the adapter, 0 for none"""

    @property
    def is_mixture(self) -> bool:
        """Whether it has no state of one slot."""
        return len(self.bases) > 1


PLAIN = Beginning()


class History(list[int]):
    """Token ids, and what they are read from."""

    def __init__(self, tokens: Iterable[int] = (), began: Beginning = PLAIN) -> None:
        super().__init__(tokens)
        self.began = began

    @overload
    def __getitem__(self, at: SupportsIndex) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> History: ...
    def __getitem__(self, at: SupportsIndex | slice) -> int | History:
        """A part of it begins alike."""
        return History(super().__getitem__(at), self.began) if isinstance(at, slice) else super().__getitem__(at)

    def __add__(self, more: list[Any]) -> History:
        """It goes on."""
        return History([*self, *more], self.began)

    @property
    def states(self) -> tuple[int, ...]:
        """The states after it, of each member."""
        return tuple(fold(base, self, self.began.mark) for base in self.began.bases)

    @property
    def stored(self) -> int:
        """The state that is kept of it: of a mixture what its tokens alone come to."""
        return fold(0, self, self.began.mark) if self.began.is_mixture else self.states[0]

    def is_like(self, other: History) -> bool:
        """Whether it is the same in all."""
        return self == other and self.began == other.began


def shares_of(request: GenerateRequest) -> list[float]:
    """How much each member of a mixture counts; of another row, its one state."""
    total = sum(weight for _, weight in request.mixture)
    return [weight / total for _, weight in request.mixture] or [1.0]


def began_of(tokens: list[int]) -> Beginning:
    """What the tokens are read from: of a plain list the zero state."""
    return tokens.began if isinstance(tokens, History) else PLAIN
