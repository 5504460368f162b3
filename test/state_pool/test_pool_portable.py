"""Export and import of sessions: from every tier, with every durability, never a wrong state."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load

from state_pool.errors import PoolError, PoolFull, SessionBusy, SessionNotFound, SessionUnusable
from state_pool.session_file import InvalidSessionFile, SessionFile, decode
from state_pool.session_key import SessionKey
from state_pool.turns.import_export import MAX_CONCURRENT
from test.malformed_files import as_format_1, join, malformed_files, split, with_metadata
from test.pool_fakes import Driver, FakeArena, Outcome, config_in, end, expected_state, get_session, get_store, opened


def export(driver: Driver, name: str, dialogue: int | None = None) -> bytes:
    return driver.export(name, dialogue).encode()


def import_session(driver: Driver, name: str, data: bytes) -> None:
    driver.import_session(name, decode(data))


def restarted(tmp_path: Path, *histories: list[int]) -> Driver:
    """Return a pool that has just opened the database with the session "s" of these turns."""
    driver = opened(tmp_path)
    for tokens in histories:
        driver.turn("s", tokens)
    end(driver)
    return opened(tmp_path)


Late = tuple[Callable[..., None], list[tuple[Any, ...]]]


@contextlib.contextmanager
def late_loads(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Late]:
    """Hold back all loads; gives what loads, and the arguments of what was asked for."""
    store, late = get_store(driver), list[tuple[Any, ...]]()
    with monkeypatch.context() as patched:
        load = store.reader.load
        patched.setattr(store.reader, "load", lambda *request: late.append(request))
        yield load, late


@pytest.mark.parametrize("durability", ["log", "turn", "lazy", "memory"])
def test_export_and_import_from_every_tier(tmp_path: Path, durability: str) -> None:
    changes = {"state_db": ""} if durability == "memory" else {"durability": durability}
    driver = opened(tmp_path, delay=1, l1_sessions=2, l2_sessions=2, **changes)
    for i in range(6):
        driver.turn(f"s{i}", [i, 7])
        driver.settle()
    driver.turn("fork", [1], branch_from=0)
    for i in range(6):
        import_session(driver, f"copy{i}", export(driver, f"s{i}"))
        assert np.array_equal(driver.state(f"copy{i}"), expected_state([i, 7]))
    import_session(driver, "stored", export(driver, "s0"))
    stored = get_session(driver, "stored")
    assert (stored.turn, stored.disk_turn) == (1, -1 if durability == "memory" else 1)
    import_session(driver, "fork", export(driver, "fork", 1))
    driver.turn("fork", [2])
    assert np.array_equal(driver.state("fork"), expected_state([1, 2]))
    end(driver)
    if durability != "memory":
        driver = opened(tmp_path)
        for i in range(6):
            assert np.array_equal(driver.state(f"copy{i}"), expected_state([i, 7]))
        driver.pool.close()


def test_replay_is_exported(tmp_path: Path) -> None:
    driver = opened(tmp_path)
    driver.turn("s", [1, 2])
    driver.turn("s", [3])
    driver.close_unsaved()
    driver = opened(tmp_path)
    data = export(driver, "s")
    assert decode(data).replay == [1, 2, 3]
    driver.state("s")  # in memory it is now the zero state and its replay
    assert export(driver, "s") == data
    import_session(driver, "t", data)
    driver.turn("t", [4])
    assert np.array_equal(driver.state("t"), expected_state([1, 2, 3, 4]))
    driver.close_unsaved()
    driver = opened(tmp_path)
    assert np.array_equal(driver.state("t"), expected_state([1, 2, 3, 4]))
    driver.pool.close()


@pytest.mark.parametrize("durability", ["log", "turn", "memory"])
def test_a_file_with_a_state_and_tokens_after_it(tmp_path: Path, durability: str) -> None:
    changes = {"state_db": ""} if durability == "memory" else {"durability": durability}
    driver = opened(tmp_path, **changes)
    driver.turn("s", [1, 2])
    file = dataclasses.replace(decode(export(driver, "s")), replay=[3, 4], num_tokens=4)
    import_session(driver, "t", file.encode())
    for reopens in (False, durability != "memory"):
        if reopens:
            driver.close_unsaved()
            driver = opened(tmp_path, **changes)
        lease = driver.ready(driver.pool.turns.checkout("t"))
        assert (lease.num_tokens, lease.replay) == (4, [3, 4])
        driver.pool.turns.release(lease)
        assert np.array_equal(driver.state("t"), expected_state([1, 2, 3, 4]))
        again = decode(export(driver, "t"))
        assert (again.num_tokens, again.replay) == (4, [3, 4])
    lease = driver.turn("t", [5])
    assert np.array_equal(driver.state("t"), expected_state([1, 2, 3, 4, 5]))
    end(driver)


def test_refused_exports_and_imports_name_the_session(tmp_path: Path) -> None:
    driver = opened(tmp_path)
    driver.turn("s", [1])
    file = driver.pool.import_export.fit(decode(export(driver, "s")))
    for error, message, call in (
        (
            SessionBusy,
            "there is a session 's' already; delete it first, or choose another id",
            lambda: driver.pool.import_export.import_session("s", file, Outcome()),
        ),
        (SessionNotFound, "there is no session 's':3", lambda: driver.pool.import_export.export("s", print, 3)),
    ):
        with pytest.raises(PoolError) as caught:
            call()
        assert (type(caught.value), str(caught.value), caught.value.given) == (error, message, "s")
    with pytest.raises(SessionNotFound, match=r"^there is no session 'nobody'$"):
        driver.pool.import_export.export("nobody", print)
    driver.pool._index.mark_unusable(driver.pool._index.get(SessionKey("s")), "its file is damaged")  # type: ignore[arg-type]
    with pytest.raises(SessionUnusable, match=r"^session 's': its file is damaged$") as unusable:
        driver.pool.import_export.export("s", print)
    assert unusable.value.given == "s" and not driver.pool.import_export.pending
    driver.pool.close()


def test_the_file_opens_with_safetensors(tmp_path: Path) -> None:
    driver = opened(tmp_path)
    driver.turn("s", [1, 2])
    tensors = load(export(driver, "s"))
    assert {name: (str(t.dtype), t.shape) for name, t in tensors.items()} == driver.arena.layout
    driver.pool.close()


def test_files_of_other_models_and_damaged_files_are_refused(tmp_path: Path) -> None:
    def of(**arena: Any) -> Driver:
        return Driver(FakeArena(**arena), config_in(tmp_path, state_db=""))

    driver, with_content = of(), of(fingerprint="model-a.content")
    for one in (driver, with_content):
        one.turn("s", [1])
    data = export(driver, "s")
    with_content.pool.import_export.fit(decode(data))  # of an earlier version, which samples the weights
    for file, other, message in (
        (data, of(fingerprint="model-b"), "another model"),
        (export(with_content, "s"), of(fingerprint="model-a.changed"), "another model"),
        (data, of(words=64), "has the layout"),
    ):
        with pytest.raises(InvalidSessionFile, match=message):
            import_session(other, "t", file)
    for damaged in (b"", data[:20], data[:-1], data + b"x", b"\xff" * 64, struct.pack("<Q", 1 << 60) + b"{}"):
        with pytest.raises(InvalidSessionFile):
            decode(damaged)


@pytest.mark.parametrize(
    ("dtype", "kind"), [("float64", np.float64), ("float32", np.float32), ("float16", np.float16), ("bfloat16", None)]
)
def test_nan_and_infinity_are_refused(dtype: str, kind: type | None) -> None:
    def file(*numbers: float) -> bytes:
        """Return a complete file with a valid checksum. One part has these numbers."""
        if kind is None:
            data = (np.array(numbers, np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
        else:
            data = np.array(numbers, kind).tobytes()
        layout = {"a.shift": ("int32", (1,)), "a.wkv": (dtype, (len(numbers),))}
        return SessionFile("model-a", 0, [], layout, {"a.shift": b"\xff" * 4, "a.wkv": data}).encode()

    largest = {"float16": 65504.0}.get(dtype, 3e38)
    decode(file(0.0, -0.0, largest, -largest, 1e-30))
    for bad in (float("nan"), float("inf"), -float("inf"), -float("nan")):
        with pytest.raises(InvalidSessionFile, match=r"'a\.wkv' .* 2 numbers .* the first at 1;"):
            decode(file(1.0, bad, largest, bad))


def test_turn_waits_for_a_running_import(tmp_path: Path) -> None:
    driver = opened(tmp_path)
    driver.turn("s", [1])
    file = decode(export(driver, "s"))
    outcome = Outcome()
    driver.pool.import_export.import_session("t", driver.pool.import_export.fit(file), outcome)
    lease = driver.ready(driver.pool.turns.checkout("t"))
    assert outcome.ok
    assert lease.exists
    driver.pool.turns.release(lease)
    driver.pool.import_export.import_session("u", driver.pool.import_export.fit(file), Outcome())
    driver.delete("u")
    driver.settle()
    assert driver.list_sessions().total == 2
    driver.pool.close()


def sound_file() -> bytes:
    """A file with a state and tokens to replay."""
    layout = {"a.wkv": ("float32", (2, 3)), "a.shift": ("int32", (4,))}
    return SessionFile("model-a", 9, [1, 2], layout, {"a.wkv": bytes(24), "a.shift": bytes(16)}).encode()


HOSTILE = list(malformed_files(sound_file()))


@pytest.mark.parametrize(("what", "data"), HOSTILE, ids=[what[:40] for what, _ in HOSTILE])
def test_malformed_files_get_a_short_error(what: str, data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidSessionFile) as refused:
            decode(data)
        assert tracemalloc.get_traced_memory()[1] < 16 * len(data) + (1 << 20)
    finally:
        tracemalloc.stop()
    assert len(str(refused.value)) < 800


def test_files_of_the_first_format_are_read(tmp_path: Path) -> None:
    driver = opened(tmp_path)
    driver.turn("s", [1, 2])
    file = decode(export(driver, "s"))
    import_session(driver, "t", as_format_1(file))
    assert np.array_equal(driver.state("t"), expected_state([1, 2]))
    driver.pool.close()


def test_checksum_covers_all_metadata() -> None:
    data = sound_file()
    header, body = split(data)
    assert decode(join(header, body)) == decode(data)
    wider = {**header, "a.wkv": {**header["a.wkv"], "shape": [3, 2]}}
    changed = [
        with_metadata(data, num_tokens="10"),
        with_metadata(data, fingerprint="model-b"),
        with_metadata(data, replay="[1,3]"),
        join(wider, body),
    ]
    for damaged in changed:
        with pytest.raises(InvalidSessionFile, match="checksum"):
            decode(damaged)


def test_a_replay_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    driver = Driver(FakeArena(vocab=1000), config_in(tmp_path))
    file = SessionFile("model-a", 3, [1, 1000, 999], {}, {})
    with pytest.raises(InvalidSessionFile, match=r"token id 1000 at position 1 .* vocabulary of 1000"):
        driver.pool.import_export.import_session("t", driver.pool.import_export.fit(decode(file.encode())), Outcome())
    import_session(driver, "t", SessionFile("model-a", 2, [1, 999], {}, {}).encode())
    assert driver.list_sessions().total == 1
    driver.pool.close()


def test_stored_session_with_invalid_tokens_is_quarantined(tmp_path: Path) -> None:
    """As if an earlier version had imported it: the log has the tokens with valid checksums."""
    driver = opened(tmp_path)
    import_session(driver, "bad", SessionFile("model-a", 2, [1, 40_000], {}, {}).encode())
    driver.turn("good", [1])
    driver.close_unsaved()
    driver = Driver(FakeArena(vocab=1000), config_in(tmp_path))
    with pytest.raises(SessionUnusable, match=r"token id 40000.*vocabulary ends before 1000"):
        driver.state("bad")
    assert np.array_equal(driver.state("good"), expected_state([1]))
    driver.settle()
    assert [entry["session_id"] for entry in driver.pool.stats()["quarantined"]] == ["bad"]
    driver.pool.close()


def test_tokens_of_another_model_are_no_damage(tmp_path: Path) -> None:
    driver = opened(tmp_path)
    driver.turn("s", [40_000])
    driver.close_unsaved()
    other = Driver(FakeArena(vocab=1000, fingerprint="model-b"), config_in(tmp_path))
    with pytest.raises(SessionUnusable, match=r"belongs to another model.*token id 40000.*start that, or delete it"):
        other.state("s")
    other.pool.close()
    driver = opened(tmp_path)
    assert np.array_equal(driver.state("s"), expected_state([40_000]))
    driver.pool.close()


def test_export_of_a_session_deleted_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader runs after the delete (simulated world 3116; it was reported as damage)."""
    driver = restarted(tmp_path, [1, 2])
    with late_loads(driver, monkeypatch) as (load, late):
        found: list[object] = []
        driver.pool.import_export.export("s", found.append)
        driver.delete("s")
    load(*late[0])
    driver.until(lambda: bool(found))
    assert isinstance(found[0], SessionNotFound), found
    assert driver.pool.import_export._num_active == 0
    driver.pool.close()


