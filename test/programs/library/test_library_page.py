"""The programs of docs/clients.md run as printed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from test.serving import ROOT

pytestmark = pytest.mark.slow

EACH_IN_A_PROCESS = """
import os, sys, rwkv_batch.engine, rwkv_batch.runner.model_runner  # what takes longest is imported once
from rwkv_batch import LLM, RWKV, AsyncLLM
for program in sys.argv[1:]:
    if not (child := os.fork()):
        exec(compile(program, "docs/clients.md", "exec"), {"__name__": "__main__"})
        sys.exit()
    if status := os.waitpid(child, 0)[1]:
        sys.exit(f"{program} ended with {status}")
"""


def test_programs_run_as_printed(tiny_model: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    programs = [program for program in examples if "from rwkv_batch import" in program]
    assert len(programs) == 4
    shutil.copy(tiny_model, tmp_path / "model.pth")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RWKV_")}
    environment = {**clean, "PYTHONPATH": str(ROOT), "RWKV_MAX_RUNNING": "16"}
    ran = subprocess.run(
        [sys.executable, "-c", EACH_IN_A_PROCESS, *programs],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0 and "Traceback" not in ran.stderr, ran.stderr
    assert (tmp_path / "sky.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pth", "sky.safetensors"]
