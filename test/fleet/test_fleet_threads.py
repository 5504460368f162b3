"""Races of two threads in a fleet. Engines are fake clients."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from rwkv_batch.errors import ErrorKind
from rwkv_batch.fleet.routing import FleetLimits
from test.fleet.fake_clients import FakeClient, client_with_job, make_fleet, submit, use_fake_clients


def test_the_last_notification_is_correct(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine reconnects while another thread reports that none is connected."""
    use_fake_clients(monkeypatch, FakeClient)
    heard: list[bool] = []
    threads: list[threading.Thread] = []

    def on_change(is_connected: bool) -> None:
        if not is_connected and not threads:
            threads.append(threading.Thread(target=only.connect))
            threads[0].start()
            threads[0].join(0.3)  # notified within, or right after this callback
        heard.append(is_connected)

    _, (only,) = make_fleet(FleetLimits(), 1, on_change)
    only.connect(False)
    threads[0].join()
    assert only.is_connected and heard == [True, False, True]


class PausingLock:
    """A fleet's lock. The thread of that name stops after its first hold until the other thread has continued."""

    def __init__(self, name: str) -> None:
        self._lock = threading.RLock()
        self._name = name
        self.has_stopped, self.may_continue = threading.Event(), threading.Event()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if threading.current_thread().name == self._name and not self.has_stopped.is_set():
            self.has_stopped.set()
            assert self.may_continue.wait(60)


@pytest.mark.parametrize("others", [0, 1])
def test_a_job_cancelled_while_it_moves_ends(monkeypatch: pytest.MonkeyPatch, others: int) -> None:
    """Its client disconnects while its engine is lost. The other thread is the lost engine's."""
    use_fake_clients(monkeypatch, FakeClient)
    fleet, engines = make_fleet(FleetLimits(wait_s=60.0), 1 + others)
    running = submit(fleet)
    lost, lock, choice = client_with_job(engines), PausingLock("cancels"), fleet._choose_member
    monkeypatch.setattr(fleet, "_lock", lock)
    canceller = threading.Thread(target=fleet.cancel, args=("job",), name="cancels")

    def choice_while_it_is_cancelled(in_flight_job: Any) -> Any:
        chosen = choice(in_flight_job)
        canceller.start()
        assert lock.has_stopped.wait(60)
        return chosen

    monkeypatch.setattr(fleet, "_choose_member", choice_while_it_is_cancelled)
    lost.lose()
    lock.may_continue.set()
    canceller.join(60)
    if others:
        assert client_with_job(engines).cancelled == ["job/1"]
    else:
        error = running.events[-1].error
        assert error is not None and error.kind is ErrorKind.CANCELLED and fleet.num_jobs == 0


def test_a_job_that_starts_to_wait_after_the_fleets_end_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, a model is unloaded while its engine is lost: no thread polls waiting jobs any more."""
    use_fake_clients(monkeypatch, FakeClient)
    fleet, engines = make_fleet(FleetLimits(wait_s=3600.0), 1)
    running = submit(fleet)
    monkeypatch.setattr(fleet, "_choose_member", lambda in_flight_job: fleet.stop())
    client_with_job(engines).lose()
    assert running.events[-1].error is not None and fleet.num_jobs == 0
