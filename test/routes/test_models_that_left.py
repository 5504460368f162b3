"""An HTTP worker keeps nothing of unloaded models."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest

from routes.config import HttpConfig
from routes.context import Context, Readiness, RequestLimiter
from routes.model_connections import connect_model
from routes.model_registry import ModelRegistry
from rwkv_batch.fleet.quota_ledger import QuotaLedger
from rwkv_batch.ipc.served_model import ModelSpec, ModelStatus, ServedModel
from rwkv_batch.ipc.wire import NO_LOAD, Heartbeat, SocketLink, ToEngine, ToWorker, to_engine_decoder
from test.serving import wait_for

WARM, ROUNDS = 3, 20


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path, because a socket's path has at most 100 characters."""
    with TemporaryDirectory() as path:
        yield Path(path)


def engine_at(address: str) -> threading.Thread:
    """An engine that reports ready until the worker is gone."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()

    def serve() -> None:
        with listener:
            link: SocketLink[ToEngine, ToWorker] = SocketLink(listener.accept()[0], to_engine_decoder, "engine")
        link.send(Heartbeat(NO_LOAD))
        for _ in link.receive():
            pass

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def kept() -> tuple[int, int, int]:
    """Count the objects, threads and descriptors of this process."""
    gc.collect()
    return len(gc.get_objects()), threading.active_count(), len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="this system does not list the descriptors of a process")
def test_a_worker_keeps_nothing_of_unloaded_models(folder: Path) -> None:
    context = Context(None, HttpConfig(models_dir=str(folder)), RequestLimiter(4, 0), Readiness(1.0))  # type: ignore[arg-type]
    models = ModelRegistry(lambda command: None, lambda model: connect_model(context, model, "http-0", QuotaLedger()))

    def one_round(number: int) -> None:
        address = str(folder / f"{number}")
        engine = engine_at(address)
        spec = ModelSpec(name=f"round-{number}", file="file")
        ready = ServedModel(spec=spec, status=ModelStatus.READY, address=address, since=0)
        models.update([msgspec.structs.replace(ready, status=ModelStatus.LOADING)])
        models.update([ready])
        wait_for(lambda: models.select_model(context, spec.name).engine.is_connected, 10, "a connection")
        assert models.pop_used() == (spec.name,)
        models.update([])
        engine.join(10)
        assert not engine.is_alive()

    for number in range(WARM):
        one_round(number)
    wait_for(
        lambda: not any(thread.name in ("fleet", "engine-client") for thread in threading.enumerate()), 10, "their end"
    )
    before = kept()
    for number in range(WARM, WARM + ROUNDS):
        one_round(number)
    wait_for(lambda: kept()[1] <= before[1], 10, "the end of threads")
    after = kept()
    assert after[0] < before[0] + ROUNDS, "objects are left by every round"
    assert after[1:] <= before[1:], "threads or descriptors are left"
