"""The World vocabulary. Also the compact part of it that the demo model uses."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import numpy as np
import pyrwkv_tokenizer
from numpy.typing import NDArray

SIZE = 65536


@cache
def tokenizer() -> pyrwkv_tokenizer.RWKVTokenizer:
    return pyrwkv_tokenizer.RWKVTokenizer()


@cache
def token_bytes() -> tuple[bytes, ...]:
    """Return the bytes of every id; b"" for an id without a token."""
    table = [b""] * SIZE
    file = Path(pyrwkv_tokenizer.__file__).parent / "rwkv_vocab_v20230424.txt"
    for line in file.read_text(encoding="utf-8").splitlines():
        number, rest = line.split(" ", 1)
        value = ast.literal_eval(rest[: rest.rindex(" ")])
        table[int(number)] = value.encode() if isinstance(value, str) else value
    return tuple(table)


def encode(text: str) -> list[int]:
    """Uses the greedy longest match."""
    ids: list[int] = tokenizer().encode(text)
    return ids


class Compact:
    """Maps ids to table rows: one row per used id, and a last row for all other ids."""

    def __init__(self, ids: NDArray[np.int64]) -> None:
        self.ids = ids
        self.rows = len(ids) + 1
        self.unused = len(ids)
        self.of_id = np.full(SIZE, self.unused, dtype=np.int64)
        self.of_id[ids] = np.arange(len(ids))

    @property
    def multiplicity(self) -> int:
        """The number of ids that share the last row."""
        return SIZE - len(self.ids)


STOPS = frozenset((0, 11, 261, 24281))  # in every compact vocabulary