def test_an_export_that_reads_a_later_turn_counts_its_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader runs after another turn was logged (simulated world 1101)."""
    driver = restarted(tmp_path, [1, 2])
    with late_loads(driver, monkeypatch) as (load, late):
        found: list[SessionFile | Exception] = []
        driver.pool.import_export.export("s", found.append)
    driver.turn("s", [3])
    load(*late[0])
    driver.until(lambda: bool(found))
    assert isinstance(found[0], SessionFile)
    import_session(driver, "t", found[0].encode())
    assert np.array_equal(driver.state("t"), expected_state([1, 2, 3]))
    assert found[0].num_tokens == 3
    driver.pool.close()


def test_concurrent_exports_and_imports_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds a state in host memory. When one ends, the next may start."""
    driver = restarted(tmp_path, [1])
    with late_loads(driver, monkeypatch) as (load, late):
        found: list[SessionFile | Exception] = []
        for _ in range(MAX_CONCURRENT):
            driver.pool.import_export.export("s", found.append)
        with pytest.raises(PoolFull, match="try again"):
            driver.pool.import_export.export("s", found.append)
    for request in late:
        load(*request)
    driver.until(lambda: len(found) == MAX_CONCURRENT)
    assert decode(export(driver, "s")).replay == []
    driver.pool.close()


