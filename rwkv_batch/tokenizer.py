"""The World tokenizer: greedy longest byte match, 65,529 tokens, id 0 = end of document.

Encoding is pyrwkv-tokenizer's (Rust). Decoding is a byte table of our own: single tokens may be a part
of a character, so bytes are what travels, and text is made by an incremental UTF-8 decoder at the edge.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pyrwkv_tokenizer

END_OF_TEXT = 0
VOCAB_SIZE = 65536


def _vocab_file() -> Path:
    return Path(pyrwkv_tokenizer.__file__).with_name("rwkv_vocab_v20230424.txt")


@functools.cache
def _encoder() -> pyrwkv_tokenizer.RWKVTokenizer:
    """One for all of a process: it takes 230 MB."""
    return pyrwkv_tokenizer.RWKVTokenizer()


@functools.cache
def _byte_table() -> list[bytes]:
    """Bytes of each id, as the vocabulary's file has them. Raises ValueError for a damaged file."""
    table = [b""] * VOCAB_SIZE
    for line in _vocab_file().read_text(encoding="utf-8").splitlines():
        first, last = line.index(" "), line.rindex(" ")
        literal = ast.literal_eval(line[first + 1 : last])
        token = literal.encode("utf-8") if isinstance(literal, str) else literal
        if len(token) != int(line[last + 1 :]):
            raise ValueError(f"vocabulary line {line!r}: {len(token)} bytes, the line says {line[last + 1 :]}")
        table[int(line[:first])] = token
    return table


@functools.cache
def _penalty_exempt_ids() -> list[int]:
    allowed = frozenset(b"0123456789 \t")
    return [i for i, token in enumerate(_byte_table()) if token and allowed.issuperset(token)]


def make_tables() -> None:
    """Make what all tokenizers of a process share, which takes most of a second."""
    _encoder()
    _penalty_exempt_ids()


class Tokenizer:
    """Text to token ids and token ids to bytes. Immutable, safe to share."""

    def __init__(self) -> None:
        self._rust = _encoder()

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Raises UnicodeEncodeError for lone surrogates, which have no UTF-8 form."""
        text.encode("utf-8")
        return list(self._rust.encode(text))

    def encode_bytes(self, data: bytes) -> list[int]:
        """Token ids of bytes, which need not be UTF-8 (what pyrwkv-tokenizer cannot take); never fails."""
        try:
            return self.encode(data.decode("utf-8"))
        except UnicodeDecodeError:
            return self._longest_matches(data)

    def _longest_matches(self, data: bytes) -> list[int]:
        """The definition of encoding, byte by byte: slow, for short runs. Every single byte is a token."""
        ids, at = [], 0
        while at < len(data):
            stop = min(len(data), at + self.longest_token)
            while data[at:stop] not in self.id_by_bytes:
                stop -= 1
            ids.append(self.id_by_bytes[data[at:stop]])
            at = stop
        return ids

    @functools.cached_property
    def id_by_bytes(self) -> dict[bytes, int]:
        return {token: i for i, token in enumerate(self.byte_table) if token}

    @functools.cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token."""
        return max(map(len, self.id_by_bytes))

    @property
    def byte_table(self) -> list[bytes]:
        """Bytes of each id, [65536]; b"" for id 0 and the unused ids. Raises ValueError for a damaged file."""
        return _byte_table()

    def decode_bytes(self, ids: list[int]) -> bytes:
        """Bytes of a run of token ids, possibly cutting a character."""
        table = self.byte_table
        return b"".join(table[i] for i in ids)

    @property
    def penalty_exempt_ids(self) -> list[int]:
        """Ids whose text is only digits, spaces or tabs: they do not add to the penalty count."""
        return _penalty_exempt_ids()
