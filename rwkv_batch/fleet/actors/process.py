"""The process that manages a service's engines in a cluster.

Only it uses the roster, so the supervisor needs no Ray.
"""

from __future__ import annotations

import contextlib
import logging
import time
from multiprocessing.connection import Connection
from typing import Any

from rwkv_batch.errors import StartupError
from rwkv_batch.fleet.actors.driver import load_ray
from rwkv_batch.fleet.actors.plan import ClusterPlan
from rwkv_batch.fleet.actors.roster import POLL_INTERVAL_S, Roster
from rwkv_batch.ipc.process import LogConfig, become_child
from rwkv_batch.ipc.served_model import ServedModel

logger = logging.getLogger(__name__)


def run_cluster(plan: ClusterPlan, log_config: LogConfig, name: str, supervisor: Connection) -> None:
    """Main function of the process.

    It sends the supervisor ("engines", the table) on changes, and ("failed", one line). The supervisor first sends
    ("begin", whether the service had its engines before). Then it sends ("add", devices), ("remove", name), ("restart",
    name), and ("leave", seconds for engines without another service to end).
    """
    become_child(name, log_config)
    try:
        _follow_supervisor(Roster(plan, log_config), supervisor)
    except StartupError as error:
        _send(supervisor, ("failed", str(error)))
    except (OSError, load_ray().exceptions.RayError) as error:  # `_receive_command` and `_send` raise no OSError
        logger.error("the cluster's head does not answer (%r); ending this process for a restart", error)


def _follow_supervisor(roster: Roster, supervisor: Connection) -> None:
    reported: tuple[ServedModel, ...] = ()
    command = _receive_command(supervisor, None)
    while command[0] not in ("leave", "gone"):
        _handle_command(roster, command)
        table = _poll(roster)
        if table != reported:
            reported = table
            _send(supervisor, ("engines", table))
        command = _receive_command(supervisor, POLL_INTERVAL_S)
    if command[0] == "gone":
        logger.error("the supervisor is gone; leaving the cluster")
    _leave(roster, command[1])


def _receive_command(supervisor: Connection, timeout_s: float | None) -> tuple[str, Any]:
    """Return the supervisor's next command.

    Returns ("nothing", None) after the timeout, ("gone", 0.0) if the supervisor has died.
    """
    try:
        return supervisor.recv() if supervisor.poll(timeout_s) else ("nothing", None)
    except (EOFError, OSError):
        return "gone", 0.0


def _send(supervisor: Connection, message: tuple[str, Any]) -> None:
    with contextlib.suppress(OSError):  # `_receive_command` notices a dead supervisor
        supervisor.send(message)


def _handle_command(roster: Roster, command: tuple[str, Any]) -> None:
    match command:
        case ("begin", is_up):
            roster.begin(is_up)
        case ("add", devices):
            roster.add(devices)
        case ("remove", name):
            roster.remove(name)
        case ("restart", name):
            roster.restart(name)


def _poll(roster: Roster) -> tuple[ServedModel, ...]:
    """Return the table. On StartupError, remove the engines that this service created. Raises StartupError."""
    try:
        return roster.poll()
    except StartupError:
        roster.remove_created()
        raise


def _leave(roster: Roster, timeout_s: float) -> None:
    """Leave the cluster. If the engines end too, wait for them."""
    deadline = time.monotonic() + timeout_s
    if roster.leave():
        while roster.names and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL_S)
