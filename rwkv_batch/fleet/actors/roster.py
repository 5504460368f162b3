"""The engines of a cluster as one service sees them: which exist, which should exist, which leave.

One thread. It polls the engines; `EngineDirectory` polls the head for the list of them.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from typing import Any

import msgspec

from rwkv_batch.errors import StartupError
from rwkv_batch.fleet.actors.driver import join, remove_engine_actor
from rwkv_batch.fleet.actors.placement import has_room, place
from rwkv_batch.fleet.actors.plan import ALL, ClusterPlan, EngineAddress
from rwkv_batch.ipc.process import LogConfig
from rwkv_batch.ipc.served_model import ModelSpec, ModelStatus, ServedModel

ENGINE = "engine-"
_POLL_INTERVAL_S = 1.0
_CURRENT_S = 3.0
"""Seconds without an answer after which the head counts as unreachable. Calls would block for a minute."""


class EngineDirectory:
    """The engines of the cluster, as of the head's last answer."""

    def __init__(self, ray: Any) -> None:
        """Polls once before it returns. Raises RayError."""
        self._ray = ray
        self.actors: dict[str, Any] = {}
        """by name; None: to be looked up again"""
        self.loading: frozenset[str] = frozenset()
        """engines whose placement is checked; set by the roster"""
        self.unplaceable: frozenset[str] = frozenset()
        """engines among them for which no node has room"""
        self._answered = 0.0
        self.poll()
        threading.Thread(target=self._poll_loop, name="names", daemon=True).start()

    def _poll_loop(self) -> None:
        while True:
            time.sleep(_POLL_INTERVAL_S)
            try:
                self.poll()
            except (OSError, self._ray.exceptions.RayError) as error:
                logger.warning("the cluster's head does not answer (%r); known engines continue", error)
            except Exception:  # any other error of Ray: without this thread the list is never updated
                logger.exception("the cluster's engines cannot be listed; known engines continue")

    @property
    def is_current(self) -> bool:
        """Whether the head has answered lately."""
        return time.monotonic() - self._answered < _CURRENT_S

    def poll(self) -> None:
        """Update the list of engines from the head. Raises RayError."""
        names = [name for name in self._ray.util.list_named_actors() if name.startswith(ENGINE)]
        known = self.actors
        self.actors = {name: known.get(name) or self._look_up(name) for name in names}
        self.unplaceable = frozenset(name for name in self.loading if not has_room(name))
        self._answered = time.monotonic()

    def actor(self, name: str) -> Any:
        """Return the engine's actor, None if there is none. Looks it up if unknown. Raises RayError."""
        return self.actors.get(name) or self._look_up(name)

    def forget(self, name: str) -> None:
        """Look the name up again: its actor has died, and another may have the name."""
        actors = self.actors  # one reference: `poll` may replace the dict
        if name in actors:
            actors[name] = None

    def _look_up(self, name: str) -> Any:
        try:
            return self._ray.get_actor(name)
        except ValueError:  # it has just left
            return None


logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5
_ANSWER_S = 2.0
"""Seconds to wait for an engine's answer in a blocking call."""
_PLACE_S = 5.0
"""Seconds between two attempts to place engines. The head lists a placed engine with a delay."""


