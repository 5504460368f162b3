"""Effects that a careless change could break: garbage on disk, refusals, group commits, eviction order."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path

import pytest

from state_pool.disk.operations import Append, SessionRow
from state_pool.errors import SessionBusy, SessionNotFound
from state_pool.session_key import SessionKey
from test.pool_fakes import Driver, FakeArena, Outcome, config_in, end, get_session, get_store
from test.state_pool.stored_sessions import raw, reopen
from test.state_pool.test_pool_prefix import Prompts


def chunks(folder: Path) -> tuple[int, int]:
    """(chunks in the file, chunks that its states have)"""
    with raw(folder) as connection:
        chunks = connection.execute("SELECT count(*) FROM state_chunks").fetchone()[0]
        states = connection.execute("SELECT count(*) FROM states").fetchone()[0]
    return chunks, 2 * states


def collected(driver: Driver, folder: Path) -> bool:
    store = get_store(driver)
    driver.until(lambda: not store.pending and not store.writer.is_collecting_garbage)
    found, expected = chunks(folder)
    return found == expected


def test_chunks_of_a_replaced_state_are_collected(tmp_path: Path) -> None:
    driver = reopen(tmp_path, durability="turn")
    for turn in range(5):
        driver.turn("s", [turn])
    assert get_store(driver).writer.stats.states == 5
    assert collected(driver, tmp_path)
    driver.pool.close()


def test_chunks_of_a_deleted_state_are_collected(tmp_path: Path) -> None:
    driver = reopen(tmp_path, durability="turn")
    driver.turn("s", [1])
    driver.turn("t", [1])
    driver.delete("s")
    assert collected(driver, tmp_path)
    assert chunks(tmp_path) == (2, 2)
    driver.pool.close()


def test_chunks_of_a_failed_state_are_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = reopen(tmp_path, durability="turn")
    writer = get_store(driver).writer
    with monkeypatch.context() as patched:
        write = writer._write_state

        def one_piece_then_fails(staging: object) -> None:
            """Its first chunk is committed, the rest never."""
            writer._small_jobs.append((Append(SessionRow(999, SessionKey("x"), None, 7, 1, 0.0, 0.0), [1]), Outcome()))
            write(staging)  # type: ignore[arg-type]
            writer._small_jobs.clear()
            writer._state_failed(staging, sqlite3.OperationalError("disk I/O error"))  # type: ignore[arg-type]

        patched.setattr(writer, "_write_state", one_piece_then_fails)
        with contextlib.suppress(Exception):
            driver.turn("s", [1])
    driver.turn("t", [1])
    assert collected(driver, tmp_path)
    driver.pool.close()


def test_older_state_does_not_repair_a_broken_log(tmp_path: Path) -> None:
    """With "lazy", only a later state covers an unlogged turn."""
    driver = reopen(tmp_path, durability="lazy", checkpoint_idle_s=1e9)
    driver.turn("s", [1])
    driver.settle()
    session, writer = get_session(driver, "s"), get_store(driver).writer
    with writer._changed:  # the state after turn 1 waits while turn 2 is lost
        assert driver.pool.tiers.checkpoints.begin(session)
        driver.pool.poll()
        session.log_broken = True
        session.turn += 1
    driver.until(lambda: writer.stats.states == 1 and not session.moving)
    assert session.log_broken, "the state that was stored is older than the gap"
    driver.until(lambda: driver.pool.tiers.checkpoints.begin(session) or not session.dirty)
    driver.until(lambda: not session.dirty)
    assert not session.log_broken
    driver.pool.close()


def test_session_is_busy_while_its_turn_is_stored(tmp_path: Path) -> None:
    driver = reopen(tmp_path)
    lease = driver.ready(driver.pool.turns.checkout("s"))
    slot = driver.compute(lease, [1])
    with get_store(driver).writer._changed:
        driver.finish_turn(lease, [1], slot)
        get_session(driver, "s").active = None  # the turn is over but still being stored
        with pytest.raises(SessionBusy):
            driver.pool.turns.checkout("s", wait=False)
    end(driver)


@pytest.mark.parametrize("durability", ["log", "turn", "lazy"])
def test_a_deleted_sessions_turn_is_not_acknowledged(tmp_path: Path, durability: str) -> None:
    """Its tokens are committed before the delete. Still it is deleted, and its client gets an error."""
    driver = reopen(tmp_path, durability=durability)
    lease = driver.ready(driver.pool.turns.checkout("s"))
    outcome = driver.finish_turn(lease, [1])
    while durability == "log" and get_store(driver).writer.stats.turns == 0:
        time.sleep(0.001)  # committed, but not polled yet
    driver.pool.turns.delete("s")
    driver.until(lambda: outcome.known)
    assert isinstance(outcome.calls[0], SessionNotFound)
    end(driver)


def test_one_bad_turn_fails_alone(tmp_path: Path) -> None:
    driver = reopen(tmp_path)
    good, bad, other = Outcome(), Outcome(), Outcome()
    with get_store(driver).writer._changed:  # all in one group
        for row, turn, outcome in ((101, 1, good), (102, 5, bad), (103, 1, other)):
            job = Append(SessionRow(row, SessionKey(f"s{row}"), None, turn, 1, 0.0, 0.0), [1])
            get_store(driver).submit(job, outcome)
    driver.until(lambda: good.known and bad.known and other.known)
    assert (good.ok, bad.ok, other.ok) == (True, False, True)
    driver.pool.close()


def test_least_recently_used_session_is_evicted_first(tmp_path: Path) -> None:
    driver = reopen(tmp_path, l1_sessions=2, l2_sessions=0)
    for name in ("a", "b"):
        driver.turn(name, [1])
    driver.turn("a", [2])  # b is the oldest, although it came second
    driver.turn("c", [1])
    driver.until(lambda: len(driver.pool._index.l1) <= 2)
    assert [session.key.session_id for session in driver.pool._index.l1] == ["a", "c"]
    driver.pool.close()


def test_turn_is_committed_between_chunks_of_a_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn may come during the write of a large state. It is committed between two chunks."""
    driver = reopen(tmp_path)
    writer = get_store(driver).writer
    order: list[str] = []
    monkeypatch.setattr("state_pool.layout.CHUNK_BYTES", 1024)
    from state_pool.disk import statements

    put = statements.put_chunk

    def put_slowly(connection: sqlite3.Connection, state: int, number: int, data: memoryview) -> None:
        put(connection, state, number, data)
        order.append("chunk")
        if number == 0:
            row = SessionRow(500, SessionKey("late"), None, 1, 1, 0.0, 0.0)
            with writer._changed:
                writer._small_jobs.append((Append(row, [1]), lambda error: order.append("turn acknowledged")))

    driver.turn("s", [1])
    driver.settle()
    deliver = writer._deliver
    monkeypatch.setattr(writer, "_deliver", lambda callback: (callback(), deliver(lambda: None)))
    monkeypatch.setattr(statements, "put_chunk", put_slowly)
    assert driver.pool.tiers.checkpoints.begin(get_session(driver, "s"))
    driver.until(lambda: writer.stats.states == 1)
    assert order[:2] == ["chunk", "turn acknowledged"]
    assert order.count("chunk") > 8
    end(driver)


