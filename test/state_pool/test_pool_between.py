"""Events during a copy, a load or a write. Also while a turn waits for its log."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from state_pool.errors import SessionNotFound, TurnNotStored
from state_pool.session_file import SessionFile, decode
from state_pool.sessions import Lease, LeaseState
from test.pool_fakes import Driver, Outcome, expected_state, fold, get_session, get_store, opened
from test.pool_integrity import integrity_faults
from test.state_pool.test_pool_portable import export
from test.state_pool.test_pool_prefix import Prompts, cache, head_of


def rows_of(folder: Path, table: str = "sessions") -> int:
    with sqlite3.connect(folder / "sessions.db") as connection:
        return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def computed(driver: Driver, name: str, token: int) -> tuple[Lease, int]:
    """Start a turn and compute its state, without recording it."""
    lease = driver.ready(driver.pool.turns.checkout(name))
    return lease, driver.compute(lease, [token])


# -- states on their way to the disk -----------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["log", "turn"])
def test_state_of_deleted_session_is_not_stored(tmp_path: Path, durability: str) -> None:
    driver = opened(tmp_path, delay=3, durability=durability)
    lease, slot = computed(driver, "s", 1)
    outcome = driver.finish_turn(lease, [1], slot)
    if durability == "log":
        driver.until(lambda: outcome.known)
        assert driver.pool.tiers.checkpoints.begin(get_session(driver, "s"))
    assert driver.pool.tiers.busy
    driver.delete("s")
    driver.settle()
    assert outcome.known
    assert (rows_of(tmp_path), rows_of(tmp_path, "states")) == (0, 0)
    driver.pool.close()


def test_log_gap_forces_a_checkpoint(tmp_path: Path) -> None:
    """Even if the log is short: only the state has the turn that the log misses."""
    driver = opened(tmp_path, durability="lazy", checkpoint_idle_s=1e9)
    driver.turn("s", [1])
    driver.settle()
    get_session(driver, "s").log_broken = True
    driver.turn("s", [2])
    driver.settle()
    assert get_store(driver).writer.stats.states == 1
    assert not get_session(driver, "s").log_broken
    driver.pool.close()


def test_unlogged_state_stays_in_memory(tmp_path: Path) -> None:
    driver = opened(tmp_path, durability="lazy", checkpoint_idle_s=1e9)
    checkpoints = driver.pool.tiers.checkpoints
    with get_store(driver).writer._changed:
        driver.turn("s", [1])
        assert not checkpoints.can_replay(get_session(driver, "s"))
    driver.settle()
    assert checkpoints.can_replay(get_session(driver, "s"))
    driver.pool.close()


@pytest.mark.parametrize("session_first", [True, False])
def test_least_recently_used_state_is_evicted_first(tmp_path: Path, session_first: bool) -> None:
    prompts = Prompts(tmp_path, prefix_cache_slots=4, prefix_cache_l2=4)
    if session_first:
        prompts.driver.turn("s", [1])
    cache(prompts, 1)
    if not session_first:
        prompts.driver.turn("s", [1])
    held = [prompts.driver.slot() for _ in range(prompts.pool.tiers.slots.num_free)]
    held.append(prompts.driver.slot())
    left_its_slot = get_session(prompts.driver, "s").slot is None
    assert (left_its_slot, prompts.pool.prefixes.sizes) == ((True, (1, 0)) if session_first else (False, (0, 1)))
    for slot in held:
        prompts.pool.tiers.free(slot)
    prompts.close()


# -- cached prefixes ---------------------------------------------------------------------------------------------------


def test_prompt_does_not_wait_for_prefix_of_its_own_length(tmp_path: Path) -> None:
    """It would leave no token to compute, so it is no hit."""
    prompts = Prompts(tmp_path)
    head = head_of(1)
    prompts.pool.prefixes.observe([*head, 1])
    assert prompts.pool.prefixes.cache_points([*head, 2]) == [len(head)]
    assert prompts.pool.prefixes.should_wait([*head, 3])
    assert not prompts.pool.prefixes.should_wait(head)
    prompts.pool.prefixes.abandon(head)
    assert not prompts.pool.prefixes.should_wait([*head, 3])
    prompts.close()


def test_prefix_hit_during_eviction_keeps_the_slot(tmp_path: Path) -> None:
    prompts = Prompts(tmp_path)
    cache(prompts, 1)
    prompts.pool.prefixes.evict()
    hit = prompts.pool.prefixes.match([*head_of(1), 7])
    assert hit is not None
    prompts.driver.settle()
    assert prompts.pool.prefixes.sizes == (1, 0)
    assert integrity_faults(prompts.pool) == []
    prompts.pool.prefixes.unpin(hit)
    prompts.close()


def test_prefix_in_host_memory_hits_once_a_slot_is_free(tmp_path: Path) -> None:
    prompts = Prompts(tmp_path)
    cache(prompts, 1)
    prompts.pool.prefixes.evict()
    prompts.driver.settle()
    held = [prompts.driver.slot() for _ in range(prompts.pool.tiers.slots.num_free)]
    assert prompts.pool.prefixes.match([*head_of(1), 7]) is None
    assert integrity_faults(prompts.pool, rows=held) == []
    for slot in held:
        prompts.pool.tiers.free(slot)
    hit = prompts.pool.prefixes.match([*head_of(1), 7])
    assert hit is not None
    assert np.array_equal(prompts.driver.arena.memory[hit.slot], expected_state(head_of(1)))
    prompts.pool.prefixes.unpin(hit)
    prompts.close()


# -- turns -------------------------------------------------------------------------------------------------------------


def test_no_branch_from_an_uncommitted_dialogue(tmp_path: Path) -> None:
    driver = opened(tmp_path)
    lease = driver.ready(driver.pool.turns.checkout("s", 0))
    slot = driver.compute(lease, [1])
    outcome = Outcome()
    driver.pool.turns.record(lease, [1], outcome)
    assert lease.dialogue_idx == 1
    with pytest.raises(SessionNotFound, match="no dialogue 1"):
        driver.pool.turns.checkout("s", 1)
    driver.pool.turns.checkin(lease, slot)
    driver.until(lambda: outcome.known)
    driver.pool.turns.release(driver.ready(driver.pool.turns.checkout("s", 1)))
    driver.pool.close()


def test_record_copies_the_token_list(tmp_path: Path) -> None:
    driver = opened(tmp_path)
    lease = driver.ready(driver.pool.turns.checkout("s"))
    tokens, outcome = [1, 2], Outcome()
    with get_store(driver).writer._changed:  # the write comes after the engine has changed its list
        driver.pool.turns.record(lease, tokens, outcome)
        tokens.append(3)
    driver.pool.turns.release(lease)
    driver.until(lambda: outcome.known)
    assert np.array_equal(driver.state("s"), expected_state([1, 2]))
    driver.pool.close()


def logged(driver: Driver, token: int) -> tuple[Lease, int, Outcome]:
    """Start a turn of "s" that is logged but not checked in."""
    lease, slot = computed(driver, "s", token)
    outcome = Outcome()
    driver.pool.turns.record(lease, [token], outcome)
    driver.until(lambda: lease.session.pending is not None and lease.session.pending.outcome is True)
    return lease, slot, outcome


def test_turn_is_acknowledged_after_checkin(tmp_path: Path) -> None:
    driver = opened(tmp_path)
    lease, slot, outcome = logged(driver, 1)
    assert not outcome.known
    driver.pool.turns.checkin(lease, slot)
    assert outcome.ok
    assert driver.list_sessions().total == 1
    driver.pool.close()


@pytest.mark.parametrize("how", ["checked in", "given up"])
def test_a_delete_between_the_log_and_the_state_wins(tmp_path: Path, how: str) -> None:
    driver = opened(tmp_path)
    lease, slot, outcome = logged(driver, 1)
    driver.pool.turns.delete("s")
    if how == "checked in":
        driver.pool.turns.checkin(lease, slot)
    else:
        driver.pool.tiers.free(slot)
        driver.pool.turns.release(lease)
    driver.settle()
    assert isinstance(outcome.calls[0], SessionNotFound)
    assert len(outcome.calls) == 1
    assert rows_of(tmp_path) == 0
    assert integrity_faults(driver.pool) == []
    driver.pool.close()


# -- leases ------------------------------------------------------------------------------------------------------------


def test_a_lazy_turn_without_a_state_waits_for_its_log(tmp_path: Path) -> None:
    driver = opened(tmp_path, durability="lazy", checkpoint_idle_s=1e9)
    driver.turn("s", [1])
    driver.settle()
    outcome = Outcome()
    with get_store(driver).writer._changed:
        lease = driver.ready(driver.pool.turns.checkout("s"))
        driver.pool.turns.record(lease, [2], outcome)
        driver.pool.turns.release(lease)
        following = driver.pool.turns.checkout("s")
        driver.pool.poll()
        assert following.state is LeaseState.WAITING
        assert not outcome.known
    driver.ready(following)
    assert outcome.ok
    assert np.array_equal(fold(driver.arena.memory[following.read_slot], following.replay), expected_state([1, 2]))
    driver.pool.turns.release(following)
    driver.pool.close()


def test_slots_go_to_leases_in_order(tmp_path: Path) -> None:
    driver = opened(tmp_path, l1_sessions=0, l2_sessions=8)
    for name in "abc":
        driver.turn(name, [ord(name)])
    driver.until(lambda: not driver.pool._index.l1)
    driver.settle()
    held = [driver.slot() for _ in range(driver.pool.tiers.slots.num_free)]
    leases = [driver.pool.turns.checkout(name) for name in "abc"]
    for _ in range(3):  # retries in between must not change the order
        driver.pool.poll()
    waiting: Callable[[], list[Lease]] = lambda: [one for one in leases if one.state is LeaseState.WAITING]  # noqa: E731
    assert waiting() == leases
    for number in range(1, 4):
        driver.pool.tiers.free(held.pop())
        driver.until(lambda: len(waiting()) < 4 - number)  # noqa: B023
        assert waiting() == leases[number:]
    for lease in leases:
        driver.pool.turns.release(lease)
    for slot in held:
        driver.pool.tiers.free(slot)
    driver.pool.close()


def reopened(folder: Path, **changes: object) -> Driver:
    """Open a new pool over two sessions that are only on disk."""
    driver = opened(folder)
    for name in "ab":
        driver.turn(name, [ord(name)])
    driver.pool.close()
    return opened(folder, **changes)


def test_session_deleted_during_load_stays_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = reopened(tmp_path)
    store = get_store(driver)
    load, late = store.reader.load, []
    monkeypatch.setattr(store.reader, "load", lambda *request: late.append(request))
    lease = driver.pool.turns.checkout("a")
    session = get_session(driver, "a")
    assert session.loading
    load(*late[0])
    driver.until(lambda: store.reader._jobs.empty())
    driver.delete("a")
    driver.until(lambda: not session.loading)
    assert lease.state is LeaseState.FAILED
    assert (session.slot, session.host, list(driver.pool._index.l2)) == (None, None, [])
    driver.pool.turns.release(lease)
    driver.pool.close()


def test_loaded_session_can_be_evicted(tmp_path: Path) -> None:
    driver = reopened(tmp_path)
    for name in "ab":
        assert np.array_equal(driver.state(name), expected_state([ord(name)]))
    assert driver.pool.tiers.num_loading == 0
    assert [get_session(driver, name).readers for name in "ab"] == [0, 0]
    driver.pool.close()


# -- imports -----------------------------------------------------------------------------------------------------------


def failed_import(driver: Driver, monkeypatch: pytest.MonkeyPatch, *, stores_state: bool) -> Lease:
    """Import a session while the disk refuses all writes and deletes.

    It accepts only the state's write, and only if `stores_state`.

    Returns the lease of a turn that waited for the import.
    """
    whole = decode(export(driver, "a"))
    file = SessionFile(whole.fingerprint, whole.num_tokens + 2, [5, 6], whole.layout, whole.parts)
    store, outcome = get_store(driver), Outcome()

    def refuse(job: object, done: Callable[[Exception | None], None]) -> None:
        driver.pool._deliver(lambda: done(TurnNotStored("the disk is full")))

    with monkeypatch.context() as patched:
        patched.setattr(store, "submit", refuse)
        if not stores_state:
            patched.setattr(store, "submit_state", refuse)
        driver.pool.import_export.import_session("t", driver.pool.import_export.fit(file), outcome)
        lease = driver.pool.turns.checkout("t")
        driver.until(lambda: outcome.known)
        driver.pool.poll()
    assert isinstance(outcome.calls[0], TurnNotStored)
    assert not driver.ready(lease).exists
    return lease


def test_failed_import_leaves_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = reopened(tmp_path)
    driver.pool.turns.release(failed_import(driver, monkeypatch, stores_state=True))
    assert rows_of(tmp_path) == 3
    driver.pool.turns.session_deletes.retry()
    driver.settle()
    assert (rows_of(tmp_path), rows_of(tmp_path, "states")) == (2, 2)
    driver.pool.close()


def test_turn_after_failed_import_starts_a_new_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The import's delete, when it succeeds later, must not touch the turn."""
    driver = reopened(tmp_path)
    lease = failed_import(driver, monkeypatch, stores_state=False)
    outcome = driver.finish_turn(lease, [7])
    driver.until(lambda: outcome.known)
    assert outcome.ok
    driver.pool.turns.session_deletes.retry()
    driver.settle()
    assert rows_of(tmp_path) == 3
    assert np.array_equal(driver.state("t"), expected_state([7]))
    driver.pool.close()


def test_imports_one_after_another(tmp_path: Path) -> None:
    driver = reopened(tmp_path)
    data = export(driver, "a")
    for number in range(4):
        outcome = Outcome()
        driver.pool.import_export.import_session(f"t{number}", driver.pool.import_export.fit(decode(data)), outcome)
        driver.until(lambda: outcome.known)  # noqa: B023
        assert outcome.ok
    assert not driver.pool.import_export.pending
    driver.pool.close()
