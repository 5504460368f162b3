"""The World tokenizer: greedy longest byte match, 65,529 tokens, id 0 = end of document.

pyrwkv-tokenizer (Rust) encodes texts. The engine decodes with its own byte table, and also encodes short byte strings
with it. A token may be part of a character, so the engine sends bytes. The receiver decodes them incrementally as
UTF-8.
"""

from __future__ import annotations

import ast
import functools
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pyrwkv_tokenizer

END_OF_TEXT = 0
VOCAB_SIZE = 65536
_LINE = re.compile(rb"""(\d+) (?:'([^'\\]*)'|"([^"\\]*)"|(.*)) (\d+)$""", re.MULTILINE)
"""A line of the vocabulary file: id, quoted text or another Python literal, number of bytes."""
_encoder_lock = threading.Lock()


def _vocab_file() -> Path:
    return Path(pyrwkv_tokenizer.__file__).with_name("rwkv_vocab_v20230424.txt")


def _encoder() -> pyrwkv_tokenizer.RWKVTokenizer:
    """Return the process-wide encoder. Takes 230 MB."""
    with _encoder_lock:
        return _load_encoder()


@functools.cache
def _load_encoder() -> pyrwkv_tokenizer.RWKVTokenizer:
    return pyrwkv_tokenizer.RWKVTokenizer()


@functools.cache
def _byte_table() -> list[bytes]:
    """Return the bytes of each id. Raises ValueError for a damaged file."""
    data = _vocab_file().read_bytes()
    table = [b""] * VOCAB_SIZE
    lines = _LINE.findall(data)
    if len(lines) != (num_lines := len(data.splitlines())):
        raise ValueError(f"vocabulary file: {len(lines)} of {num_lines} lines are valid; reinstall pyrwkv-tokenizer")
    for number, text, other_text, literal, size in lines:
        token = text or other_text
        if literal:  # parsing all lines with ast would take six times as long
            value = ast.literal_eval(literal.decode("utf-8"))
            token = value.encode("utf-8") if isinstance(value, str) else value
        if len(token) != int(size):
            raise ValueError(
                f"vocabulary file, id {int(number)}: {len(token)} bytes, its line says {int(size)}; "
                "reinstall pyrwkv-tokenizer"
            )
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
    """Lengths of the tokens that begin with the same two bytes. Longest first, with 1 at the end."""
    lengths: dict[bytes, set[int]] = {}
    for token in _id_by_bytes():
        if len(token) > 1:
            lengths.setdefault(token[:2], {1}).add(len(token))
    return {start: tuple(sorted(found, reverse=True)) for start, found in lengths.items()}


def make_byte_tables() -> None:
    """Create what an engine encodes with. Takes 0.2 s and 20 MB."""
    _penalty_exempt_ids()
    _lengths_by_prefix()


def make_tables() -> None:
    """Create what text is encoded with. Takes 0.5 s and 240 MB."""
    _byte_table()
    _encoder()


_PIECE_CHARACTERS = 1 << 16
MAX_TOKEN_BYTES = 128
"""Length of the longest token. A token depends on the bytes from its start to the end of the longest possible one."""


class Tokenizer:
    """Converts text to token ids and back. Immutable and thread-safe; tables are created on first use."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text. Raises UnicodeEncodeError for lone surrogates, which have no UTF-8 form."""
        return [token for piece in self.encode_pieces(text) for token in piece]

    def encode_pieces(self, text: str) -> Iterator[list[int]]:
        """Yield the token ids of a text piece by piece. While it encodes a piece, no other thread runs.

        Raises UnicodeEncodeError for lone surrogates, which have no UTF-8 form.
        """
        at = 0
        while len(text) - at > _PIECE_CHARACTERS:
            data = text[at : at + _PIECE_CHARACTERS].encode()
            ids, end = list(_encoder().encode(data.decode())), len(data)
            # With more text, the last tokens may be longer ones. A token may also end inside a character.
            while len(data) - end < MAX_TOKEN_BYTES or data[end] & 0xC0 == 0x80:
                end -= len(_byte_table()[ids.pop()])
            yield ids
            at += len(data[:end].decode())
        text[at:].encode()
        yield list(_encoder().encode(text[at:]))

    @staticmethod
    def encode_bytes(data: bytes) -> list[int]:
        """Return the token ids of any bytes. Does not load the text encoder. `encode` is faster for whole texts."""
        ids, lengths = _id_by_bytes(), _lengths_by_prefix()
        table, found, at = _byte_table(), [], 0
        while at < len(data):
            for length in lengths.get(data[at : at + 2], (1,)):
                token = ids.get(data[at : at + length])
                if token is not None:
                    break
            assert token is not None  # every single byte is a token
            found.append(token)
            at += len(table[token])
        return found

    @property
    def id_by_bytes(self) -> dict[bytes, int]:
        """The id of each token's bytes. Every single byte is a token."""
        return _id_by_bytes()

    @property
    def byte_table(self) -> list[bytes]:
        """The bytes of each id, [65536]. b"" for id 0 and unused ids. Raises ValueError for a damaged file."""
        return _byte_table()

    def decode_bytes(self, ids: list[int]) -> bytes:
        """Return the bytes of token ids. The result may end inside a character."""
        table = self.byte_table
        return b"".join(table[i] for i in ids)

    @property
    def penalty_exempt_ids(self) -> list[int]:
        """Ids of digits, spaces and tabs: they do not count for penalties."""
        return _penalty_exempt_ids()
