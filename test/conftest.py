"""Fixtures shared by the tests that talk to a real service."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in the engine process; before torch is loaded
if "PYTEST_XDIST_WORKER" in os.environ:  # the cores have a worker each; tests of several threads ask for them
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):  # else each process that a test starts compiles the tree again
    sys.dont_write_bytecode = False

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, settings

from test import longest_files
from test.serving import Service

MEMORY_GROWTH_MB = 500
"""By which memory may grow until what has ended is looked for."""
_memory = {"most": MEMORY_GROWTH_MB}
ANSWER_S = 60.0
"""How long a request waits that says nothing of it: httpx's five seconds are soon over on a busy machine."""
for _part in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _part, ANSWER_S)
_running: dict[str | None, pytest.FixtureDef[Any]] = {}
"""What the files of a group share, by the group's name."""
M_MMAP_THRESHOLD = -3
LIBC = ctypes.CDLL(None)
with contextlib.suppress(AttributeError):
    # Memory of engines that have ended goes back: glibc would else keep it, in an arena for each of their threads.
    LIBC.mallopt(M_MMAP_THRESHOLD, 1 << 20)


class Loggers(dict[str, Any]):
    """Every logger by name. pytest walks them before each part of a test, while a thread of a test that has ended may
    import a module, which makes one."""

    def values(self) -> Any:
        """As they are now."""
        return super().copy().values()


logging.Logger.manager.loggerDict = Loggers(logging.Logger.manager.loggerDict)

# The same examples in each run, however long a busy machine takes for one; RWKV_LONG_TESTS=1 looks for others.
IS_LONG = "RWKV_LONG_TESTS" in os.environ
settings.register_profile(
    "steady", deadline=None, derandomize=not IS_LONG, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")


def pytest_configure() -> None:
    """Until all tests are collected nothing looks for garbage: what is imported stays, and would be walked often."""
    gc.disable()


def pytest_runtest_setup() -> None:
    """What torch draws without a generator does not depend on the tests before, which another worker may have."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(0)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Kernels share their work out, also where a worker of `make test` has one thread."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded random model in a real file: 2 layers of width 64, the whole vocabulary."""
    from demo.random_weights import write_random_model

    return write_random_model(tmp_path_factory.mktemp("model") / "tiny.pth", layers=2, width=64)


@pytest.fixture(scope="session")
def service(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service without a password, shared by every test that leaves it as it was."""
    running = Service(tmp_path_factory.mktemp("service"), "--model-path", str(tiny_model), "--threads", "2")
    try:
        yield running.wait_ready()
    finally:
        running.close()


@pytest.fixture(scope="session")
def one_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Another one, whose only HTTP worker answers all that hold their text to a form."""
    from test.harness import tiny_model

    folder = tmp_path_factory.mktemp("service")
    running = Service(folder, "--model-path", str(tiny_model(folder)), "--http-workers", "1")
    try:
        yield running.wait_ready()
    finally:
        running.close()


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with the fake engine, shared like `service`."""
    from test.programs.batch.runs import fake_service

    running = fake_service(tmp_path_factory.mktemp("fake"))
    try:
        yield running
    finally:
        running.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first (`make test` deals them in this order)."""
    if missing_files := longest_files.missing_files():
        raise pytest.UsageError(f"test/longest_files.py names what is not there: {', '.join(missing_files)}")
    if unlisted_files := longest_files.unlisted_files(items):
        raise pytest.UsageError(
            f"SHARING in test/longest_files.py is to name those that share: {', '.join(unlisted_files)}"
        )
    items.sort(key=lambda item: longest_files.sort_key(item.path))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """A service that files share ends with the last of them: one that idles takes a hundredth of a core.

    Whoever asks for it later has it started again.
    """
    here, then = (one and longest_files.group(one.nodeid.partition("::")[0]) for one in (item, nextitem))
    if (found := longest_files.shared(item)) is not None:
        _running[here] = found
    if here != then and here in _running:
        _running.pop(here).finish(item._request)  # type: ignore[attr-defined]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """See test/longest_files.py."""
    return longest_files.scheduler(config, log)


def pytest_collection_finish() -> None:
    """What was imported stays; without it a full collection is quick, and comes soon after an engine has ended."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _release_memory() -> Iterator[None]:
    """Engines hold themselves by their callbacks, 0.3 GB each: those that have ended go before there are many."""
    yield
    if _resident_mb() > _memory["most"]:
        gc.collect()
        with contextlib.suppress(AttributeError):
            LIBC.malloc_trim(0)
        _memory["most"] = _resident_mb() + MEMORY_GROWTH_MB


def _resident_mb() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
