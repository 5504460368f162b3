"""What the process of a fine-tuning job leaves: its messages and its files."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from routes.file_store import Purpose, Store, StoredFile
from routes.fine_tuning.store import Job
from routes.openai.files import TTL_S

_RESULT_NAMES = {".csv": "step_metrics.csv", ".state.pth": "tuned.state.pth", ".lora.pth": "tuned.lora.pth"}
"""Endings of a tuning's files that become result files, with their names. OpenAI's .csv comes first."""


def _result_id(job: Job, ending: str) -> str:
    return f"file-{job.id.removeprefix('ftjob-')}{ending[1]}"


def store_results(store: Store, job: Job, path: Path) -> list[str]:
    """Store a job's results, whose names begin with `path`; return their ids. Raises OSError.

    An earlier try may have stored some. As for a batch's results, a full store is no reason to wait.
    """
    found = [ending for ending in _RESULT_NAMES if path.with_name(path.name + ending).exists()]
    for ending in found:
        name, content, created = _result_id(job, ending), path.with_name(path.name + ending), int(time.time())
        file = StoredFile(
            id=name, owner=job.owner, bytes=content.stat().st_size, created_at=created,
            filename=_RESULT_NAMES[ending], purpose=Purpose.FINE_TUNE_RESULTS, expires_at=created + TTL_S,
        )  # fmt: skip
        os.utime(content)  # `sweep` deletes old files without a row
        link_result(content, store.content(name))
        store.add_existing_file(file)
    return [_result_id(job, ending) for ending in found]


def delete_results(store: Store, job: Job) -> None:
    """Delete what `store_results` has stored. Raises OSError."""
    for ending in _RESULT_NAMES:
        store.delete_file(job.owner, _result_id(job, ending))


def link_result(source: Path, target: Path) -> None:
    """Give a file a second name. An earlier try may have done it. Raises OSError."""
    target.parent.mkdir(exist_ok=True)
    if not target.exists():
        os.link(source, target)


async def last_lines(process: asyncio.subprocess.Process, limit: int = 16_384) -> str:
    """Return the end of what a process writes to stderr, without `error: `."""
    assert process.stderr is not None
    tail = b""
    while part := await process.stderr.read(4096):
        tail = (tail + part)[-limit:]
    return tail.decode("utf-8", "replace").rpartition("error: ")[2].strip() or "the training process failed"
