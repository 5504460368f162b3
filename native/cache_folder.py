"""The cache folder: compiled kernels, the demo model's standard file. Does not load torch."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "RWKV_BUILD_DIR"


def cache_folder() -> Path:
    """Returns $RWKV_BUILD_DIR, else rwkv-batch in $XDG_CACHE_HOME or ~/.cache. The code's folder may be read-only."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen)
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "rwkv-batch"
