"""Session files with many tokens to replay: same bytes as in one piece, and no long call."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec
import pytest

from state_pool.layout import LAYOUT_VERSION
from state_pool.session_file import InvalidSessionFile, SessionFile, decode
from test.malformed_files import split, with_metadata

LONG = [number % 65_536 for number in range(300_000)]


def test_a_long_replay_is_read_in_pieces_as_in_one() -> None:
    """The file's text and first-format checksum are those of one json.dumps."""
    file = SessionFile("model-a", len(LONG), LONG, {}, {})
    data = file.encode()
    header, _ = split(data)
    assert json.loads(header["__metadata__"]["replay"]) == LONG and decode(data).replay == LONG
    old = hashlib.blake2b(json.dumps(LONG).encode(), digest_size=16).hexdigest()
    assert decode(with_metadata(data, format="rwkv-session-1", checksum=old)).replay == LONG
    content = ["rwkv-session-2", LAYOUT_VERSION, "model-a", len(LONG), LONG]
    whole = hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()
    assert header["__metadata__"]["checksum"] == whole


@pytest.mark.parametrize("change", ["[]", "],[", ",,", ',"1",', ",-1,", ",4294967296,", ",1.5,", "x"])
def test_a_fault_in_a_long_replay_is_found(change: str) -> None:
    data = SessionFile("model-a", len(LONG), LONG, {}, {}).encode()
    text = split(data)[0]["__metadata__"]["replay"]
    for at in (1, len(text) // 2, len(text) - 1):
        comma = text.rfind(",", 0, at) if at > 1 else 1
        with pytest.raises(InvalidSessionFile):
            decode(with_metadata(data, replay=text[:comma] + change + text[comma + 1 :]))
    for cut in (text[1:], text[:-1], f"{text[:-1]},]", "{" + text[1:-1] + "}"):
        with pytest.raises(InvalidSessionFile):
            decode(with_metadata(data, replay=cut))


def test_a_long_file_is_decoded_in_short_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call holds Python's lock to its end: the engine's thread, and so every stream, would stand still."""
    data = SessionFile("model-a", len(LONG), LONG, {}, {}).encode()
    lengths: list[int] = []
    decode_json, dumps = msgspec.json.decode, json.dumps

    def decodes(text: Any, **fields: Any) -> Any:
        lengths.append(len(text))
        return decode_json(text, **fields)

    def encodes(value: Any, **fields: Any) -> str:
        lengths.append(len(text := dumps(value, **fields)))
        return text

    monkeypatch.setattr(msgspec.json, "decode", decodes)
    monkeypatch.setattr(json, "dumps", encodes)
    assert decode(data).replay == LONG
    assert max(lengths) < 100_000 < len(data)