def test_least_recently_used_prefix_is_evicted_first(tmp_path: Path) -> None:
    prompts = Prompts(tmp_path, prefix_cache_slots=2, prefix_cache_l2=0)
    heads = [list(range(1000 * number, 1000 * number + 40)) for number in range(3)]
    for head in (heads[0], heads[1]):
        for tail in (60_000, 60_001):
            prompts.prefill([*head, tail])
    prompts.prefill([*heads[0], 60_002])  # used again, although it came first
    for tail in (60_000, 60_001):
        prompts.prefill([*heads[2], tail])
    prompts.pool._do_housekeeping(0.0)
    prompts.driver.settle()
    before = prompts.computed
    prompts.prefill([*heads[0], 60_003])
    assert prompts.computed == before + 1, "the one that was used is still there"
    prompts.close()


def test_a_prefix_hit_leaves_the_last_token_to_compute(tmp_path: Path) -> None:
    prompts = Prompts(tmp_path)
    head = list(range(40))
    for tail in (60_000, 60_001):
        prompts.prefill([*head, tail])
    assert prompts.pool.prefixes.match(head) is None
    hit = prompts.pool.prefixes.match([*head, 7])
    assert hit is not None
    assert hit.num_tokens == 40
    prompts.pool.prefixes.unpin(hit)
    prompts.close()


def test_the_same_prefix_is_cached_once(tmp_path: Path) -> None:
    prompts = Prompts(tmp_path)
    head = list(range(40))
    slots = [prompts.driver.slot(), prompts.driver.slot()]
    for slot in slots:
        prompts.driver.arena.run(0, slot, head)
    hit = prompts.pool.prefixes.offer(head, slots[0])
    assert hit is not None
    assert prompts.pool.prefixes.offer(head, slots[1]) is None
    prompts.pool.tiers.free(slots[1])
    prompts.pool.prefixes.unpin(hit)
    prompts.close()


def test_state_needed_by_a_waiting_turn_stays_in_host_memory(tmp_path: Path) -> None:
    """Even above `l2_sessions`: otherwise it would be loaded from disk at once."""
    driver = Driver(FakeArena(num_slots=8), config_in(tmp_path, l1_sessions=2, l2_sessions=1))
    for name in ("a", "b"):
        driver.turn(name, [ord(name)])
        driver.settle()
    held: list[int] = []
    driver.until(lambda: _take(driver, held) == driver.pool.tiers.slots.num_usable)
    driver.settle()
    leases = [driver.pool.turns.checkout(name) for name in ("a", "b")]
    driver.until(lambda: len(driver.pool._index.l2) == 2)
    loads = driver.pool.tiers.counters.loads
    driver.pool.tiers.trim()
    assert len(driver.pool._index.l2) == 2
    for slot in held:
        driver.pool.tiers.free(slot)
    for lease in leases:
        driver.ready(lease)
        driver.pool.turns.release(lease)
    assert driver.pool.tiers.counters.loads == loads
    end(driver)


def _take(driver: Driver, held: list[int]) -> int:
    """Allocate one more slot if possible; return the number held."""
    slot = driver.pool.tiers.allocate()
    if slot is not None:
        held.append(slot)
    return len(held)