class Roster:
    def __init__(self, plan: ClusterPlan, log_config: LogConfig) -> None:
        """Join the cluster. Raises StartupError if that fails, RayError if the cluster's head does not answer."""
        self._plan = plan
        self._log_config = log_config
        self._ray = join(plan.cluster)
        self._watcher = uuid.uuid4().hex
        self._directory = EngineDirectory(self._ray)
        self._engines: dict[str, ServedModel] = {}
        self._pending: dict[str, Any] = {}
        """calls without an answer yet, by engine"""
        self._foreign: set[str] = set()
        """engines that serve another model or database; ignored"""
        self._is_up = False
        self._desired: dict[str, tuple[str, ...]] = {}
        """devices of the engines that the service should have"""
        self._missing: set[str] = set()
        """engines among them to place as soon as their name is free"""
        self._to_add: deque[tuple[str, ...]] = deque()
        self._next_placement_at = 0.0
        self._created: set[str] = set()
        self._to_restart: deque[str] = deque()
        self._to_remove: dict[str, Any] = {}
        """engines to remove until the head no longer lists them, with their actors; None: actor not known yet

        The head may be unreachable when they leave.
        """

    # Polling -------------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        return list(self._directory.actors)

    def poll(self) -> tuple[ServedModel, ...]:
        """Return the known state of each engine. Places, removes and restarts engines that are due.

        Until an engine was ready: raises StartupError if one cannot load or serves something else.
        """
        actors = self._directory.actors.copy()
        self._foreign &= actors.keys()
        for name in [name for name in self._engines if name not in actors]:
            del self._engines[name]
            self._pending.pop(name, None)
        for name, actor in actors.items():
            if name not in self._foreign:
                self._engines.setdefault(name, self._initial_info(name))
                self._poll_engine(name, actor)
        loading = (name for name, info in self._engines.items() if info.status is ModelStatus.LOADING)
        self._directory.loading = frozenset(loading)
        if self._directory.is_current:
            self._remove_due()
            self._place_missing()
            self._restart_next()
        return tuple(self._engines[name] for name in sorted(self._engines, key=_number))

    def _poll_engine(self, name: str, actor: Any) -> None:
        """Process the engine's answer, if there is one, and call it again."""
        pending = self._pending.get(name)
        if pending is not None:
            if not self._ray.wait([pending], timeout=0.0)[0]:
                if name in self._directory.unplaceable:
                    self._change(name, error="no node of the cluster has the free resources that it needs")
                return
            del self._pending[name]
            try:
                info = self._ray.get(pending)
            except self._ray.exceptions.ActorUnavailableError:  # its process or node is gone; Ray restarts it
                self._change(name, status=ModelStatus.LOADING, pid=0)
            except self._ray.exceptions.RayError:  # it has left, and another one may have its name
                self._change(name, status=ModelStatus.LOADING, pid=0)
                self._directory.forget(name)
                return
            else:
                self._update_from(name, info)
        if actor is not None and name in self._engines:
            self._pending[name] = actor.info.remote(self._watcher)

    def _update_from(self, name: str, info: Any) -> None:
        if info.serves != self._plan.serves:
            self._mark_foreign(name, info.serves)
            return
        if info.status is ModelStatus.FAILED and not self._is_up and not info.has_served and name in self._created:
            raise StartupError(info.error)
        self._is_up = self._is_up or info.status is ModelStatus.READY
        if info.status in (ModelStatus.READY, ModelStatus.FAILED):
            self._missing.discard(name)  # if it leaves later, a user has removed it
        fields = info._asdict()
        del fields["serves"]
        self._change(name, **fields)

    def _mark_foreign(self, name: str, serves: str) -> None:
        """Ignore an engine that serves something else. If it is the first engine, this service is wrong instead."""
        error = self._other_model_error(name, serves)
        if not self._is_up and name == min(self._directory.actors, key=_number, default=name):
            raise StartupError(error)
        logger.error("%s; ignoring it", error)
        self._foreign.add(name)
        del self._engines[name]

    def _other_model_error(self, name: str, serves: str) -> str:
        return (
            f"{name} of the cluster serves {serves}, this service {self._plan.serves}; "
            "use the same model and database, or another --cluster-service"
        )

    def _initial_info(self, name: str) -> ServedModel:
        config = self._plan.config
        return ServedModel(
            spec=ModelSpec(name=config.model_name, file=config.model_path),
            status=ModelStatus.LOADING,
            address=str(EngineAddress(self._plan.cluster, name)),
            since=int(time.time()),
            engine=name,
            is_own=True,
        )

    def _change(self, name: str, **fields: Any) -> None:
        self._engines[name] = msgspec.structs.replace(self._engines[name], **fields)

    def _answers(self, calls: dict[str, Any]) -> dict[str, Any]:
        """Return the results of the calls that finish in time."""
        if not calls:
            return {}
        references = list(calls.values())
        ready, _ = self._ray.wait(references, num_returns=len(references), timeout=_ANSWER_S)
        answers = {}
        for name, reference in calls.items():
            if reference in ready:
                try:
                    answers[name] = self._ray.get(reference)
                except self._ray.exceptions.RayError as error:
                    logger.debug("%s does not answer: %r", name, error)
        return answers

    # Placement -----------------------------------------------------------------------------------------------

    def begin(self, is_up: bool) -> None:
        """Decide which engines the service should have.

        Raises StartupError if the existing engines serve something else.

        is_up: the service had its engines before, so engines missing now were removed
        """
        self._is_up = is_up
        actors = {name: actor for name, actor in self._directory.actors.items() if actor is not None}
        answers = self._answers({name: actor.info.remote() for name, actor in actors.items()})
        served = {name: answers[name].serves for name in sorted(answers, key=_number)}
        if served and self._plan.serves not in served.values():
            raise StartupError(self._other_model_error(*next(iter(served.items()))))
        num_engines = max(self._plan.replicas, 0 if self._directory.actors else 1)
        self._desired = {f"{ENGINE}{number}": self._plan.devices_of(number) for number in range(num_engines)}
        self._missing = set() if is_up else set(self._desired)

    def add(self, devices: tuple[str, ...]) -> None:
        self._to_add.append(devices)

    def _place_missing(self) -> None:
        """Place missing and added engines. If no engine exists, place all."""
        now = time.monotonic()
        if now < self._next_placement_at:
            return
        if not self._directory.actors:
            self._desired = self._desired or {f"{ENGINE}0": self._plan.devices_of(0)}
            self._missing = set(self._desired)
        missing = [name for name in self._missing if name not in self._directory.actors]
        if not missing and not self._to_add:
            return
        self._next_placement_at = now + _PLACE_S
        try:
            for name in sorted(missing, key=_number):
                self._place(name, self._desired[name])
            while self._to_add:
                self._place_additional(self._to_add[0])
                self._to_add.popleft()
        except (OSError, self._ray.exceptions.RayError) as error:
            logger.warning("no engine can be placed (%r); retrying in %.0f s", error, _PLACE_S)

    def _place_additional(self, devices: tuple[str, ...]) -> None:
        used = {_number(name) for name in self._directory.actors}
        number = next(number for number in range(len(used) + 1) if number not in used)
        while not self._place(f"{ENGINE}{number}", devices or self._plan.devices_of(number)):
            number += 1  # another service has just taken this number
        name = f"{ENGINE}{number}"
        self._desired[name] = devices or self._plan.devices_of(number)
        self._missing.add(name)

    def _place(self, name: str, devices: tuple[str, ...]) -> bool:
        config = self._plan.config_of(name, devices)
        if not place(name, config, self._plan.factory, self._log_config, self._plan.serves):
            return False
        self._created.add(name)
        logger.info("%s is placed in the cluster", name)
        return True

    def restart(self, name: str) -> None:
        """Drain and restart an engine.

        name: "all" for one after the other
        """
        names = list(self._engines) if name == ALL else [name]
        self._to_restart.extend(one for one in names if one not in self._to_restart)

    def _restart_next(self) -> None:
        """Drain the next engine to restart. Does so once all other placeable engines are ready."""
        busy = (ModelStatus.UNLOADING, ModelStatus.LOADING)
        placed = [info for name, info in self._engines.items() if name not in self._directory.unplaceable]
        if not self._to_restart or any(info.status in busy for info in placed):
            return
        name = self._to_restart.popleft()
        if name in self._engines and name not in self._directory.unplaceable:
            logger.info("draining %s for a restart", name)
            self._drain(name, will_restart=True)

    # Removal -------------------------------------------------------------------------------------------------

    def remove(self, name: str) -> None:
        """Remove the engine as soon as the head is reachable."""
        self._desired.pop(name, None)
        self._missing.discard(name)
        self._to_remove[name] = self._directory.actors.get(name)
        if not self._directory.is_current:
            logger.warning("the cluster's head does not answer; %s is removed when it does", name)

    def _remove_due(self) -> None:
        """Drain the engines to remove. An engine that waits for a node is removed at once."""
        self._to_remove = {name: actor for name, actor in self._to_remove.items() if name in self._engines}
        try:
            for name, expected in sorted(self._to_remove.items()):
                actor = self._directory.actor(name)
                if expected is not None and actor is not None and actor != expected:
                    del self._to_remove[name]  # it has left, and another engine has its name
                    continue
                self._to_remove[name] = expected or actor
                if name in self._directory.unplaceable:
                    remove_engine_actor(name)
                elif self._engines[name].status is not ModelStatus.UNLOADING:
                    self._drain(name, will_restart=False)
        except (OSError, self._ray.exceptions.RayError) as error:
            logger.warning("no engine can be removed (%r); retrying", error)

    def _drain(self, name: str, will_restart: bool) -> None:
        actor = self._directory.actor(name)
        if actor is not None and name in self._engines:
            self._change(name, status=ModelStatus.UNLOADING)
            self._pending[name] = actor.drain.remote(will_restart)

    def leave(self) -> bool:
        """End this machine's service. Returns whether its engines end with it."""
        actors = {name: self._directory.actors.get(name) for name in self._engines}
        answers = self._answers({name: actor.leave.remote(self._watcher) for name, actor in actors.items() if actor})
        is_last = True in answers.values()
        for name in {*self._engines, *self._created} - answers.keys():
            has_no_process = name in self._directory.unplaceable or name not in self._engines
            if is_last or (not answers and name in self._created and has_no_process):
                remove_engine_actor(name)  # it has no process that could notice
        return is_last

    def remove_created(self) -> None:
        """Remove the engines that this service created, because it cannot start."""
        for name in self._created:
            remove_engine_actor(name)


def _number(name: str) -> int:
    return int(name.removeprefix(ENGINE))
