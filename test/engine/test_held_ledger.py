"""The ledger of keys' limits in the engine's process, and its metrics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from rwkv_batch.errors import ErrorKind
from rwkv_batch.ipc import held_ledger
from rwkv_batch.ipc.held_ledger import CONNECT_S, TAKEOVER_S, HeldLedger
from rwkv_batch.ipc.quotas import CountedJob
from rwkv_batch.ipc.wire import RestoreQuotas, UsageReport
from rwkv_batch.request import ClientLimits, Delta, ErrorInfo, JobEvents, Usage

LIMITS = ClientLimits(rows=2, tokens_per_minute=100)


class World:
    def __init__(self) -> None:
        self.requests: list[tuple[str, int, bool]] = []
        self.tokens: list[tuple[str, int, int]] = []
        metrics: Any = SimpleNamespace(
            observe_client_request=lambda *seen: self.requests.append(seen),
            observe_client_tokens=lambda *seen: self.tokens.append(seen),
        )
        self.ledger = HeldLedger(metrics)
        self.ledger._quotas.clock = lambda: 0.0

    @property
    def left(self) -> float | None:
        balances = self.ledger.balances()
        return balances[0].tokens if balances else 100.0


@pytest.fixture
def world() -> World:
    return World()


def usage(job_id: str, rows: int = 1) -> Usage:
    return Usage(job_id, "key", LIMITS, rows, 10)


def events(job_id: str, tokens: int, *, done: bool = False, error: ErrorInfo | None = None) -> JobEvents:
    return JobEvents(job_id=job_id, deltas=[Delta(0, b"x", tokens)] if tokens else [], done=done, error=error)


def test_a_request_is_counted_once(world: World) -> None:
    assert world.ledger.acquire(usage("a"), "one") is None
    assert world.ledger.acquire(usage("a"), "two") is None
    refused = world.ledger.acquire(usage("b", rows=2), "one")
    assert refused is not None and refused.kind is ErrorKind.OVERLOADED
    assert world.requests == [("key", 10, False), ("key", 10, True)] and world.left == 90.0


def test_tokens_are_charged_once_whether_observed_or_reported(world: World) -> None:
    world.ledger.observe(events("a", 3), "one")
    world.ledger.acquire(usage("a"), "one")
    world.ledger.observe(events("a", 3), "one")
    world.ledger.observe(events("other", 3), "one")
    world.ledger.report(UsageReport("a", 5, 2))
    world.ledger.report(UsageReport("a", 5, 2, done=True))
    world.ledger.report(UsageReport("a", 9))
    assert world.tokens == [("key", 3, 0), ("key", 2, 2)] and world.left == 100.0 - 10 - 7
    assert world.ledger.acquire(usage("b", rows=2), "one") is None, "it has ended"


def test_the_end_of_a_job_frees_its_rows_unless_it_runs_elsewhere(world: World) -> None:
    lost = ErrorInfo(kind=ErrorKind.ENGINE_LOST, message="lost")
    world.ledger.acquire(usage("a", rows=2), "one")
    for seen, owner in ((events("a", 0, done=True, error=lost), "one"), (events("a", 0, done=True), "two")):
        world.ledger.observe(seen, owner)
        assert world.ledger.acquire(usage("b"), "one") is not None
    world.ledger.observe(events("a", 0, done=True), "one")
    assert world.ledger.acquire(usage("b"), "one") is None


def test_a_refund_costs_nothing(world: World) -> None:
    world.ledger.acquire(usage("a"), "one")
    world.ledger.report(UsageReport("a", 0, done=True, refund=True))
    assert world.left == 100.0


def test_a_job_that_its_worker_counts_again_pays_once(world: World) -> None:
    """The connection ended before the answer arrived."""
    world.ledger.acquire(usage("a"), "old")
    world.ledger.end_all("old")
    assert world.left == 90.0, "it has paid"
    assert world.ledger.acquire(usage("a"), "new") is None
    assert world.left == 90.0 and len(world.requests) == 1


def test_only_the_last_connection_of_a_worker_ends_its_jobs(world: World) -> None:
    world.ledger.acquire(usage("a", rows=2), "old")
    world.ledger.restore(RestoreQuotas([], [CountedJob(usage("a", rows=2))]), "new")
    world.ledger.end_all("old")
    assert world.ledger.acquire(usage("b"), "new") is not None
    world.ledger.end_all("new")
    assert world.ledger.acquire(usage("b"), "new") is None


def test_the_ledger_is_complete_once_all_workers_restored_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    moved = RestoreQuotas([], [], has_moved=True)
    monkeypatch.setattr(held_ledger, "time", SimpleNamespace(monotonic=lambda: now))
    ledger = HeldLedger(Mock())
    ledger.add_worker("a")
    ledger.restore(RestoreQuotas([], []), "a")
    assert ledger.is_complete, "no engine was lost"
    ledger.add_worker("b")
    ledger.restore(moved, "b")
    assert not ledger.is_complete, "another worker may not be connected to a new engine yet"
    now += CONNECT_S
    assert ledger.is_complete
    ledger.add_worker("c")
    assert not ledger.is_complete
    ledger.end_all("c")
    assert ledger.is_complete, "it is gone"
    ledger.add_worker("c")
    now += TAKEOVER_S
    assert ledger.is_complete, "a worker that hangs stops nobody for good"
    for worker in ("a", "b"):
        ledger.release(worker)
    ledger.restore(moved, "b")
    assert not ledger.is_complete, "another takeover begins"
