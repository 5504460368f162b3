"""Sessions carried away as files and brought back: from every tier, into every durability, never a wrong one."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load

from state_pool.errors import PoolError, SessionBusy, SessionNotFound
from state_pool.session_file import NotASession, SessionFile, decode
from test.pool_fakes import Driver, FakeArena, Outcome, config_in, state_of


def export(driver: Driver, name: str, dialogue: int | None = None) -> bytes:
    """The session as a file's bytes."""
    found: list[SessionFile | Exception] = []
    driver.pool.export(name, found.append, dialogue)
    driver.until(lambda: bool(found))
    assert isinstance(found[0], SessionFile), found
    return found[0].encode()


def import_session(driver: Driver, name: str, data: bytes) -> None:
    """A file becomes a session, durably."""
    outcome = Outcome()
    driver.pool.import_session(name, decode(data), outcome)
    driver.until(lambda: outcome.known)
    assert outcome.ok, outcome.calls


@pytest.mark.parametrize("durability", ["log", "turn", "lazy", "memory"])
def test_there_and_back_from_every_tier(tmp_path: Path, durability: str) -> None:
    changes = {"state_db": ""} if durability == "memory" else {"durability": durability}
    driver = Driver(FakeArena(delay=1), config_in(tmp_path, l1_sessions=2, l2_sessions=2, **changes))
    for i in range(6):
        driver.turn(f"s{i}", [i, 7])
        driver.settle()
    driver.turn("fork", [1], branch_from=0)
    for i in range(6):
        import_session(driver, f"copy{i}", export(driver, f"s{i}"))
        assert np.array_equal(driver.state(f"copy{i}"), state_of([i, 7]))
    import_session(driver, "fork", export(driver, "fork", 1))
    driver.turn("fork", [2])
    assert np.array_equal(driver.state("fork"), state_of([1, 2]))
    driver.settle()
    assert driver.pool.check_integrity() == []
    driver.pool.close()
    if durability != "memory":
        driver = Driver(FakeArena(), config_in(tmp_path))
        for i in range(6):
            assert np.array_equal(driver.state(f"copy{i}"), state_of([i, 7]))
        driver.pool.close()


def test_what_still_has_to_be_replayed_travels_too(tmp_path: Path) -> None:
    driver = Driver(FakeArena(), config_in(tmp_path))
    driver.turn("s", [1, 2])
    driver.turn("s", [3])
    driver.pool._flush = lambda store: None  # type: ignore[method-assign]
    driver.pool.close()
    driver = Driver(FakeArena(), config_in(tmp_path))
    data = export(driver, "s")
    assert decode(data).replay == [1, 2, 3]
    import_session(driver, "t", data)
    driver.turn("t", [4])
    assert np.array_equal(driver.state("t"), state_of([1, 2, 3, 4]))
    driver.pool._flush = lambda store: None  # type: ignore[method-assign]
    driver.pool.close()
    driver = Driver(FakeArena(), config_in(tmp_path))
    assert np.array_equal(driver.state("t"), state_of([1, 2, 3, 4]))
    driver.pool.close()


def test_the_file_opens_with_safetensors(tmp_path: Path) -> None:
    driver = Driver(FakeArena(), config_in(tmp_path))
    driver.turn("s", [1, 2])
    tensors = load(export(driver, "s"))
    assert {name: (str(t.dtype), t.shape) for name, t in tensors.items()} == driver.arena.layout
    driver.pool.close()


def test_what_is_refused(tmp_path: Path) -> None:
    driver = Driver(FakeArena(), config_in(tmp_path))
    driver.turn("s", [1])
    data = export(driver, "s")
    with pytest.raises(SessionBusy, match="already"):
        driver.pool.import_session("s", decode(data), Outcome())
    with pytest.raises(SessionNotFound):
        driver.pool.export("nobody", print)
    driver.pool.close()
    other = Driver(FakeArena(fingerprint="model-b"), config_in(tmp_path / "..", state_db=""))
    with pytest.raises(NotASession, match="another model"):
        other.pool.import_session("t", decode(data), Outcome())
    wide = Driver(FakeArena(words=64), config_in(tmp_path / "..", state_db=""))
    with pytest.raises(NotASession, match="laid out"):
        wide.pool.import_session("t", decode(data), Outcome())
    for damaged in (b"", data[:20], data[:-1], data + b"x", b"\xff" * 64, struct.pack("<Q", 1 << 60) + b"{}"):
        with pytest.raises(NotASession):
            decode(damaged)


@pytest.mark.parametrize(
    ("dtype", "kind"), [("float64", np.float64), ("float32", np.float32), ("float16", np.float16), ("bfloat16", None)]
)
def test_numbers_that_are_none_are_refused(dtype: str, kind: type | None) -> None:
    def file(*numbers: float) -> bytes:
        """A whole file, checksum and all, with a part of these numbers."""
        if kind is None:
            data = (np.array(numbers, np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
        else:
            data = np.array(numbers, kind).tobytes()
        layout = {"a.shift": ("int32", (1,)), "a.wkv": (dtype, (len(numbers),))}
        return SessionFile("model-a", 0, [], layout, {"a.shift": b"\xff" * 4, "a.wkv": data}).encode()

    largest = {"float16": 65504.0}.get(dtype, 3e38)
    decode(file(0.0, -0.0, largest, -largest, 1e-30))
    for bad in (float("nan"), float("inf"), -float("inf"), -float("nan")):
        with pytest.raises(NotASession, match=r"'a\.wkv' .* 2 numbers .* the first at 1:"):
            decode(file(1.0, bad, largest, bad))


def test_a_turn_waits_for_a_session_that_is_being_brought(tmp_path: Path) -> None:
    driver = Driver(FakeArena(), config_in(tmp_path))
    driver.turn("s", [1])
    file = decode(export(driver, "s"))
    outcome = Outcome()
    driver.pool.import_session("t", file, outcome)
    lease = driver.ready(driver.pool.checkout("t"))
    assert outcome.ok
    assert lease.exists
    driver.pool.release(lease)
    driver.pool.import_session("u", file, Outcome())
    driver.delete("u")
    driver.settle()
    assert driver.pool.list_sessions().total == 2
    driver.pool.close()


@given(st.binary(max_size=200), st.dictionaries(st.text(max_size=8), st.integers() | st.text() | st.none(), max_size=4))
def test_no_bytes_do_worse_than_be_refused(tail: bytes, header: dict[str, object]) -> None:
    text = json.dumps(header).encode()
    for data in (tail, struct.pack("<Q", len(text)) + text + tail):
        with pytest.raises(PoolError):
            decode(data)
