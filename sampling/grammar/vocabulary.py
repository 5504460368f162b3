"""The vocabulary as llguidance takes it: a token for each id, all of them bytes, and one that ends the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import llguidance

END = 0
"""Id of the token that ends a text; it has no bytes."""
_INSIDE_STRING = r'[^"\\\x00-\x1F\x7F]'
SLICES = (
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_INSIDE_STRING}{{1,{most}}}" for most in (1, 3, 5, 8, 10, 14, 17, 30)),
    f"{_INSIDE_STRING}+",
)
"""Parts of the vocabulary that a mask takes whole where the grammar allows anything like it; all others are walked.

llguidance's own, and between them more: near the end of a string with a longest length only short tokens fit, and
most of what masks cost was to find out which (`docs/notebook.md`).
"""


class _Tokens:
    """What `llguidance.TokenizerWrapper` asks for."""

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
    """`byte_table`: bytes of each id, b"" for ids that are no token; `size`: of the logits, which may have more ids."""
    table = [*byte_table[:size], *[b""] * (size - len(byte_table))]
    tokens = llguidance.TokenizerWrapper(_Tokens(table, encode))
    return llguidance.LLTokenizer(tokens, n_vocab=size, eos_token=END, slices=list(SLICES))
