"""Deletes: what one engine deletes for all, in which amounts, and failed deletes, which are repeated."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from state_pool.disk.operations import Delete
from state_pool.turns import deletes
from state_pool.turns.deletes import SessionDeletes, SharedCleanup


class Store:
    """A database that answers when the test says so."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Any, Callable[[Exception | None], None]]] = []
        self.is_cleanup_leader = True
        self.over_limit = self.has_pending_deletes = False
        self.excess_bytes = 0

    def submit(self, job: Any, done: Callable[[Exception | None], None]) -> None:
        self.jobs.append((job, done))

    def answer(self, error: Exception | None = None, count: int = 0) -> Any:
        job, done = self.jobs.pop(0)
        if count:
            job.count, job.last_use = count, 5.0
        done(error)
        return job


class World:
    def __init__(self, full: str = "evict") -> None:
        self.store = Store()
        self.removed: list[tuple[int, float, bool]] = []
        self.cutoff: float | None = None
        counters = SimpleNamespace(
            count_removed=lambda count, last_use, is_expired: self.removed.append((count, last_use, is_expired))
        )
        tiers = SimpleNamespace(counters=counters, arena=SimpleNamespace(state_bytes=100))
        self.index: Any = Index()
        config = SimpleNamespace(state_db_full=full)
        expiry = SimpleNamespace(cutoff=lambda: self.cutoff)
        self.cleanup = SharedCleanup(config, self.index, tiers, self.store, expiry)  # type: ignore[arg-type]

    def submitted(self) -> list[tuple[int, float | None]]:
        self.cleanup.run()
        return [(job.limit, job.cutoff) for job, _ in self.store.jobs]


class Index(list[Any]):
    l1: tuple[Any, ...] = ()
    l2: tuple[Any, ...] = ()


def test_one_engine_deletes_expired_sessions_one_job_at_a_time() -> None:
    world = World()
    assert world.submitted() == [], "nothing expires"
    world.cutoff = 70.0
    world.store.is_cleanup_leader = False
    assert world.submitted() == []
    world.store.is_cleanup_leader = True
    assert world.submitted() == world.submitted() == [(256, 70.0)]
    world.store.answer(count=3)
    assert world.removed == [(3, 5.0, True)] and world.submitted() == [(256, 70.0)]
    world.store.answer(OSError("locked"), count=9)
    assert len(world.removed) == 1 and world.submitted() == [(256, 70.0)], "the next second it tries again"
    world.store.answer()
    assert len(world.removed) == 1, "none had expired"


def test_a_full_database_deletes_as_many_as_exceed_its_limit() -> None:
    world = World()
    world.cutoff = 70.0
    world.store.over_limit, world.store.excess_bytes = True, 250
    assert world.submitted() == [(3, None)]
    world.store.answer(count=3)
    assert world.removed == [(3, 5.0, False)]
    world.store.excess_bytes = 10**9
    assert world.submitted() == [(256, None)]
    world.store.answer()
    world.store.has_pending_deletes = True
    assert world.submitted() == [(256, 70.0)], "space of deleted sessions is not free yet"
    refusing = World("refuse")
    refusing.store.over_limit = True
    assert refusing.submitted() == []


def session(**fields: Any) -> Any:
    state = {"slot": None, "host": None, "busy": False, "loading": False, "moving": False, "unlogged": 0}
    return SimpleNamespace(**(state | fields))


@pytest.mark.parametrize("use", ["slot", "host", "busy", "loading", "moving", "unlogged"])
def test_sessions_in_use_stay_in_the_index(monkeypatch: pytest.MonkeyPatch, use: str) -> None:
    """The oldest of the others leave it. As many leave as are too many."""
    monkeypatch.setattr(deletes, "_MAX_IDLE_SESSIONS", 2)
    world = World()
    used, idle = session(**{use: 1}), [session() for _ in range(4)]
    world.index.extend([used, *idle])
    world.index.l1, world.index.l2 = ((used,) if use == tier else () for tier in ("slot", "host"))
    world.cleanup.run()
    left = 2 if use in ("slot", "host") else 1
    assert world.index == [used, *idle[-left:]]
    world.cleanup.run()
    assert len(world.index) == left + 1


def test_a_failed_delete_is_reported_and_repeated() -> None:
    store, delivered, outcomes = Store(), [], []
    made = SessionDeletes(store, delivered.append)  # type: ignore[arg-type]
    made.delete((1, 2), outcomes.append)
    made.delete((3,))
    assert store.jobs[0][0] == Delete((1, 2))
    error = OSError("disk full")
    store.answer(error)
    store.answer(error)
    assert outcomes == [error] and not store.jobs
    made.retry()
    assert [job for job, _ in store.jobs] == [Delete((1, 2)), Delete((3,))]
    store.answer()
    store.answer()
    made.retry()
    assert outcomes == [error] and not store.jobs and not delivered


def test_without_anything_to_delete_the_outcome_comes_with_the_next_poll() -> None:
    store, delivered, outcomes = Store(), [], []
    SessionDeletes(store, delivered.append).delete((), outcomes.append)  # type: ignore[arg-type]
    SessionDeletes(None, delivered.append).delete((1,), outcomes.append)  # type: ignore[arg-type]
    SessionDeletes(None, delivered.append).delete((1,))  # type: ignore[arg-type]
    assert outcomes == [] and not store.jobs
    for call in delivered:
        call()
    assert outcomes == [None, None]
