"""First import of a fork server: it makes the server die with the supervisor, and ignore Ctrl-C.

Without it the server could go on importing for half a minute, or end with a traceback at Ctrl-C, which is for the
supervisor. Its forks are not affected: they end by their pipe.
"""

from __future__ import annotations

import os
import signal

from native.priority import die_with_parent
from programs.serve.fork_context import SUPERVISOR


def _die_with_supervisor(supervisor: str | None) -> None:
    """Lets the kernel kill this process when the supervisor's main thread ends."""
    if supervisor is None:
        return
    die_with_parent()
    if os.getppid() != int(supervisor):  # the supervisor was killed meanwhile
        os._exit(1)


signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked since this process began
_die_with_supervisor(os.environ.get(SUPERVISOR))
