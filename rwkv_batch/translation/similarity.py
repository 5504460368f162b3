"""Finds similar texts. Loads NumPy and RapidFuzz, so it is imported when a request needs it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from rapidfuzz.fuzz import ratio
from rapidfuzz.process import cdist

_CELLS_PER_TEXT, _CELLS_PER_REQUEST = 1 << 30, 1 << 33
"""Bounds on the work of comparisons: 20 ms a text and 0.2 s a request on one core.

Comparing two texts fills a table of one cell per pair of characters. A core fills 50,000 cells in a microsecond.
"""
_CELLS_PER_PAIR = 1 << 16
"""What a comparison costs besides its table."""
_MIN_SIMILARITY = 75
_MAX_EXAMPLES = 2


def similar(texts: Sequence[str], others: Sequence[str]) -> list[list[int]]:
    """Return each text's most similar others by index, best last.

    If there is too much to compare, the others closest in length are.
    """
    lengths = np.fromiter(map(len, others), np.int64, len(others))
    cells = min(_CELLS_PER_TEXT, _CELLS_PER_REQUEST // max(1, len(texts)))
    return [_similar(text, others, compared(len(text), lengths, cells)) for text in texts]


def compared(length: int, lengths: NDArray[np.int64], cells: int) -> NDArray[np.intp]:
    """Return which others of these lengths are compared with a text, within a number of cells."""
    nearest = np.argsort(np.abs(lengths - length), kind="stable")
    count = int(np.searchsorted(np.cumsum(lengths[nearest] * length + _CELLS_PER_PAIR), cells, side="right"))
    return np.sort(nearest[:count])


def _similar(text: str, others: Sequence[str], indices: NDArray[np.intp]) -> list[int]:
    if not len(indices):
        return []
    chosen = [others[index] for index in indices]
    scores = cdist([text], chosen, scorer=ratio, score_cutoff=_MIN_SIMILARITY, dtype=np.uint8)[0]
    best = np.argsort(scores, kind="stable")[-_MAX_EXAMPLES:]
    return [int(indices[index]) for index in best if scores[index]]
