"""What a fleet does where two threads meet in it; engines are played by hand."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from rwkv_batch.errors import ErrorKind
from rwkv_batch.fleet.fleet import FleetLimits
from test.fleet.fake_clients import Played, having, made, play, submit


def test_what_is_told_last_of_the_fleet_is_true(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine comes back while another thread is telling that there is none."""
    play(monkeypatch, Played)
    heard: list[bool] = []
    threads: list[threading.Thread] = []

    def on_change(is_connected: bool) -> None:
        if not is_connected and not threads:
            threads.append(threading.Thread(target=only.connect))
            threads[0].start()
            threads[0].join(0.3)  # told within, or as soon as this has been told
        heard.append(is_connected)

    _, (only,) = made(FleetLimits(), 1, on_change)
    only.connect(False)
    threads[0].join()
    assert only.is_connected and heard == [True, False, True]


class StopsBehind:
    """A fleet's lock; the thread of that name stops behind the first hold until the other has gone on."""

    def __init__(self, name: str) -> None:
        self._lock = threading.RLock()
        self._name = name
        self.stands, self.goes_on = threading.Event(), threading.Event()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if threading.current_thread().name == self._name and not self.stands.is_set():
            self.stands.set()
            assert self.goes_on.wait(60)


@pytest.mark.parametrize("others", [0, 1])
def test_a_job_that_is_cancelled_while_it_is_handed_on_ends(monkeypatch: pytest.MonkeyPatch, others: int) -> None:
    """Its client goes away in the moment in which its engine is lost; the other thread is the lost engine's."""
    play(monkeypatch, Played)
    fleet, engines = made(FleetLimits(wait_s=60.0), 1 + others)
    running = submit(fleet)
    lost, lock, choice = having(engines), StopsBehind("cancels"), fleet._choose_member
    monkeypatch.setattr(fleet, "_lock", lock)
    canceller = threading.Thread(target=fleet.cancel, args=("job",), name="cancels")

    def choice_while_it_is_cancelled(in_flight_job: Any) -> Any:
        chosen = choice(in_flight_job)
        canceller.start()
        assert lock.stands.wait(60)
        return chosen

    monkeypatch.setattr(fleet, "_choose_member", choice_while_it_is_cancelled)
    lost.lose()
    lock.goes_on.set()
    canceller.join(60)
    if others:
        assert having(engines).cancelled == ["job/1"]
    else:
        error = running.events[-1].error
        assert error is not None and error.kind is ErrorKind.CANCELLED and fleet.num_jobs == 0


def test_a_job_that_comes_to_wait_behind_the_fleets_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a model that is unloaded while its engine is lost: nobody looks after the waiting ones any more."""
    play(monkeypatch, Played)
    fleet, engines = made(FleetLimits(wait_s=3600.0), 1)
    running = submit(fleet)
    monkeypatch.setattr(fleet, "_choose_member", lambda in_flight_job: fleet.stop())
    having(engines).lose()
    assert running.events[-1].error is not None and fleet.num_jobs == 0
