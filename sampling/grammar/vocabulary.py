"""The vocabulary as llguidance takes it: a token for each id, all of them bytes, and one that ends the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import llguidance

END = 0
"""Id of the token that ends a text; it has no bytes."""


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
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Tokens(table, encode)), n_vocab=size, eos_token=END)
