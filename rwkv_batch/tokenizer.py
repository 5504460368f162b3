"""The World tokenizer: greedy longest byte match, 65,529 tokens, id 0 = end of document.

Texts are encoded by pyrwkv-tokenizer (Rust), the few bytes that an engine encodes by a table of our own, which it has
anyway. Decoding is a byte table of our own: single tokens may be a part of a character, so bytes are what travels, and
text is made by an incremental UTF-8 decoder at the edge.
"""

from __future__ import annotations

import ast
import functools
import re
import threading
from pathlib import Path

import pyrwkv_tokenizer

END_OF_TEXT = 0
VOCAB_SIZE = 65536
_LINE = re.compile(rb"""(\d+) (?:'([^'\\]*)'|"([^"\\]*)"|(.*)) (\d+)$""", re.MULTILINE)
"""Of the vocabulary's file: an id, a text in quotes (or, one in eighty, another literal of Python's), its bytes."""
_encoder_lock = threading.Lock()


def _vocab_file() -> Path:
    return Path(pyrwkv_tokenizer.__file__).with_name("rwkv_vocab_v20230424.txt")


def _encoder() -> pyrwkv_tokenizer.RWKVTokenizer:
    """One for all of a process, whichever of its threads are the first to ask: it takes 230 MB."""
    with _encoder_lock:
        return _load_encoder()


@functools.cache
def _load_encoder() -> pyrwkv_tokenizer.RWKVTokenizer:
    return pyrwkv_tokenizer.RWKVTokenizer()


@functools.cache
def _byte_table() -> list[bytes]:
    """Bytes of each id, as the vocabulary's file has them. Raises ValueError for a damaged file."""
    data = _vocab_file().read_bytes()
    table = [b""] * VOCAB_SIZE
    lines = _LINE.findall(data)
    if len(lines) != (num_lines := len(data.splitlines())):
        raise ValueError(f"the vocabulary has {num_lines} lines, of which {len(lines)} are of a token each")
    for number, text, other_text, literal, size in lines:
        token = text or other_text
        if literal:  # Python's parser takes six times as long for all of them
            value = ast.literal_eval(literal.decode("utf-8"))
            token = value.encode("utf-8") if isinstance(value, str) else value
        if len(token) != int(size):
            raise ValueError(f"vocabulary, id {int(number)}: {len(token)} bytes, its line says {int(size)}")
        table[int(number)] = token
    return table


@functools.cache
def _penalty_exempt_ids() -> list[int]:
    return [i for i, token in enumerate(_byte_table()) if token and not token.strip(b"0123456789 \t")]


@functools.cache
def _id_by_bytes() -> dict[bytes, int]:
    return {token: i for i, token in enumerate(_byte_table()) if token}


@functools.cache
def _lengths_by_prefix() -> dict[bytes, tuple[int, ...]]:
    """For each two bytes that tokens begin with the lengths of these tokens, the longest first, and 1."""
    lengths: dict[bytes, set[int]] = {}
    for token in _id_by_bytes():
        if len(token) > 1:
            lengths.setdefault(token[:2], {1}).add(len(token))
    return {start: tuple(sorted(found, reverse=True)) for start, found in lengths.items()}


def make_byte_tables() -> None:
    """Make what tokenizers of a process share for tokens and bytes, which takes a tenth of a second and 20 MB."""
    _penalty_exempt_ids()
    _lengths_by_prefix()


def make_tables() -> None:
    """The same, and what texts are encoded with: half a second more, and 230 MB."""
    make_byte_tables()
    _encoder()


class Tokenizer:
    """Text to token ids and token ids to bytes. Immutable, safe to share; tables are made at their first use."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Raises UnicodeEncodeError for lone surrogates, which have no UTF-8 form."""
        text.encode("utf-8")
        return list(_encoder().encode(text))

    def encode_bytes(self, data: bytes) -> list[int]:
        """Token ids of bytes, which need not be UTF-8; never fails.

        For the few bytes that an engine encodes: without the tables of `encode`, which is faster for whole texts.
        """
        ids, lengths = _id_by_bytes(), _lengths_by_prefix()
        table, found, at = _byte_table(), [], 0
        while at < len(data):
            for length in lengths.get(data[at : at + 2], (1,)):
                token = ids.get(data[at : at + length])
                if token is not None:
                    break
            assert token is not None  # every single byte is one
            found.append(token)
            at += len(table[token])
        return found

    @property
    def id_by_bytes(self) -> dict[bytes, int]:
        """The id of each token; every single byte is one."""
        return _id_by_bytes()

    @functools.cached_property
    def max_token_bytes(self) -> int:
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
