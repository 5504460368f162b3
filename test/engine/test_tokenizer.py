"""The World tokenizer against the reference package's, on random text and bytes."""

from __future__ import annotations

import functools
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rwkv_batch import tokenizer as tokenizers
from rwkv_batch.core.row_builder import RowBuilder
from rwkv_batch.tokenizer import END_OF_TEXT, MAX_TOKEN_BYTES, VOCAB_SIZE, Tokenizer
from test.conftest import IS_LONG

RANGES = (
    (0x20, 0x7E),
    (0x09, 0x0D),
    (0xA0, 0x24F),
    (0x400, 0x4FF),
    (0x3040, 0x30FF),
    (0x4E00, 0x9FFF),
    (0x1F300, 0x1FAFF),
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer()


@pytest.fixture(scope="module")
def reference():  # type: ignore[no-untyped-def]
    package = pytest.importorskip("rwkv.rwkv_tokenizer")
    return package.TRIE_TOKENIZER(os.path.join(os.path.dirname(package.__file__), "rwkv_vocab_v20230424.txt"))


def random_text(rng: random.Random) -> str:
    """Runs of one script, spaces, newlines and repetitions, which produce long merges."""
    parts = []
    for _ in range(rng.randrange(1, 12)):
        low, high = rng.choice(RANGES)
        run = "".join(chr(rng.randint(low, high)) for _ in range(rng.randrange(1, 9)))
        parts.append(
            rng.choice((run, run * 3, " " + run, "\n\n", "\r\n", " " * rng.randrange(1, 20), "1234567", "the end"))
        )
    return "".join(parts)


def test_the_longest_token_has_the_stated_length(tokenizer: Tokenizer) -> None:
    """The maximum is not computed: the first prediction in each HTTP worker took 8 ms longer for it."""
    assert max(map(len, tokenizer.byte_table)) == MAX_TOKEN_BYTES


@pytest.mark.slow
def test_random_text_as_the_reference(tokenizer: Tokenizer, reference) -> None:  # type: ignore[no-untyped-def]
    rng = random.Random(0)
    for _ in range(3000 if IS_LONG else 1000):
        text = random_text(rng)
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text), repr(text)
        assert tokenizer.decode_bytes(ids) == text.encode()


def test_random_bytes_as_the_reference(tokenizer: Tokenizer, reference) -> None:  # type: ignore[no-untyped-def]
    rng = random.Random(1)
    for _ in range(500 if IS_LONG else 150):
        cut = random_text(rng).encode()
        data = (
            cut[rng.randrange(3) : len(cut) - rng.randrange(3)]
            if rng.random() < 0.5
            else rng.randbytes(rng.randrange(40))
        )
        ids = tokenizer.encode_bytes(data)
        assert ids == reference.encodeBytes(data), data
        assert tokenizer.decode_bytes(ids) == data


def test_every_token_has_the_reference_bytes(tokenizer: Tokenizer, reference) -> None:  # type: ignore[no-untyped-def]
    table = tokenizer.byte_table
    assert len(table) == VOCAB_SIZE
    assert {i: token for i, token in enumerate(table) if token} == reference.idx2token


def test_single_bytes_and_known_ids(tokenizer: Tokenizer) -> None:
    assert [tokenizer.decode_bytes([i + 1]) for i in range(256)] == [bytes([i]) for i in range(256)]
    assert tokenizer.encode("。\n\n") == [28329, 11]
    known = {"\n": 11, "\n\n": 261, "\n\n\n": 3328, " ": 33, ":": 59, "User": 24281, "✿": 10060}
    assert {text: tokenizer.encode(text) for text in known} == {text: [i] for text, i in known.items()}
    assert tokenizer.encode("") == [] and tokenizer.encode("\0") == [1]


