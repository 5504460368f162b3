"""Fixtures of the tests that use a real service."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import logging
import os
import ssl
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in the engine process; before torch is loaded
if "PYTEST_XDIST_WORKER" in os.environ:  # one worker per core; tests with several threads use `two_threads`
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):  # otherwise each child process compiles all modules
    sys.dont_write_bytecode = False

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, settings

from test.serving import Service

MEMORY_GROWTH_MB = 500
"""Growth after which the garbage collector runs for ended engines."""
_memory = {"most": MEMORY_GROWTH_MB}
HERE = Path(__file__).parent
ANSWER_S = 60.0
"""Default request timeout: httpx's five seconds are too short on a busy machine."""
for _part in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _part, ANSWER_S)
ssl.create_default_context = functools.cache(ssl.create_default_context)
"""Clients share a context. Each new one would read the certificates, which takes 30 ms of CPU time."""
SHARED = ("service", "one_worker", "fake", "locked_fake", "demo")
"""Fixtures of services. One worker runs all files that use the same one, which then starts once."""
SLOW_FOLDERS = ("bench", "demo", "deploy", "fleet", "typing", "web")
M_MMAP_THRESHOLD = -3
LIBC = ctypes.CDLL(None)
with contextlib.suppress(AttributeError):
    # Return memory of ended engines to the system: glibc would keep it in an arena per thread.
    LIBC.mallopt(M_MMAP_THRESHOLD, 1 << 20)


class Loggers(dict[str, Any]):
    """Every logger by name. Safe to iterate while a thread of an earlier test imports a module and adds one."""

    def values(self) -> Any:
        return super().copy().values()


logging.Logger.manager.loggerDict = Loggers(logging.Logger.manager.loggerDict)

# The same examples in each run, without a deadline. RWKV_LONG_TESTS=1 tries new ones.
IS_LONG = "RWKV_LONG_TESTS" in os.environ
settings.register_profile(
    "steady", deadline=None, derandomize=not IS_LONG, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")


def pytest_configure() -> None:
    """Disable garbage collection during test collection: imported objects stay, and scanning them is slow."""
    gc.disable()


def pytest_runtest_setup() -> None:
    """Seed torch, so that random numbers do not depend on earlier tests."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(0)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Give kernels two threads; a worker of `make test` has one."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded random model in a real file: 2 layers of width 64, the full vocabulary."""
    from demo.random_weights import write_random_model

    return write_random_model(tmp_path_factory.mktemp("model") / "tiny.pth", layers=2, width=64)


@pytest.fixture(scope="session")
def service(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service without a password. All tests that leave its state unchanged share it."""
    with Service(tmp_path_factory.mktemp("service"), "--model-path", str(tiny_model), "--threads", "2") as running:
        yield running


@pytest.fixture(scope="session")
def one_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Another service, with one HTTP worker that answers all constrained requests."""
    from test.harness import tiny_model

    folder = tmp_path_factory.mktemp("service")
    with Service(folder, "--model-path", str(tiny_model(folder)), "--http-workers", "1") as running:
        yield running


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with the fake engine, shared like `service`."""
    from test.programs.batch.runs import fake_service

    with fake_service(tmp_path_factory.mktemp("fake")) as running:
        yield running


def _shared(item: pytest.Item) -> list[pytest.FixtureDef[Any]]:
    """Return the fixtures of shared services that the test's file could use."""
    found = (item.session._fixturemanager.getfixturedefs(name, item) or [] for name in SHARED)
    return [one for defined in found for one in defined[-1:] if one.scope in ("session", "package")]


def _group(item: pytest.Item | None) -> str:
    mark = item and item.get_closest_marker("xdist_group")
    return str(mark.args[0]) if mark else ""


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each file to one worker, with the other files of its service. Groups with slow tests come first."""
    groups: dict[Path, str] = {}
    for item in items:
        if item.path.parent.name in SLOW_FOLDERS:
            item.add_marker(pytest.mark.slow)
        used = [one.argname for one in _shared(item) if one.argname in item.fixturenames]  # type: ignore[attr-defined]
        default = "emulated" if item.path.name.endswith("_emulated.py") else item.path.relative_to(HERE).as_posix()
        groups.setdefault(item.path, default)
        if used:
            groups[item.path] = used[0]
    for item in items:
        item.add_marker(pytest.mark.xdist_group(groups[item.path]))
    slow = {_group(item) for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (_group(item) not in slow, _group(item)))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop a shared service after the last file that uses it: an idle one takes 1 % of a core.

    A later test starts a new one.
    """
    if _group(item) in SHARED and _group(item) != _group(nextitem):
        for one in _shared(item):
            one.finish(item._request)  # type: ignore[attr-defined]


def pytest_collection_finish() -> None:
    """Freeze what was imported and collected. Full collections are then fast and free ended engines soon."""
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)  # by default a test of 100,000 objects walks all those of earlier tests 20 times
    gc.enable()


@pytest.fixture(autouse=True)
def _release_memory() -> Iterator[None]:
    """Free ended engines: their callbacks form reference cycles of 0.3 GB each."""
    yield
    if _resident_mb() > _memory["most"]:
        gc.unfreeze()  # `started_engine` freezes what is there
        gc.collect()
        gc.freeze()
        with contextlib.suppress(AttributeError):
            LIBC.malloc_trim(0)
        _memory["most"] = _resident_mb() + MEMORY_GROWTH_MB


def _resident_mb() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
