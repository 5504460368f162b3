"""Checks that files named by requests are inside the models folder."""

from __future__ import annotations

import re
from pathlib import Path

from rwkv_batch.errors import invalid

ADAPTER_CONFIG = "adapter_config.json"
"""PEFT stores it next to an adapter's weights."""


_SHARD = re.compile(r"(?P<name>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")


def shard_names(name: str) -> list[str]:
    """Return the names of all files of a split GGUF.

    name: the name of one of them. Returns only this name for any other file.
    """
    found = _SHARD.fullmatch(name)
    if found is None:
        return [name]
    count = found["count"]
    return [f"{found['name']}-{number:05}-of-{count}.gguf" for number in range(1, int(count) + 1)]


def within(folder: str, file: str) -> Path | None:
    """Resolve `file` in the folder, following links.

    None: the file is outside, or not a valid path.
    """
    root = Path(folder).resolve()
    try:
        path = (root / file).resolve()
        path.exists()
    except (OSError, ValueError, RuntimeError):  # a null byte, a name that is too long, a link loop
        return None
    return path if path != root and path.is_relative_to(root) else None


def path_within(folder: str, file: str, alternative: str = "") -> Path:
    """Return the path of a file that a request's field `file` names. Raises ServiceError.

    alternative: what a client can do if no models folder is configured
    """
    if not folder:
        raise invalid("file", f"the service has no models folder; start it with --models-dir{alternative}", file)
    path = within(folder, file)
    if path is None:
        raise invalid("file", "must be the path of a file within --models-dir", file)
    return path


def relative_to_folder(folder: str, text: str) -> str:
    """Replace absolute paths of the folder by relative ones. This hides its location from clients."""
    return text.replace(f"{Path(folder).resolve()}/", "") if folder else text


def check_adapter_within(folder: str, path: Path, field: str) -> None:
    """Check that an adapter's files are inside the folder. Raises ServiceError."""
    files = path.iterdir() if path.is_dir() else (path.with_name(ADAPTER_CONFIG),)
    if any(within(folder, str(file)) is None for file in files):
        raise invalid(field, "must be an adapter without links that lead out of --models-dir", path.name)
