"""What a process that forks others imports before all else: it does not outlive the supervisor.

Without this it would go on with its imports, for half a minute where others want the cores. What it forks is not meant:
that ends by its pipe.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from programs.serve.fork_context import SUPERVISOR

_PR_SET_PDEATHSIG = 1


def _die_with_supervisor(supervisor: str | None) -> None:
    """Be killed when the thread ends that started this process, the supervisor's main one."""
    if sys.platform != "linux" or supervisor is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(supervisor):  # it was killed a moment ago
        os._exit(1)


_die_with_supervisor(os.environ.get(SUPERVISOR))
