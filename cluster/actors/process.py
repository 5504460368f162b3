"""The process that holds a service's place in a cluster: it keeps the roster, and the supervisor knows no Ray."""

from __future__ import annotations

import logging
import time
from multiprocessing.connection import Connection

from cluster.actors.plan import ClusterPlan
from cluster.actors.roster import LOOK_S, Roster
from rwkv_batch.errors import StartupError
from rwkv_batch.ipc.process import LogStyle, become_child
from rwkv_batch.ipc.served_model import ServedModel

logger = logging.getLogger(__name__)


def run_cluster(plan: ClusterPlan, style: LogStyle, name: str, supervisor: Connection) -> None:
    """Main function of the process.

    The supervisor is sent ("engines", the table) when it changes and ("failed", one line). It sends ("add", devices),
    ("remove", name), ("restart", name), and ("leave", seconds): engines that nobody else wants then have so long.
    """
    become_child(name, style)
    try:
        roster = Roster(plan, style)
        roster.ensure()
        _follow_supervisor(roster, supervisor)
    except StartupError as error:
        supervisor.send(("failed", str(error)))
    except (EOFError, OSError):
        logger.error("the supervisor is gone; leaving the cluster")
        roster.leave()


def _follow_supervisor(roster: Roster, supervisor: Connection) -> None:
    told: tuple[ServedModel, ...] = ()
    while True:
        table = roster.look()
        if table != told:
            told = table
            supervisor.send(("engines", table))
        if not supervisor.poll(LOOK_S):
            continue
        match supervisor.recv():
            case ("add", devices):
                roster.add(devices)
            case ("remove", name):
                roster.remove(name)
            case ("restart", name):
                roster.restart(name)
            case ("leave", timeout_s):
                _leave(roster, timeout_s)
                return


def _leave(roster: Roster, timeout_s: float) -> None:
    """Leave the cluster; if the engines do so too, wait until they have."""
    deadline = time.monotonic() + timeout_s
    if roster.leave():
        while roster.names and time.monotonic() < deadline:
            time.sleep(LOOK_S)