def test_ids_without_bytes(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode_bytes([END_OF_TEXT, 65530, 65535]) == b""
    with pytest.raises(IndexError):
        tokenizer.decode_bytes([65536])


@pytest.mark.parametrize(
    ("was", "now", "what"),
    [
        (b"98 'a' 1\n", b"98 'ab' 1\n", "id 98: 2 bytes, its line says 1"),
        (b'40 "\'" 1\n', b'40 "\'" 2\n', "id 40: 1 bytes, its line says 2"),
        (b"1 '\\x00' 1\n", b"1 '\\x00\\x00' 1\n", "id 1: 2 bytes, its line says 1"),
        (b"98 'a' 1\n", b"98 'a'\n", "65528 of 65529 lines"),
        (b" 128\n", b"", "65528 of 65529 lines"),
    ],
)
def test_a_damaged_vocabulary_is_refused(
    was: bytes, now: bytes, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tokenizers._vocab_file().read_bytes()
    assert whole.count(was) == 1
    file = tmp_path / "vocabulary.txt"
    file.write_bytes(whole.replace(was, now))
    monkeypatch.setattr(tokenizers, "_vocab_file", lambda: file)
    with pytest.raises(ValueError, match=what):
        tokenizers._byte_table.__wrapped__()


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\udc80"])
def test_lone_surrogates_raise(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(UnicodeEncodeError):
        tokenizer.encode(text)


def test_a_long_text_is_encoded_in_pieces(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other thread runs while a piece is encoded. Tokens over a piece's end are those of the whole text."""
    rng = random.Random(1)
    parts = ["   " * 90, "é", "漢字かな", "🙂", "aaaaaaaa", "The quick ", "\n\n\n\n", "====" * 40, "1234", "\u0301"]
    text = "".join(rng.choice(parts) for _ in range(3000))
    whole = tokenizer.encode(text)
    for characters in (300, 1000, 4097):
        monkeypatch.setattr("rwkv_batch.tokenizer._PIECE_CHARACTERS", characters)
        pieces = list(tokenizer.encode_pieces(text))
        assert [token for piece in pieces for token in piece] == whole
        assert len(pieces) >= len(text) // characters
    with pytest.raises(UnicodeEncodeError):
        tokenizer.encode("a" * 900 + "\ud800" + "a" * 900)


def test_parts_of_a_character(tokenizer: Tokenizer) -> None:
    data = "🀄".encode()
    assert [tokenizer.decode_bytes(tokenizer.encode_bytes(data[:n])) for n in range(1, 5)] == [
        data[:n] for n in range(1, 5)
    ]


def test_penalty_exempt_ids_are_digits_and_blanks(tokenizer: Tokenizer) -> None:
    assert {33, ord("7") + 1, ord("\t") + 1} <= set(tokenizer.penalty_exempt_ids)
    assert 11 not in tokenizer.penalty_exempt_ids and END_OF_TEXT not in tokenizer.penalty_exempt_ids
    assert all(set(tokenizer.decode_bytes([i])) <= set(b"0123456789 \t") for i in tokenizer.penalty_exempt_ids)


def test_tables_are_created_once_per_process() -> None:
    one, other = Tokenizer(), Tokenizer()
    assert one.byte_table is other.byte_table and one.id_by_bytes is other.id_by_bytes
    assert one.encode("a") == other.encode("a") and tokenizers._encoder() is tokenizers._encoder()


def test_concurrent_first_calls_create_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each table takes 230 MB."""
    made, all_ask = [], threading.Barrier(4)

    def slow() -> object:
        made.append(threading.get_ident())
        time.sleep(0.05)
        return object()

    monkeypatch.setattr(tokenizers, "_load_encoder", functools.cache(slow))

    def ask() -> None:
        all_ask.wait()
        tokenizers._encoder()

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_engines_encode_without_the_text_encoder(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes 230 MB and half a second. A forked engine would copy it page by page."""
    rng = random.Random(2)
    texts = [random_text(rng) for _ in range(300)]
    expected = [tokenizer.encode(text) for text in texts]
    monkeypatch.delattr(tokenizers, "_encoder")
    assert [tokenizer.encode_bytes(text.encode()) for text in texts] == expected
    nothing: Any = None
    RowBuilder(nothing, nothing, tokenizer, VOCAB_SIZE)
