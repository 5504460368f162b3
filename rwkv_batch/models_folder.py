"""Files that requests may name: those within --models-dir, whatever the name says."""

from __future__ import annotations

from pathlib import Path

from rwkv_batch.errors import invalid

ADAPTER_CONFIG = "adapter_config.json"
"""What is read beside an adapter's file of PEFT's."""


def within(folder: str, file: str) -> Path | None:
    """The path of `file` in the folder, links followed; None if it leads out of it, or is no path."""
    root = Path(folder).resolve()
    try:
        path = (root / file).resolve()
        path.exists()
    except (OSError, ValueError, RuntimeError):  # a null byte, a name that is too long, a circle of links
        return None
    return path if path != root and path.is_relative_to(root) else None


def path_within(folder: str, file: str, field: str, alternative: str = "") -> Path:
    """The path in --models-dir of what a request's field names; `alternative`: what a client may do without that folder.

    Raises ServiceError where no folder is open, or the path leads out of it.
    """
    if not folder:
        raise invalid(field, f"no folder is open to requests; start with --models-dir{alternative}", file)
    path = within(folder, file)
    if path is None:
        raise invalid(field, "must be the path of a file within --models-dir", file)
    return path


def relative_to_folder(folder: str, text: str) -> str:
    """A text with files of that folder as requests name them: where the folder is, is nobody's business."""
    return text.replace(f"{Path(folder).resolve()}/", "") if folder else text


def check_adapter_within(folder: str, path: Path, field: str) -> None:
    """Raises ServiceError if what is read with the adapter at a path in --models-dir is elsewhere."""
    files = path.iterdir() if path.is_dir() else (path.with_name(ADAPTER_CONFIG),)
    if any(within(folder, str(file)) is None for file in files):
        raise invalid(field, "must be an adapter without links that lead out of --models-dir", path.name)
