"""The store of files and batches that the settings name."""

from __future__ import annotations

from pathlib import Path

from routes.config import HttpConfig
from routes.file_store import Store

NONE = "none"
_MOST_ENTRIES = 10_000
"""Files of one key, and batches under way."""


def has_store(config: HttpConfig) -> bool:
    """Whether the service keeps files."""
    return config.files_dir not in ("", NONE, "auto")


def open_store(config: HttpConfig) -> Store | None:
    """The store, which is made when it is first used; None if the service keeps none."""
    if not has_store(config):
        return None
    return Store(Path(config.files_dir), int(config.files_max_gb * 2**30), _MOST_ENTRIES)
