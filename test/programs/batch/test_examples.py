"""The programs in examples/ run as described."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from test.serving import ROOT, Service, free_port, wait_for

pytestmark = pytest.mark.slow


def example(name: str, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)


def test_a_book_is_translated_paragraph_by_paragraph(service: Service, tmp_path: Path) -> None:
    book, output = tmp_path / "book.txt", tmp_path / "book.de.txt"
    book.write_text("One.\nStill one.\n\n\nTwo.\n \nOne.\nStill one.\n")
    flags = ("--source-lang", "en", "--target-lang", "de", "--url", service.url)
    ran = example("translate_book.py", str(book), str(output), *flags)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "book.de.jsonl").read_text().count("translation") == 3
    again = example("translate_book.py", str(book), str(output), *flags)
    assert again.returncode == 0, again.stderr


def test_dialogues_at_once(service: Service) -> None:
    ran = example("dialogues.py", "--url", service.url, "--dialogues", "8", "--max-tokens", "3")
    assert ran.returncode == 0 and ran.stdout.startswith("8 dialogues of 3 turns: "), ran.stderr


def test_the_harness_gets_the_services_routes(tmp_path: Path) -> None:
    """lm_eval itself: test/routes/test_lm_eval.py."""
    fake = tmp_path / "lm_eval"
    fake.write_text('#!/bin/sh\necho "$@"\nexit 3\n')
    fake.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "OPENAI_API_KEY": "s3cret"}
    flags = ("--url", "http://there:8000", "--tasks", "arc_easy", "--limit", "5")
    ran = example("evaluate.py", *flags, env=environment)
    assert ran.returncode == 3
    args = "model=rwkv7,base_url=http://there:8000/openai/v1/completions,num_concurrent=8,max_length=4096"
    assert f"--model_args {args},auth_token=s3cret --tasks arc_easy" in ran.stdout and "--limit 5" in ran.stdout
    without = example("evaluate.py", env={**os.environ, "PATH": str(tmp_path / "empty")})
    assert without.returncode == 1 and "lm_eval[api]" in without.stderr


def test_each_visitor_of_a_web_backend_has_a_session(service: Service, tmp_path: Path) -> None:
    """Runs the commands that the example prints."""
    path, port = ROOT / "examples" / "web_backend.py", free_port()
    printed = re.search(r'"""(.*?)"""', path.read_text(encoding="utf-8"), re.DOTALL)
    assert printed is not None
    commands = [line.strip() for line in printed.group(1).splitlines() if line.startswith("    ")]
    commands = [line.replace("http://127.0.0.1:8000", service.url).replace("8080", str(port)) for line in commands]
    start, first, second, forget = map(shlex.split, commands)
    backend = subprocess.Popen([sys.executable, str(path), *start[2:], "--max-tokens", "4"])
    try:
        wait_for(lambda: httpx.get(f"http://127.0.0.1:{port}/").status_code == 404, 30, "the backend listens")
        for command in (first, second):
            ran = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60, check=True)
            assert ran.stdout.endswith(b"\n")
        (session,) = re.findall(r"conversation\t(\S+)", (tmp_path / "jar").read_text())
        listed = service.post("/state/status", {}).json()["sessions"]
        mine = [one for one in listed if one["session_id"] == session]
        assert len(mine) == 1, "two turns, one session"
        other = httpx.post(f"http://127.0.0.1:{port}/say", content="Hi!", timeout=60)
        assert other.cookies["conversation"] != session
        subprocess.run(forget, cwd=tmp_path, timeout=60, check=True)
        listed = service.post("/state/status", {}).json()["sessions"]
        assert session not in [one["session_id"] for one in listed]
        assert other.cookies["conversation"] in [one["session_id"] for one in listed]
    finally:
        backend.kill()
        backend.wait()
