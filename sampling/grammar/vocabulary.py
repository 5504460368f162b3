"""The vocabulary for llguidance: bytes per token id, and one token that ends a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import llguidance

END = 0
"""Id of the token that ends a text; it has no bytes."""
_INSIDE_STRING = r'[^"\\\x00-\x1F\x7F]'
SLICES = (
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_INSIDE_STRING}{{1,{length}}}" for length in (1, 3, 5, 8, 10, 14, 17, 30)),
    f"{_INSIDE_STRING}+",
)
"""Parts of the vocabulary that a mask allows in one step if the grammar allows all their texts.

Other tokens are checked one by one. These are llguidance's own slices and more lengths between them: near the end of
a string with a maximum length only short tokens fit, and finding them was most of a mask's cost.
"""


class _Tokens:
    """The attributes that `llguidance.TokenizerWrapper` reads."""

    bos_token_id = None
    eos_token_id = END
    special_token_ids = (END,)

    def __init__(self, table: Sequence[bytes], encode: Callable[[bytes], list[int]]) -> None:
        self.tokens = [b"<end>", *table[1:]]
        self._encode = encode

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text if isinstance(text, bytes) else text.encode())


def make_vocabulary(
    byte_table: Sequence[bytes], encode: Callable[[bytes], list[int]], size: int
) -> llguidance.LLTokenizer:
    """
    byte_table: bytes of each id, b"" for ids without a token.
    size: number of logits, which may exceed the number of ids.
    """
    table = [*byte_table[:size], *[b""] * (size - len(byte_table))]
    tokens = llguidance.TokenizerWrapper(_Tokens(table, encode))
    return llguidance.LLTokenizer(tokens, n_vocab=size, eos_token=END, slices=list(SLICES))
