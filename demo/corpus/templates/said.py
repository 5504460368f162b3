"""What a template draws."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

Said = tuple[str, str] | tuple[str, str, tuple[str, ...]]
"""English without its capital, Chinese, and of more than one clause the meanings that decide its side of the split."""
Template = Callable[[Random], Said]
