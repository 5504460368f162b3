"""Named points where a test can kill the process: ``RWKV_CRASH_AT="after_append:3"``.

The number counts passes of the point (default 1). A third field ":thread" ends only that thread. If the variable is
unset at import, `reach` does nothing.
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


def _armed(setting: str) -> Callable[[str], None]:
    target, number, only_thread = (*setting.split(":"), "", "")[:3]
    if target not in POINTS:
        raise ValueError(f"RWKV_CRASH_AT names {target!r}; known points: {', '.join(POINTS)}")
    left = int(number or 1)

    def reach(point: str) -> None:
        nonlocal left
        if point != target:
            return
        left -= 1
        if left <= 0 and only_thread:
            raise SystemExit(f"{point}: RWKV_CRASH_AT ends this thread")
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return reach


def _unarmed(point: str) -> None: ...


reach: Callable[[str], None] = _armed(os.environ["RWKV_CRASH_AT"]) if os.environ.get("RWKV_CRASH_AT") else _unarmed
"""Pass a named point. The process ends here if RWKV_CRASH_AT says so."""
