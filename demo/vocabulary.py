"""The compact part of the World vocabulary that the demo model uses."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rwkv_batch.tokenizer import VOCAB_SIZE


class Compact:
    """Maps ids to table rows: one row per used id, and a last row for all other ids."""

    def __init__(self, ids: NDArray[np.int64]) -> None:
        self.ids = ids
        self.rows = len(ids) + 1
        self.unused = len(ids)
        self.of_id = np.full(VOCAB_SIZE, self.unused, dtype=np.int64)
        self.of_id[ids] = np.arange(len(ids))

    @property
    def multiplicity(self) -> int:
        """The number of ids that share the last row."""
        return VOCAB_SIZE - len(self.ids)


STOPS = frozenset((0, 11, 261, 24281))  # in every compact vocabulary
