"""What the process of a fine-tuning job leaves: its messages and its files."""

from __future__ import annotations

import asyncio
from pathlib import Path


def move_result(source: Path, target: Path) -> None:
    """Give a file its place. An earlier try may have done it."""
    target.parent.mkdir(exist_ok=True)
    if source.exists():
        source.replace(target)


async def last_lines(process: asyncio.subprocess.Process, limit: int = 16_384) -> str:
    """Return the end of what a process writes to stderr, without `error: `."""
    assert process.stderr is not None
    tail = b""
    while part := await process.stderr.read(4096):
        tail = (tail + part)[-limit:]
    return tail.decode("utf-8", "replace").rpartition("error: ")[2].strip() or "the training process failed"
