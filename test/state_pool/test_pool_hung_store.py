"""A checkpoint store that neither answers nor fails, like a hanging mount: jobs time out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from state_pool.disk import checkpoint_objects, worker_threads
from state_pool.disk.checkpoint_store import FolderStore
from state_pool.errors import SessionUnusable, TurnNotStored
from state_pool.session_key import Tier
from state_pool.sessions import LeaseState
from test.pool_fakes import Driver, FakeArena, Outcome, config_in, end, expected_state, get_session
from test.serving import wait_for


class Mount:
    """Lets the store's calls pass or hang."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hangs = False
        self.resumed = threading.Event()
        self._monkeypatch = monkeypatch

    def hang(self) -> None:
        """Hang all later calls, with a short timeout."""
        self._monkeypatch.setattr(worker_threads, "JOB_TIMEOUT_S", 0.2)
        self.hangs = True

    def wrap(self, call: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*arguments: object) -> object:
            if self.hangs:
                self.resumed.wait()
            return call(*arguments)

        return wrapped

    def resume(self) -> None:
        self._monkeypatch.setattr(worker_threads, "JOB_TIMEOUT_S", 60.0)
        self.hangs = False
        self.resumed.set()


@pytest.fixture
def mount(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mount]:
    mount = Mount(monkeypatch)
    for name in ("put", "get", "delete"):
        monkeypatch.setattr(FolderStore, name, mount.wrap(getattr(FolderStore, name)))
    monkeypatch.setattr(checkpoint_objects, "HUNG_CHECK_INTERVAL_S", 0.05)
    yield mount
    mount.resume()


def opened(folder: Path, delay: int = 0, **changes: object) -> Driver:
    (folder / "objects").mkdir(exist_ok=True)
    store = (folder / "objects").as_uri()
    config = config_in(
        folder, durability="turn", checkpoint_store=store, checkpoint_store_min_mb=0.0, transfer_states=2, **changes
    )
    return Driver(FakeArena(delay=delay), config)


def test_turns_fail_and_late_objects_are_deleted(tmp_path: Path, mount: Mount) -> None:
    one = opened(tmp_path)
    one.turn("s", [1])
    mount.hang()
    for name in ("s", "t", "u"):  # the last state waits while all threads hang
        with pytest.raises(TurnNotStored, match="has not answered for"):
            one.turn(name, [2])
    assert "has not answered for" in one.pool.stats()["degraded"]
    mount.resume()
    one.turn("s", [3])
    assert np.array_equal(one.state("s"), expected_state([1, 3]))
    folder = tmp_path / "objects"
    one.until(lambda: len([file for file in folder.glob("*/*") if file.name != "of-this-database"]) == 1)
    assert one.pool.stats()["degraded"] is None
    end(one)


def test_loads_fail_with_a_retry_hint(tmp_path: Path, mount: Mount) -> None:
    one = opened(tmp_path)
    for name in ("s", "t", "u"):
        one.turn(name, [1])
    end(one)
    two = opened(tmp_path)
    mount.hang()
    for name in ("s", "t", "u"):
        with pytest.raises(SessionUnusable, match="try again"):
            two.state(name)
    mount.resume()
    for name in ("s", "t", "u"):
        assert np.array_equal(two.state(name), expected_state([1]))
    two.pool.close()


def test_a_session_in_memory_does_not_wait_behind_a_hanging_store(tmp_path: Path, mount: Mount) -> None:
    """More turns than a step tries wait for the store. One whose session is in host memory needs only a slot."""
    one = opened(tmp_path)
    stored = [f"stored {number}" for number in range(100)]
    for name in stored:
        one.turn(name, [1])
    end(one)
    two = opened(tmp_path, delay=1, l1_sessions=16, l2_sessions=16)
    others = ["in memory", *(f"other {number}" for number in range(two.arena.num_slots))]
    for name in others:
        two.turn(name, [1])
    assert get_session(two, "in memory").tier is Tier.HOST and two.pool.tiers.slots.num_free == 0
    mount.hangs = True  # without a timeout
    waiting = [two.pool.turns.checkout(name) for name in stored]
    lease = two.ready(two.pool.turns.checkout("in memory"))
    assert all(turn.state is LeaseState.WAITING for turn in waiting)
    mount.resume()
    for turn in (lease, *waiting):
        two.pool.turns.release(turn)
    two.pool.close()


def test_pool_closes_while_the_store_hangs(tmp_path: Path, mount: Mount) -> None:
    one = opened(tmp_path)
    one.turn("s", [1])
    mount.hang()
    lease = one.ready(one.pool.turns.checkout("s"))
    outcome = Outcome()
    slot = one.compute(lease, [2])
    one.pool.turns.record(lease, [2], outcome)
    one.pool.turns.checkin(lease, slot)
    one.pool.poll()
    closing = threading.Thread(target=one.pool.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()


def test_queued_job_is_kept_when_a_thread_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job may be submitted while the hung jobs time out."""
    resumed, outcomes = threading.Event(), []

    def resume() -> None:
        monkeypatch.setattr(worker_threads, "JOB_TIMEOUT_S", 60.0)
        workers.submit(lambda: outcomes.append("done"), lambda: outcomes.append("given up"))

    workers = worker_threads.WorkerThreads("test-workers", 1, lambda: None)
    workers.submit(resumed.wait, resume)
    wait_for(lambda: workers._running_jobs[0] is not None, 20, "the thread has begun")
    monkeypatch.setattr(worker_threads, "JOB_TIMEOUT_S", 0.0)
    workers.time_out_hung_jobs()
    resumed.set()
    workers.close()
    assert outcomes == ["done"]


def test_thread_free_again_takes_jobs_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread is free again while queued jobs time out."""
    resumed, outcomes = threading.Event(), []
    workers = worker_threads.WorkerThreads("test-workers", 1, lambda: None)
    workers.submit(resumed.wait)
    wait_for(lambda: workers._running_jobs[0] is not None, 20, "the thread has begun")
    for name in ("first", "second"):
        workers.submit(lambda name=name: outcomes.append(name), lambda name=name: outcomes.append(name))  # type: ignore[misc]
    all_hung = iter([True])
    monkeypatch.setattr(workers, "_all_threads_hung", lambda: next(all_hung, False))
    workers.time_out_hung_jobs()
    resumed.set()
    workers.close()
    assert outcomes == ["first", "second"]


def test_thread_free_again_still_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread hangs during `close`, and the queued jobs have timed out."""
    resumed = threading.Event()
    workers = worker_threads.WorkerThreads("test-workers", 1, lambda: None)
    workers.submit(resumed.wait)
    wait_for(lambda: workers._running_jobs[0] is not None, 20, "the thread has begun")
    closing = threading.Thread(target=workers.close, daemon=True)
    closing.start()
    wait_for(lambda: workers.waiting == 1, 20, "it gets the command to end")
    monkeypatch.setattr(workers, "_all_threads_hung", lambda: True)
    workers.time_out_hung_jobs()
    resumed.set()
    closing.join(20)
    assert not closing.is_alive()
