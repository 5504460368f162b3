"""Share of a model's layers that are loaded: the loader reports it to the engine's process."""

from __future__ import annotations

from collections.abc import Callable

listeners: list[Callable[[float], object]] = []
"""Called with a number from 0 to 1 after each layer."""


def report(share: float) -> None:
    for listener in listeners:
        listener(share)
