"""Expiry, and wrong clocks that must not delete sessions: set ahead while running or at a start."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from state_pool import expiry, pool
from state_pool.cache import checkpoints
from state_pool.disk import directory
from state_pool.expiry import Expiry, Gap, UsageTimes
from state_pool.turns import deletes, turns
from test.pool_fakes import Driver, end, names, opened

TTL_S = 60.0
YEAR_S = 365 * 86400.0


class Clock:
    """A fake clock for the given modules. It can be set, and time passes only on request."""

    def __init__(self) -> None:
        self.wall = time.time()
        self.running = 0.0
        self.module = SimpleNamespace(time=lambda: self.wall, monotonic=lambda: self.running)

    def passes(self, seconds: float) -> None:
        self.wall += seconds
        self.running += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(expiry, "time", clock.module)
    monkeypatch.setattr(turns, "time", clock.module)
    monkeypatch.setattr(checkpoints, "time", clock.module)
    yield clock


def expiring(folder: Path, ttl: float, shared: bool) -> Driver:
    sharing = {"engine": "one", "service": "here"} if shared else {}
    return opened(folder, session_ttl=ttl, **sharing)


def close(driver: Driver) -> None:
    end(driver)


@pytest.mark.parametrize("shared", [False, True])
def test_a_clock_that_is_set_ahead_expires_nothing(tmp_path: Path, clock: Clock, shared: bool) -> None:
    driver = expiring(tmp_path, TTL_S, shared)
    driver.turn("old", [1])
    clock.passes(TTL_S - 10)
    driver.turn("new", [1])
    clock.wall += YEAR_S
    clock.passes(20)
    driver.until(lambda: "old" not in names(driver))
    assert names(driver) == {"new"}
    driver.turn("then", [1])
    clock.passes(TTL_S - 15)
    driver.until(lambda: "new" not in names(driver))
    assert names(driver) == {"then"}
    close(driver)


@pytest.mark.parametrize("shared", [False, True])
def test_a_start_with_a_clock_far_ahead_expires_only_what_had_expired(
    tmp_path: Path, clock: Clock, shared: bool, caplog: pytest.LogCaptureFixture
) -> None:
    driver = expiring(tmp_path, 0.0, shared)
    for name in ("first", "second", "third"):
        driver.turn(name, [1])
        clock.passes(TTL_S / 2 + 5)
    close(driver)
    clock.wall += YEAR_S
    driver = expiring(tmp_path, TTL_S, shared)
    assert "more than --session-ttl" in caplog.text
    driver.until(lambda: "first" not in names(driver))
    assert names(driver) == {"second", "third"}
    driver.turn("fourth", [1])
    clock.passes(1)
    close(driver)
    driver = expiring(tmp_path, TTL_S, shared)  # one session was used while the clock was wrong
    clock.passes(TTL_S / 2)
    driver.until(lambda: "second" not in names(driver))
    assert names(driver) == {"third", "fourth"}
    clock.passes(TTL_S)
    driver.until(lambda: not names(driver))
    close(driver)


def test_time_is_counted_between_gaps(clock: Clock) -> None:
    now = clock.wall
    expires = Expiry(TTL_S, UsageTimes(now, (Gap(now - 500, now - 200), Gap(now - 170, now - 40))))
    assert expires.cutoff() == now - 40 - 130 - (TTL_S - 40)
    clock.passes(15)
    assert expires.cutoff() == now - 40 - 130 - (TTL_S - 40 - 15)
    clock.passes(TTL_S)
    assert expires.cutoff() == now + 15


def test_a_clock_that_is_set_back_and_forth_deletes_nothing_early(clock: Clock) -> None:
    now = clock.wall
    expires = Expiry(TTL_S, UsageTimes(now))
    clock.wall -= YEAR_S
    assert expires.cutoff() == now - YEAR_S - TTL_S
    clock.wall += YEAR_S
    clock.passes(10)
    assert (expires.cutoff() or 0) <= now + 10 - TTL_S
    clock.passes(TTL_S)
    assert expires.cutoff() == now + 10


def test_many_jumps_of_the_clock_take_no_more_memory_and_expire_nothing_early(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is suspended every evening shows one each day."""
    exact, bounded = Expiry(TTL_S, UsageTimes()), Expiry(TTL_S, UsageTimes())
    for _ in range(50):
        clock.wall += YEAR_S
        clock.passes(TTL_S / 7)
        exact_cutoff = exact.cutoff() or 0.0
        with monkeypatch.context() as patch:
            patch.setattr(expiry, "_MAX_GAPS", 3)
            assert (bounded.cutoff() or 0.0) <= exact_cutoff
        assert len(bounded._gaps) <= 3
    clock.passes(TTL_S)
    assert bounded.cutoff() == exact.cutoff()


@pytest.mark.parametrize("is_noticed", [True, False])
@pytest.mark.parametrize("shared", [False, True])
def test_sessions_of_a_clock_that_was_set_back_do_not_expire_early_after_a_restart(
    tmp_path: Path, clock: Clock, shared: bool, is_noticed: bool
) -> None:
    """By the times in the database, the later sessions are older. The others have times of the clock before."""
    driver = expiring(tmp_path, TTL_S, shared)
    for number in range(4):
        driver.turn(f"earlier-{number}", [1])
        clock.passes(TTL_S / 3)
    if not is_noticed:  # it is set back while the service is off
        close(driver)
    clock.wall -= YEAR_S
    if not is_noticed:
        driver = expiring(tmp_path, TTL_S, shared)
    driver.turn("later", [1])
    close(driver)
    clock.wall += YEAR_S
    driver = expiring(tmp_path, TTL_S, shared)
    clock.passes(10)
    close(driver)
    driver = expiring(tmp_path, TTL_S, shared)
    driver.pool.poll()
    driver.settle()
    assert "later" in names(driver)
    clock.passes(TTL_S)
    driver.until(lambda: not names(driver))
    close(driver)


def test_a_planned_delete_spares_sessions_of_a_clock_that_was_set_back_meanwhile(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer of a shared database may run it later."""
    monkeypatch.setattr(deletes, "time", clock.module)
    monkeypatch.setattr(directory, "time", clock.module)
    driver = expiring(tmp_path, TTL_S, shared=True)
    driver.turn("earlier", [1])
    store: Any = driver.pool._store
    submit, planned = store.submit, []
    with monkeypatch.context() as patch:
        patch.setattr(store, "submit", lambda *job: planned.append(job))
        clock.passes(TTL_S + 10)
        driver.until(lambda: bool(planned))
    clock.wall -= YEAR_S
    driver.turn("later", [1])
    submit(*planned[0])
    driver.settle()
    assert "later" in names(driver)
    close(driver)


def test_without_a_ttl_nothing_expires(clock: Clock) -> None:
    assert Expiry(0.0, UsageTimes(clock.wall - YEAR_S)).cutoff() is None


def test_a_clock_that_is_set_back_keeps_no_idle_state_from_the_disk(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With lazy durability, a crash within that day would lose the turn."""
    real = SimpleNamespace(time=lambda: clock.wall, monotonic=time.monotonic, sleep=time.sleep)
    for module in (pool, turns, checkpoints):
        monkeypatch.setattr(module, "time", real)
    driver = opened(tmp_path, durability="lazy", checkpoint_idle_s=30)
    driver.turn("s", [1])
    index = driver.pool._index
    (session,) = [*index.l1, *index.l2]
    assert session.dirty, "it is in use"
    clock.wall -= 86_400
    driver.until(lambda: not session.dirty)
    close(driver)
