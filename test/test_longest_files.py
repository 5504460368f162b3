"""The scheduler of pytest's workers."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCHEDULER = """
from test import longest_files
def pytest_xdist_make_scheduler(config, log):
    return longest_files.scheduler(config, log)
"""
KILLED_ONCE = """
import os, signal
from pathlib import Path
def test_killed_once():
    if not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_ends_after_a_worker_was_killed(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(SCHEDULER)
    for number in range(9):
        (tmp_path / f"test_{number}.py").write_text("def test_it(): pass\n" if number != 6 else KILLED_ONCE)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    flags = ("-q", "-n2", "--dist=loadfile", "--no-loadscope-reorder", "-pno:cacheprovider")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *flags],
        cwd=tmp_path, env={**variables, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.returncode == 1, run.stdout
    assert "crashed while running 'test_6.py::test_killed_once'" in run.stdout and "1 failed, 9 passed" in run.stdout


def test_a_logger_may_be_made_while_they_are_walked() -> None:
    logging.getLogger("walked")
    for _ in logging.Logger.manager.loggerDict.values():
        logging.getLogger("made while they are walked")
