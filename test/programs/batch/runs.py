"""Runs `app.py batch` for tests, with the fake engine's service. It runs in this process or a killable one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app import main
from routes.file_store import Batch, Status
from test.preloaded import Preloaded
from test.serving import ROOT, Service

SHORT = ("--task", "complete", "--max-tokens", "3", "--progress", "plain", "--retry", "2")


def fake_service(folder: Path, *flags: str, password: str = "", state_db: Path | None = None) -> Service:
    """Start a service that repeats the prompt once per token."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    service = Service(
        folder, "--model-path", "none", *flags, program="test/fake_app.py", state_db=state_db, PYTHONPATH=path
    )
    service.headers = {"Authorization": f"Bearer {password}"} if password else {}
    return service.wait_ready()


def batch(service: Service, source: Path, target: Path, *flags: str) -> int:
    """Run the command in this process; returns the exit code."""
    return main(["batch", str(source), "-o", str(target), "--url", service.url, *SHORT, *flags])


def started(
    service: Service, source: Path, target: Path, *flags: str, prefix: Sequence[str] = (), **options: Any
) -> subprocess.Popen[bytes]:
    """Run the command in its own process. `prefix`: a program that starts it."""
    command = [*prefix, sys.executable, str(ROOT / "app.py"), "batch", str(source), "-o", str(target)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RWKV_")}
    command += ["--url", service.url, *SHORT, *flags]
    popen: type[subprocess.Popen[bytes]] = subprocess.Popen if prefix else Preloaded
    return popen(command, cwd=ROOT, stderr=subprocess.PIPE, env=clean, **options)


def batch_record(name: str, status: Status, created_at: int, **fields: Any) -> Batch:
    """Return a batch as the store has it. It expires at once."""
    about = {"owner": "", "client": "", "endpoint": "/v1/chat/completions", "expires_at": created_at, **fields}
    about = {"input_file_id": "file-1", "completion_window": "24h", **about}
    return Batch(id=name, status=status, created_at=created_at, **about)


def write_jsonl(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def read_jsonl(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def errors_of(target: Path) -> list[Any]:
    return read_jsonl(Path(f"{target}.errors.jsonl"))
