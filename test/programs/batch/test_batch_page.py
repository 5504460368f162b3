"""The commands of docs/batch.md run as printed."""

from __future__ import annotations

import gzip
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from app import main
from test.programs.batch.runs import read_jsonl, write_jsonl
from test.serving import ROOT, Service

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "batch.md").read_text(encoding="utf-8")


def test_commands_run_as_printed(fake: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = re.search(r"```bash\n(?=# Translate)(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    commands = [shlex.split(line) for line in block.group(1).splitlines() if line.startswith("python")]
    write_jsonl(tmp_path / "news.jsonl", [{"text": f"Something has happened in town {i}."} for i in range(6)])
    (tmp_path / "questions.csv").write_text("id,question\n1,Why?\n2,How?\n")
    (tmp_path / "lines.txt.gz").write_bytes(gzip.compress(b"One.\nTwo.\nOne.\n"))
    monkeypatch.chdir(tmp_path)
    for command in commands:
        assert command[:3] == ["python", "app.py", "batch"]
        assert main([*command[2:], "--url", fake.url]) == 0, command
    assert [set(line) for line in read_jsonl(tmp_path / "titles.jsonl")] == [{"text", "title"}] * 6
    assert len(read_jsonl(tmp_path / "news.1.jsonl")) == 3
    assert (tmp_path / "answers.csv").read_text().startswith("id,question,answer\n1,Why?,")
    assert gzip.decompress((tmp_path / "lines.fr.txt.gz").read_bytes()).count(b"\n") == 3


def test_the_sdks_program_runs_as_printed(service: Service, tmp_path: Path) -> None:
    block = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    program = block.group(1).replace("http://127.0.0.1:8000", service.url)
    ran = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("completed ") and len(re.findall(r"^line-\d+ ", ran.stdout, re.MULTILINE)) == 20
