"""A process that has loaded what tests load of others' packages: it forks one that runs tests, and tells how it ended.

Run by its path, since it may know no module of ours: each test run loads those of its own tree. A line of its input is
a `Wanted` as JSON; of its output there are two for each, the process's id and its exit status.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from typing import TypedDict

LOADED = ("torch", "pytest", "_pytest.main", "_pytest.python", "hypothesis.stateful", "httpx", "msgspec", "pydantic")


class Wanted(TypedDict):
    """A run of tests."""

    tree: str
    """its root, where they run and from where they import"""
    arguments: list[str]
    """of pytest"""
    environment: dict[str, str]
    cores: list[int]
    """on which they run; none: on all"""
    output: str
    """a file for what they print, and whose last line is `FAILED test` if one failed"""


class FirstFailure:
    """Ends the process at the first failure: what the test has opened is not taken down, which may take for ever."""

    def __init__(self, output: int) -> None:
        self._output = output

    def pytest_runtest_logreport(self, report: object) -> None:
        self._end(report)

    def pytest_collectreport(self, report: object) -> None:
        self._end(report)

    def _end(self, report: object) -> None:
        if getattr(report, "failed", False):
            message = f"{getattr(report, 'longreprtext', '')}\nFAILED {getattr(report, 'nodeid', '')}\n"
            os.write(self._output, message.encode(errors="replace"))
            os._exit(1)


def run(wanted: Wanted) -> int:
    """Run the tests in this process. The exit status that pytest would have."""
    os.setsid()
    output = os.open(wanted["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(wanted["tree"])
    os.environ.update(wanted["environment"])
    sys.path.insert(0, wanted["tree"])
    if wanted["cores"]:
        os.sched_setaffinity(0, wanted["cores"])
    import pytest

    return int(pytest.main(wanted["arguments"], plugins=[FirstFailure(output)]))


def main() -> None:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as test/conftest.py has it; before torch is loaded
    for name in LOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin.buffer:
        child = os.fork()
        if child == 0:
            code = 3
            try:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                code = run(json.loads(line))
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        os.write(1, b"%d\n" % child)
        _, status = os.waitpid(child, 0)
        with contextlib.suppress(BrokenPipeError):  # who asked has ended
            os.write(1, b"%d\n" % os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
