"""Files that requests may name: those within --models-dir, whatever the name says."""

from __future__ import annotations

from pathlib import Path


def within(folder: str, file: str) -> Path | None:
    """The path of `file` in the folder, links followed; None if it leads out of it, or is no path."""
    root = Path(folder).resolve()
    try:
        path = (root / file).resolve()
    except (OSError, ValueError, RuntimeError):  # a null byte, a name that is too long, a circle of links
        return None
    return path if path != root and path.is_relative_to(root) else None
