"""pytest plugin of `bench.mutants`: records which tests run which lines, or runs given tests in a given order."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

RECORD = "MUTANT_RECORD"
"""Environment variable: the file for each test's outcome and seconds."""
SELECT = "MUTANT_SELECT"
"""Environment variable: the file with the tests to run, in order, each with its time limit."""
IMPORT = "import"
"""Coverage context of lines that run before the first test."""
_seconds: dict[str, float] = {}
_failed: set[str] = set()
_ended: list[int] = []
"""exit status, once known"""


def _switch(context: str) -> None:
    import coverage

    if (running := coverage.Coverage.current()) is not None:
        running.switch_context(context)


def pytest_configure() -> None:
    if RECORD in os.environ:
        _switch(IMPORT)


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if RECORD in os.environ:
        _switch(item.nodeid)
    yield


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] = _seconds.get(report.nodeid, 0.0) + report.duration
    if report.outcome != "passed":
        _failed.add(report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:  # a missing package, for example
        _failed.add(report.nodeid)


def pytest_sessionfinish(exitstatus: int) -> None:
    _ended.append(int(exitstatus))
    if target := os.environ.get(RECORD):
        passed = {name: round(taken, 3) for name, taken in _seconds.items() if name not in _failed}
        Path(target).write_text(json.dumps({"passed": passed, "failed": sorted(_failed)}))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not (source := os.environ.get(SELECT)):
        return
    limits: dict[str, float] = dict(json.loads(Path(source).read_text()))
    position: dict[Any, int] = {name: place for place, name in enumerate(limits)}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in limits])
    items[:] = sorted((item for item in items if item.nodeid in limits), key=lambda item: position[item.nodeid])
    for item in items:
        item.add_marker(pytest.mark.timeout(limits[item.nodeid], method="thread"))


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """End the process although a failed test left threads."""
    if {SELECT, RECORD} & os.environ.keys() and _ended:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_ended[0])
