"""Named points at which a test may kill the process: ``RWKV_CRASH_AT="after_append:3"``.

The name says where, the number at which passage (default 1); ":thread" behind it ends only that thread.
Unset, `reach` is an empty function: the environment is read once, at import.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Final

POINTS: Final = (
    "before_append",
    "after_append",
    "before_commit",
    "after_commit",
    "before_checkpoint",
    "within_checkpoint",
    "after_checkpoint",
    "before_demotion",
    "after_demotion",
    "before_promotion",
    "after_promotion",
    "before_acknowledgement",
    "after_acknowledgement",
    "before_delete",
    "after_delete",
)
"""Every name that is reached somewhere; a test kills a process at each."""


def _armed(setting: str) -> Callable[[str], None]:
    wanted, number, only_thread = (*setting.split(":"), "", "")[:3]
    if wanted not in POINTS:
        raise ValueError(f"RWKV_CRASH_AT names {wanted!r}; known points: {', '.join(POINTS)}")
    left = int(number or 1)

    def reach(point: str) -> None:
        nonlocal left
        if point != wanted:
            return
        left -= 1
        if left <= 0 and only_thread:
            raise SystemExit(f"{point}: RWKV_CRASH_AT ends this thread")
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return reach


def _unarmed(point: str) -> None:
    """Do nothing: no crash is wanted."""


reach: Callable[[str], None] = _armed(os.environ["RWKV_CRASH_AT"]) if os.environ.get("RWKV_CRASH_AT") else _unarmed
"""Pass a named point; the process dies here when the environment says so."""
