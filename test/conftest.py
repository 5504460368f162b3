"""Fixtures of the tests that use a real service."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import itertools
import logging
import os
import re
import ssl
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in the engine process; before torch is loaded
if "PYTEST_XDIST_WORKER" in os.environ:  # one worker per core; tests with several threads use `two_threads`
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):  # otherwise each child process compiles all modules
    sys.dont_write_bytecode = False

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from test.preloaded import Preloaded
from test.serving import Service

Service.popen = Preloaded
MEMORY_GROWTH_MB = 500
"""Growth after which the garbage collector runs for ended engines."""
_memory = {"most": MEMORY_GROWTH_MB}
HERE = Path(__file__).resolve().parent
ANSWER_S = 60.0
"""Default request timeout: httpx's five seconds are too short on a busy machine."""
for _part in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _part, ANSWER_S)
ssl.create_default_context = functools.cache(ssl.create_default_context)
"""Clients share a context. Each new one would read the certificates, which takes 30 ms of CPU time."""
SHARED = ("service", "fake", "one_worker", "keyed_fake", "strict", "demo")
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


def rest_slow(values: Collection[Any], daily: int = 1, long: Collection[Any] = ()) -> list[Any]:
    """Return the values of a parametrised test. All but the first `daily` are marked `slow`, some also `long`."""
    slow = [
        pytest.param(
            *(one if type(one) is tuple else (one,)),
            marks=[pytest.mark.slow, *([pytest.mark.long] if one in long else ())],
        )
        for one in values
    ]
    return [*itertools.islice(values, daily), *slow[daily:]]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import a file of which `-m "not (slow or ...)"` selects nothing: imports take most of a collection."""
    left_out = re.fullmatch(r"not \(([\w ]+)\)", config.getoption("markexpr"))
    if left_out is None or collection_path.suffix != ".py":
        return None
    marks = re.findall(r"^pytestmark = .*", collection_path.read_text(encoding="utf-8"), re.MULTILINE)
    found = {*re.findall(r"pytest\.mark\.(\w+)", " ".join(marks))}
    if collection_path.parent.name in SLOW_FOLDERS:
        found.add("slow")
    return True if found & {*left_out[1].split(" or ")} else None


def pytest_configure() -> None:
    """Disable garbage collection during test collection: imported objects stay, and scanning them is slow."""
    gc.disable()


def pytest_runtest_setup() -> None:
    """Seed torch, forget the request and the log, so that no test depends on earlier ones."""
    # A command's handler writes to the stream of its test, which is closed now.
    logging.root.handlers[:] = [one for one in logging.root.handlers if type(one) is not logging.StreamHandler]
    logging.root.setLevel(logging.WARNING)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(0)
    if (context := sys.modules.get("routes.request_context")) is not None:
        context.set_current_request(context.RequestContext())


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
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The service with the demo model, as on a first start."""
    with Service(tmp_path_factory.mktemp("demo")) as running:
        yield running


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with the fake engine, shared like `service`."""
    from test.programs.batch.runs import fake_service

    with fake_service(tmp_path_factory.mktemp("fake")) as running:
        yield running


@functools.cache
def _group(file: Path) -> str:
    """Return what a file shares: the service of its tests and fixtures, the emulation's headers, or only its name."""
    if file.name.endswith("_emulated.py"):
        return "emulated"
    text = file.read_text(encoding="utf-8")
    used = re.findall(r"^(?:def test_|@pytest\.fixture.*\ndef )\w+\(.*\b(\w+): Service\b", text, re.MULTILINE)
    used += re.findall(r"getfixturevalue\(\"(\w+)", text)
    return next((name for name in SHARED if name in used and f"\ndef {name}(" not in text), str(file))


class _Groups(LoadFileScheduling):
    """`--dist loadfile`, but files that share a service go to one worker."""

    def _split_scope(self, nodeid: str) -> str:
        return _group(HERE.parent / super()._split_scope(nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    return _Groups(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the files by service, those with slow tests first: no long one then runs alone at the end.

    Tests marked `long` are left out without RWKV_LONG_TESTS=1.
    """
    items[:] = [item for item in items if IS_LONG or not item.get_closest_marker("long")]
    for item in items:
        if item.path.parent.name in SLOW_FOLDERS:
            item.add_marker(pytest.mark.slow)
    slow = {_group(item.path) for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: ((group := _group(item.path)) not in slow, group not in SHARED, group))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop a shared service after the last file that uses it: an idle one takes 1 % of a core.

    A later test starts a new one.
    """
    if nextitem is None or _group(item.path) != _group(nextitem.path):
        for name in SHARED:
            for one in item.session._fixturemanager.getfixturedefs(name, item) or ():
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
