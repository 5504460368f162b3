"""Tunes RWKV-7: a state, a LoRA or all weights, by gradients in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

COMPACT_DTYPES = ("int8", "fp8")
"""Types of weights that stay so while a state or a LoRA is tuned."""


@dataclass(frozen=True, slots=True)
class Document:
    """Token ids, and each one's weight in the loss. The first id is only read."""

    ids: Sequence[int]
    weights: Sequence[float]

    def __len__(self) -> int:
        """Return the number of tokens that are read."""
        return len(self.ids) - 1


def paced_path(output: Path) -> Path:
    """Return the file whose existence paces a background run on a GPU (`pacing.py`)."""
    return output.with_name(f"{output.name}.paced")
