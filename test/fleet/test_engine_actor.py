"""An engine's actor always ends, even if parts fail or hang. Ray and the engine are fakes."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from rwkv_batch.config import EngineConfig
from rwkv_batch.ipc.buffered_link import BufferedLink
from rwkv_batch.ipc.process import LogConfig
from rwkv_batch.ipc.served_model import ModelStatus
from test.fleet.fake_ray import FakeRay, GetTimeoutError
from test.serving import wait_for

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
"""A thread that would end the process raises SystemExit instead."""


class FakeEngine:
    """An engine that is ready at once. It ends as the test decides."""

    def __init__(self, ends: Callable[[], None]) -> None:
        self._ends = ends

    def drain(self, timeout_s: float) -> None:
        self._ends()

    def stop(self) -> None:
        pass


Start = Callable[..., Any]


class Ended:
    def __init__(self) -> None:
        self.process = threading.Event()
        self.has_left = threading.Event()
        self.fault: Exception | None = None

    def leave(self, name: str) -> None:
        self.has_left.set()
        if self.fault is not None:
            raise self.fault

    def exit(self, code: int) -> None:
        self.process.set()
        raise SystemExit


def frame_of(message: int) -> bytes:
    """A message of an HTTP worker, in one piece."""
    other = BufferedLink[Any, int](msgspec.msgpack.Decoder(list[int]))
    other.send(message)
    (piece,) = other.take(0.0) or []
    return piece


@pytest.fixture
def ended() -> Ended:
    return Ended()


@pytest.fixture
def started(ray: FakeRay, ended: Ended, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    from rwkv_batch.fleet.actors import engine_actor

    monkeypatch.setattr(os, "_exit", ended.exit)
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    monkeypatch.setattr(engine_actor, "remove_engine_actor", ended.leave)
    monkeypatch.setattr(engine_actor, "set_up_logging", lambda name, log_config: None)
    monkeypatch.setattr(engine_actor, "SHUTDOWN_GRACE_S", 0.0)
    monkeypatch.setattr(engine_actor, "EngineServer", lambda engine: None)
    monkeypatch.setattr(engine_actor, "EngineMonitor", lambda engine, config: lambda: None)

    def start(ends: Callable[[], None]) -> Any:
        monkeypatch.setattr(engine_actor, "started_engine", lambda config, factory: FakeEngine(ends))
        config = EngineConfig(model_path="/x.pth", drain_timeout_s=0.0)
        actor = engine_actor.EngineActor("engine-0", config, "m:E", LogConfig(), "x")
        wait_for(lambda: actor.info().status is ModelStatus.READY, 10, "it serves")
        return actor

    yield start
    for name in ("engine-life", "engine-end"):  # before os._exit is restored; the first starts the second
        for thread in threading.enumerate():
            if thread.name == name:
                thread.join(60)
                assert not thread.is_alive()


@pytest.mark.parametrize("will_restart", [True, False])
def test_an_engine_that_fails_at_the_end_ends(
    started: Start, ended: Ended, will_restart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise RuntimeError("a disk")

    actor = started(fails)
    monkeypatch.setattr(actor, "_kill_after_timeout", lambda: None)
    actor.drain(will_restart)
    assert ended.process.wait(60) and ended.has_left.is_set() is not will_restart


def test_an_engine_that_hangs_at_the_end_ends(started: Start, ended: Ended) -> None:
    hangs = threading.Event()
    try:
        started(hangs.wait).drain(False)
        assert ended.process.wait(60) and ended.has_left.is_set()
    finally:
        hangs.set()


@pytest.mark.parametrize("gives_up", [True, False])
def test_messages_after_a_pause_wait_for_the_next_message(started: Start, gives_up: bool) -> None:
    """Otherwise a turn could run twice. Its sender may have moved it to another engine."""
    actor, link = started(lambda: None), BufferedLink[Any, Any](msgspec.msgpack.Decoder(list[int]))
    actor._links["worker"] = link
    assert actor.push("worker", [frame_of(1)], 0) and link.has_input
    link._last_put_at -= 2.0
    assert actor.push("worker", [frame_of(2)], 0) and len(link._inbox) == 1
    if gives_up:
        actor.close_link("worker")
        assert list(link.receive()) == []
    else:
        link._last_put_at -= 2.0
        assert actor.push("worker", [frame_of(3)], 0), "even if it is slow"
        incoming = link.receive()
        assert [next(incoming) for _ in range(3)] == [1, 2, 3]
    actor.drain(False)


def test_a_watcher_may_arrive_while_another_leaves(
    started: Start, ended: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = started(lambda: None)
    actor.info("leaves")
    actor._watchers = {"gone": -1e9, **actor._watchers}
    clock, this = time.monotonic, threading.current_thread()

    def arrives() -> float:
        if threading.current_thread() is this:
            actor._watchers["comes"] = clock()
        return clock()

    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", arrives)
        assert actor.leave("leaves"), "the earlier watchers are gone"
    assert ended.process.wait(60)


def test_killed_watchers_are_forgotten(started: Start, ended: Ended) -> None:
    actor = started(lambda: None)
    actor._watchers = {f"killed {number}": -1e9 for number in range(9)}
    actor.info("alive")
    assert list(actor._watchers) == ["alive"]
    assert actor.leave("alive") and ended.process.wait(60)


def test_an_engine_that_cannot_reach_the_head_ends(started: Start, ended: Ended) -> None:
    ended.fault = GetTimeoutError("the head is away")
    started(lambda: None).drain(False)
    assert ended.process.wait(60) and ended.has_left.is_set()
