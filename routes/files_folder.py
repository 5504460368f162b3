"""Opens the file store of the settings."""

from __future__ import annotations

from pathlib import Path

from routes.config import HttpConfig
from routes.file_store import Store

NONE = "none"
_MAX_ENTRIES = 10_000
"""Files per key, and running batches."""


def has_store(config: HttpConfig) -> bool:
    return config.files_dir not in ("", NONE, "auto")


def open_store(config: HttpConfig) -> Store | None:
    """Return the store, or None if the settings have none. Its folder is created at first use."""
    if not has_store(config):
        return None
    return Store(Path(config.files_dir), int(config.files_max_gb * 2**30), _MAX_ENTRIES)
