"""The engines of a cluster as one machine sees them: it asks each how it stands, and the head which there are.

Nothing here waits for the head but a thread of its own: if that is away the engines that are known go on.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from typing import Any

import msgspec

from cluster.actors.address import EngineAddress
from cluster.actors.departure import leave_cluster
from cluster.actors.driver import join
from cluster.actors.placement import has_room, place
from cluster.actors.plan import ALL, ClusterPlan
from rwkv_batch.errors import StartupError
from rwkv_batch.ipc.process import LogStyle
from rwkv_batch.ipc.served_model import ModelStatus, ModelWish, ServedModel

logger = logging.getLogger(__name__)

LOOK_S = 0.5
ENGINE = "engine-"


class Roster:
    """See above. One thread."""

    def __init__(self, plan: ClusterPlan, style: LogStyle) -> None:
        """Raises StartupError where the cluster cannot be joined."""
        self._plan = plan
        self._style = style
        self._ray = join(plan.cluster)
        self._watcher = uuid.uuid4().hex
        self._engines: dict[str, ServedModel] = {}
        self._actors: dict[str, Any] = {}
        self._asked: dict[str, Any] = {}
        """a question to each that has no answer yet"""
        self._to_restart: deque[str] = deque()
        self._named: dict[str, Any] = {}
        """actors by name, by the head's last word"""
        self._roomless: frozenset[str] = frozenset()
        self._made: set[str] = set()
        self._follow_names()
        threading.Thread(target=self._follow, name="names", daemon=True).start()

    # Which there are -----------------------------------------------------------------------------------------

    def _follow(self) -> None:
        while True:
            time.sleep(2 * LOOK_S)
            try:
                self._follow_names()
            except self._ray.exceptions.RayError as error:
                logger.warning("the cluster's head does not answer (%s); engines that are known go on", error)

    def _follow_names(self) -> None:
        names = [name for name in self._ray.util.list_named_actors() if name.startswith(ENGINE)]
        known = self._named
        self._named = {name: known.get(name) or self._actor(name) for name in names}
        loading = [name for name, told in list(self._engines.items()) if told.status is ModelStatus.LOADING]
        self._roomless = frozenset(name for name in loading if not has_room(name))

    def _actor(self, name: str) -> Any:
        try:
            return self._ray.get_actor(name)
        except ValueError:  # it has just left
            return None

    @property
    def names(self) -> list[str]:
        """Of the engines that there are."""
        return list(self._named)

    # How they stand ------------------------------------------------------------------------------------------

    def ensure(self) -> None:
        """Create the engines that the service wants and that are not there. Raises StartupError."""
        wanted = max(self._plan.replicas, 0 if self._named else 1)
        for number in range(wanted):
            if f"{ENGINE}{number}" not in self._named:
                self._create(f"{ENGINE}{number}", self._plan.devices_of(number))

    def look(self) -> tuple[ServedModel, ...]:
        """What is known by now of each. Raises StartupError for one that serves something else, or cannot load."""
        for name in [name for name in self._engines if name not in self._named]:
            del self._engines[name]
            self._actors.pop(name, None)
            self._asked.pop(name, None)
        for name, actor in self._named.items():
            if actor is not None:
                self._actors[name] = actor
                self._engines.setdefault(name, self._told(name))
                self._hear(name, actor)
        self._restart_next()
        return tuple(self._engines[name] for name in sorted(self._engines, key=_number))

    def _hear(self, name: str, actor: Any) -> None:
        """Take its answer if there is one, and ask again."""
        asked = self._asked.get(name)
        if asked is not None:
            if not self._ray.wait([asked], timeout=0.0)[0]:
                if name in self._roomless:
                    self._change(name, error="no node of the cluster has room for it")
                return
            try:
                about = self._ray.get(asked)
            except self._ray.exceptions.RayError:  # its process or node is gone; Ray starts it anew
                self._change(name, status=ModelStatus.LOADING, pid=0)
            else:
                self._take(name, about)
        self._asked[name] = actor.about.remote(self._watcher)

    def _take(self, name: str, about: Any) -> None:
        if about.serves != self._plan.serves:
            raise StartupError(
                f"{name} of the cluster serves {about.serves}, this service {self._plan.serves}; "
                "give the same, or another --cluster-service"
            )
        if about.status is ModelStatus.FAILED and not about.has_served and name in self._made:
            leave_cluster(name)
            raise StartupError(about.error)
        self._change(
            name,
            status=about.status,
            error=about.error,
            pid=about.pid,
            node=about.node,
            since=about.since,
            has_served=about.has_served,
        )

    def _told(self, name: str) -> ServedModel:
        config = self._plan.config
        return ServedModel(
            wish=ModelWish(name=config.model_name, file=config.model_path),
            status=ModelStatus.LOADING,
            address=str(EngineAddress(self._plan.cluster, name)),
            since=int(time.time()),
            engine=name,
            is_own=True,
        )

    def _change(self, name: str, **fields: Any) -> None:
        self._engines[name] = msgspec.structs.replace(self._engines[name], **fields)

    # What is asked -------------------------------------------------------------------------------------------

    def add(self, devices: tuple[str, ...]) -> None:
        """One more engine."""
        taken = {_number(name) for name in self._named}
        number = next(number for number in range(len(taken) + 1) if number not in taken)
        self._create(f"{ENGINE}{number}", devices or self._plan.devices_of(number))

    def remove(self, name: str) -> None:
        """Drain it; it leaves."""
        self._drain(name, comes_back=False)

    def restart(self, name: str) -> None:
        """Drain it, to be started anew; "all": one after the other."""
        wanted = list(self._engines) if name == ALL else [name]
        self._to_restart.extend(one for one in wanted if one not in self._to_restart)

    def leave(self) -> bool:
        """This machine's service ends; returns whether engines end with it, those too that wait for a node."""
        asked = {actor.leave.remote(self._watcher): name for name, actor in self._actors.items()}
        ready, silent = self._ray.wait(list(asked), num_returns=len(asked), timeout=4 * LOOK_S) if asked else ([], [])
        is_last = False
        for answer in ready:
            try:
                is_last = self._ray.get(answer) or is_last
            except self._ray.exceptions.RayError:
                silent.append(answer)
        for answer in silent if is_last else ():
            leave_cluster(asked[answer])
        return is_last

    def _create(self, name: str, devices: tuple[str, ...]) -> None:
        config = self._plan.config_of(name, devices)
        self._made.add(name)
        logger.info("%s is placed in the cluster", name)
        place(name, config, self._plan.factory, self._style, self._plan.serves)

    def _restart_next(self) -> None:
        """Drain the next engine that is to be started anew, once all others are there."""
        busy = (ModelStatus.UNLOADING, ModelStatus.LOADING)
        if not self._to_restart or any(told.status in busy for told in self._engines.values()):
            return
        name = self._to_restart.popleft()
        logger.info("%s is drained and started anew", name)
        self._drain(name, comes_back=True)

    def _drain(self, name: str, comes_back: bool) -> None:
        if name in self._actors:
            self._change(name, status=ModelStatus.UNLOADING)
            self._asked[name] = self._actors[name].drain.remote(comes_back)


def _number(name: str) -> int:
    return int(name.removeprefix(ENGINE))
