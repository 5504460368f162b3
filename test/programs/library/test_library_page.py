"""The programs of docs/clients.md run as printed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from test.preloaded import Preloaded
from test.serving import ROOT

pytestmark = pytest.mark.slow


def test_programs_run_as_printed(tiny_model: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    page = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    programs = [program for program in examples if "from rwkv_batch import" in program]
    assert len(programs) == 4
    shutil.copy(tiny_model, tmp_path / "model.pth")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RWKV_")}
    environment = {**clean, "PYTHONPATH": str(ROOT), "RWKV_MAX_RUNNING": "16"}
    for number, program in enumerate(programs):
        file = tmp_path_factory.mktemp("page") / f"program_{number}.py"
        file.write_text(program, "utf-8")
        command = [sys.executable, "-P", str(file)]
        with Preloaded(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as ran:
            _, errors = ran.communicate(timeout=240)
        assert ran.returncode == 0 and b"Traceback" not in errors, f"{program}\n{errors.decode()}"
    assert (tmp_path / "sky.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pth", "sky.safetensors"]