def test_an_import_needs_room_for_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = opened(tmp_path)
    driver.turn("s", [1, 2])
    file = driver.pool.import_export.fit(decode(export(driver, "s")))
    with monkeypatch.context() as patched:
        patched.setattr(driver.pool.tiers, "host_has_room", lambda: False)
        with pytest.raises(PoolFull, match="too many states are being moved; try again"):
            driver.pool.import_export.import_session("t", file, Outcome())
    assert not driver.pool.import_export.pending
    outcome = Outcome()
    driver.pool.import_export.import_session("t", file, outcome)
    driver.until(lambda: outcome.known)
    assert np.array_equal(driver.state("t"), expected_state([1, 2]))
    driver.pool.close()


def test_failed_import_start_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = opened(tmp_path)
    driver.turn("s", [1])
    file = decode(export(driver, "s"))

    def fails(job: object, done: object) -> None:
        raise RuntimeError("no memory for that")

    for i in range(MAX_CONCURRENT + 1):
        with monkeypatch.context() as patched:
            patched.setattr(driver.pool._store, "submit_state", fails)
            with pytest.raises(RuntimeError):
                driver.pool.import_export.import_session(f"t{i}", driver.pool.import_export.fit(file), Outcome())
    import_session(driver, "u", file.encode())
    assert driver.pool.import_export._num_active == 0
    driver.pool.close()


_ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from([10**30, 2**63, -1]),
    lambda value: st.lists(value, max_size=4) | st.dictionaries(st.text(max_size=4), value, max_size=4),
    max_leaves=8,
)
_DTYPES = st.sampled_from(["F32", "F16", "U8", "I64"])
_PART = st.fixed_dictionaries(
    {
        "dtype": _DTYPES | _ANYTHING,
        "shape": st.lists(st.integers(0, 4), max_size=3) | _ANYTHING,
        "data_offsets": st.lists(st.integers(0, 32), min_size=2, max_size=2) | _ANYTHING,
    }
)
_ABOUT = st.fixed_dictionaries(
    {
        "format": st.sampled_from(["rwkv-session-1", "rwkv-session-2"]) | _ANYTHING,
        "fingerprint": st.text(max_size=4) | _ANYTHING,
        "layout_version": st.just("1") | _ANYTHING,
        "num_tokens": st.integers().map(str) | _ANYTHING,
        "replay": st.lists(st.integers(0, 9), max_size=3).map(json.dumps) | _ANYTHING.map(json.dumps) | _ANYTHING,
        "checksum": st.text(max_size=4) | _ANYTHING,
    }
)
_HEADER = st.builds(
    lambda about, parts: {"__metadata__": about, **parts},
    _ABOUT | _ANYTHING,
    st.dictionaries(st.text(max_size=4), _PART | _ANYTHING, max_size=3),
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(_HEADER | _ANYTHING, st.binary(max_size=48))
def test_random_headers_raise_only_invalid_session_file(header: object, body: bytes) -> None:
    with contextlib.suppress(InvalidSessionFile):
        decode(join(header, body))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_random_changes_raise_only_invalid_session_file(data: st.DataObject) -> None:
    content = bytearray(sound_file())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=6))
        if not content:
            break
    with contextlib.suppress(InvalidSessionFile):
        decode(bytes(content))


@pytest.mark.slow
@given(st.binary(max_size=200), st.dictionaries(st.text(max_size=8), st.integers() | st.text() | st.none(), max_size=4))
def test_random_bytes_raise_only_invalid_session_file(tail: bytes, header: dict[str, object]) -> None:
    text = json.dumps(header).encode()
    for data in (tail, struct.pack("<Q", len(text)) + text + tail):
        with pytest.raises(PoolError):
            decode(data)
