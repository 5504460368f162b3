"""Where what is made at run time is kept: compiled kernels, the demo model's standard file. Does not load torch."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "RWKV_BUILD_DIR"


def cache_folder() -> Path:
    """$RWKV_BUILD_DIR, else rwkv-batch in $XDG_CACHE_HOME or ~/.cache; not beside the code, which may be read-only."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen)
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "rwkv-batch"
