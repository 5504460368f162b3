"""Runs a world: replaces the product's threads, clock and disk by the world's for the time of a run."""

from __future__ import annotations

import contextlib
import logging
import random
import shutil
import socket
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any

import state_pool.crash_points
import state_pool.disk.process_lock
import state_pool.layout
from test.simulation.fleet_world import FleetWorld
from test.simulation.processes import SharedLock
from test.simulation.tasks import PatchedModule, Primitives, Tasks
from test.simulation.violation import Violation
from test.simulation.world import STEPS, World

CHUNK_BYTES = 8
"""Bytes per written piece of a state, so that a state has several."""
PRODUCT = ("rwkv_batch.engine", "rwkv_batch.core", "rwkv_batch.fleet", "rwkv_batch.ipc", "state_pool")
FLEET_WORLDS = 4
"""One in this many worlds has two engines, HTTP workers and a network."""


@contextlib.contextmanager
def cooperative(world_of: Any, tasks: Tasks) -> Iterator[None]:
    """Replace the product's threads by tasks. Replace its clock and disk by the world's."""
    parts = Primitives(tasks)
    patches = {
        id(threading): PatchedModule(threading, **parts.threading),
        id(time): PatchedModule(time, **parts.time),
        id(sqlite3): PatchedModule(sqlite3, connect=lambda *a, **k: world_of().connect(*a, **k)),
        id(ThreadPoolExecutor): parts.executor,
        id(sys.modules["queue"]): PatchedModule(sys.modules["queue"], **parts.queue),
        id(SimpleQueue): parts.queue["SimpleQueue"],
        id(state_pool.crash_points.reach): lambda _point: tasks.pause(),
        id(state_pool.disk.process_lock.ProcessLock): lambda *_: _lock_of(world_of()),
        id(socket): PatchedModule(socket, socket=lambda *a: world_of().network.socket(*a)),
    }
    patches.pop(id(None), None)
    replaced: list[tuple[ModuleType, str, Any]] = []
    for name, module in list(sys.modules.items()):
        if not name.startswith(PRODUCT) or name == "state_pool.crash_points":
            continue
        for attribute, value in list(vars(module).items()):
            if id(value) in patches:
                replaced.append((module, attribute, value))
                setattr(module, attribute, patches[id(value)])
    replaced.append((state_pool.layout, "CHUNK_BYTES", state_pool.layout.CHUNK_BYTES))
    state_pool.layout.CHUNK_BYTES = CHUNK_BYTES
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(level)
        for module, attribute, value in replaced:
            setattr(module, attribute, value)


def _lock_of(world: World | FleetWorld) -> Any:
    return SharedLock(world) if isinstance(world, FleetWorld) else _NoLock()


class _NoLock:
    """Replaces the lock between processes: a world has one process."""

    is_first = True
    is_on_path = True

    def share(self) -> None: ...

    def take_alone(self) -> bool:
        return True

    def release(self) -> None: ...


class WorldFailed(AssertionError):  # noqa: N818 - the failed thing is a world
    """A world that failed, with its last events."""


def run(
    seed: int, steps: int = STEPS, without: frozenset[str] = frozenset(), is_fleet: bool | None = None
) -> dict[str, int]:
    """Run one world from beginning to end and return its counts. Raises WorldFailed.

    is_fleet: whether it has several engines; None: as the seed says
    """
    is_fleet = seed % FLEET_WORLDS == 3 if is_fleet is None else is_fleet
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="world-", dir=memory if memory.is_dir() else None))
    tasks = Tasks(random.Random(f"{seed} order"))
    worlds: list[World | FleetWorld] = []
    kind = FleetWorld if is_fleet else World
    try:
        with cooperative(lambda: worlds[0], tasks):
            try:
                worlds.append(kind(seed, folder, tasks, without))
                worlds[0].run(steps)
            except (Exception, Violation) as error:
                trace = "\n  ".join(worlds[0].clients.log)
                reported = f"{type(error).__name__}: {error}"
                at = worlds[0].counts["steps"]
                raise WorldFailed(f"seed {seed}, step {at}: {reported}\n{worlds[0].settings}\n  {trace}") from error
            finally:
                tasks.kill()
                for connection in worlds[0].connections:
                    connection.close()
        return {**worlds[0].counts, **worlds[0].clients.counts, "digest": worlds[0].clients.digest}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
