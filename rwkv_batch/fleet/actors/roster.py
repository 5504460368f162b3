"""The engines of a cluster as one machine's service sees them: who is there, who is wanted, who leaves.

One thread. It asks each engine how it stands; `EngineDirectory` asks the head which there are.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from typing import Any

import msgspec

from rwkv_batch.errors import StartupError
from rwkv_batch.fleet.actors.address import EngineAddress
from rwkv_batch.fleet.actors.driver import join
from rwkv_batch.fleet.actors.engine_directory import ENGINE, EngineDirectory
from rwkv_batch.fleet.actors.placement import place
from rwkv_batch.fleet.actors.plan import ALL, ClusterPlan
from rwkv_batch.fleet.actors.removal import remove_engine_actor
from rwkv_batch.ipc.process import LogStyle
from rwkv_batch.ipc.served_model import ModelSpec, ModelStatus, ServedModel

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5
_ANSWER_S = 2.0
"""What engines have to answer a question that is waited for."""
_PLACE_S = 5.0
"""Between two attempts to place what is wanted: the head tells a moment later what has been placed."""


class Roster:
    """See above."""

    def __init__(self, plan: ClusterPlan, style: LogStyle) -> None:
        """Raises StartupError where the cluster cannot be joined, RayError where its head does not answer."""
        self._plan = plan
        self._style = style
        self._ray = join(plan.cluster)
        self._watcher = uuid.uuid4().hex
        self._names = EngineDirectory(self._ray)
        self._engines: dict[str, ServedModel] = {}
        self._pending: dict[str, Any] = {}
        """a question to each that has no answer yet"""
        self._foreign: set[str] = set()
        """engines that serve something else: left alone"""
        self._is_up = False
        """An engine of the service has been ready."""
        self._wanted: dict[str, tuple[str, ...]] = {}
        """devices of the engines that the service is to have"""
        self._missing: set[str] = set()
        """those among them that are placed as soon as their name is free"""
        self._to_add: deque[tuple[str, ...]] = deque()
        self._next_placement_at = 0.0
        self._created: set[str] = set()
        self._to_restart: deque[str] = deque()
        self._to_remove: dict[str, Any] = {}
        """those that are to leave, until the head lists them no longer (it may be away when they do), with the actor
        that was meant; None: it is not known yet"""

    # Who is there --------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Of the engines that there are."""
        return list(self._names.actors)

    def poll(self) -> tuple[ServedModel, ...]:
        """What is known by now of each engine, and place and restart what is due.

        Raises StartupError for one that cannot load or serves something else, until one of the service has been ready.
        """
        here = self._names.actors.copy()
        self._foreign &= here.keys()
        for name in [name for name in self._engines if name not in here]:
            del self._engines[name]
            self._pending.pop(name, None)
        for name, actor in here.items():
            if name not in self._foreign:
                self._engines.setdefault(name, self._initial_info(name))
                self._poll_engine(name, actor)
        loading = (name for name, info in self._engines.items() if info.status is ModelStatus.LOADING)
        self._names.loading = frozenset(loading)
        if self._names.is_current:  # without the head nothing is placed, started anew or gone for good
            self._remove_due()
            self._place_wanted()
            self._restart_next()
        return tuple(self._engines[name] for name in sorted(self._engines, key=_number))

    def _poll_engine(self, name: str, actor: Any) -> None:
        """Take its answer if there is one, and ask again."""
        pending = self._pending.get(name)
        if pending is not None:
            if not self._ray.wait([pending], timeout=0.0)[0]:
                if name in self._names.unplaceable:
                    self._change(name, error="no node of the cluster has room for it")
                return
            del self._pending[name]
            try:
                info = self._ray.get(pending)
            except self._ray.exceptions.ActorUnavailableError:  # its process or node is gone; Ray starts it anew
                self._change(name, status=ModelStatus.LOADING, pid=0)
            except self._ray.exceptions.RayError:  # or it has left, and another one has its name
                self._change(name, status=ModelStatus.LOADING, pid=0)
                self._names.forget(name)
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
            self._missing.discard(name)  # from now on it is missed by nobody: if it leaves somebody has removed it
        self._change(
            name,
            status=info.status,
            error=info.error,
            pid=info.pid,
            node=info.node,
            since=info.since,
            has_served=info.has_served,
        )

    def _mark_foreign(self, name: str, serves: str) -> None:
        """It serves something else. The first engine says what the service serves: if it is that one, this one errs."""
        error = self._other_model_error(name, serves)
        if not self._is_up and name == min(self._names.actors, key=_number, default=name):
            raise StartupError(error)
        logger.error("%s; it is left alone", error)
        self._foreign.add(name)
        del self._engines[name]

    def _other_model_error(self, name: str, serves: str) -> str:
        return (
            f"{name} of the cluster serves {serves}, this service {self._plan.serves}; "
            "give the same, or another --cluster-service"
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

    def _answers(self, questions: dict[str, Any]) -> dict[str, Any]:
        """What those say that answer in time."""
        if not questions:
            return {}
        references = list(questions.values())
        ready, _ = self._ray.wait(references, num_returns=len(references), timeout=_ANSWER_S)
        answers = {}
        for name, reference in questions.items():
            if reference in ready:
                try:
                    answers[name] = self._ray.get(reference)
                except self._ray.exceptions.RayError as error:
                    logger.debug("%s does not answer: %r", name, error)
        return answers

    # Who is wanted -------------------------------------------------------------------------------------------

    def begin(self, is_up: bool) -> None:
        """Say who is wanted. `is_up`: the service has had its engines, so that those missing now have been removed.

        Raises StartupError if the engines that are there serve something else: then none may be placed beside them.
        """
        self._is_up = is_up
        actors = {name: actor for name, actor in self._names.actors.items() if actor is not None}
        answers = self._answers({name: actor.info.remote() for name, actor in actors.items()})
        serve = {name: answers[name].serves for name in sorted(answers, key=_number)}
        if serve and self._plan.serves not in serve.values():
            raise StartupError(self._other_model_error(*next(iter(serve.items()))))
        wanted = max(self._plan.replicas, 0 if self._names.actors else 1)
        self._wanted = {f"{ENGINE}{number}": self._plan.devices_of(number) for number in range(wanted)}
        self._missing = set() if is_up else set(self._wanted)

    def add(self, devices: tuple[str, ...]) -> None:
        """One more engine."""
        self._to_add.append(devices)

    def _place_wanted(self) -> None:
        """Place what was missing from the beginning and what was added; and everything, if nothing is there."""
        now = time.monotonic()
        if now < self._next_placement_at:
            return
        if not self._names.actors:
            self._wanted = self._wanted or {f"{ENGINE}0": self._plan.devices_of(0)}
            self._missing = set(self._wanted)
        missing = [name for name in self._missing if name not in self._names.actors]
        if not missing and not self._to_add:
            return
        self._next_placement_at = now + _PLACE_S
        try:
            for name in sorted(missing, key=_number):
                self._place(name, self._wanted[name])
            while self._to_add:
                self._place_one_more(self._to_add[0])
                self._to_add.popleft()
        except (OSError, self._ray.exceptions.RayError) as error:
            logger.warning("no engine can be placed now (%r); it is tried again in %.0f s", error, _PLACE_S)

    def _place_one_more(self, devices: tuple[str, ...]) -> None:
        taken = {_number(name) for name in self._names.actors}
        number = next(number for number in range(len(taken) + 1) if number not in taken)
        while not self._place(f"{ENGINE}{number}", devices or self._plan.devices_of(number)):
            number += 1  # it has just been placed, by whomever
        name = f"{ENGINE}{number}"
        self._wanted[name] = devices or self._plan.devices_of(number)
        self._missing.add(name)

    def _place(self, name: str, devices: tuple[str, ...]) -> bool:
        config = self._plan.config_of(name, devices)
        if not place(name, config, self._plan.factory, self._style, self._plan.serves):
            return False
        self._created.add(name)
        logger.info("%s is placed in the cluster", name)
        return True

    def restart(self, name: str) -> None:
        """Drain it, to be started anew; "all": one after the other."""
        wanted = list(self._engines) if name == ALL else [name]
        self._to_restart.extend(one for one in wanted if one not in self._to_restart)

    def _restart_next(self) -> None:
        """Drain the next engine that is to be started anew, once all others are there that have room."""
        busy = (ModelStatus.UNLOADING, ModelStatus.LOADING)
        placed = [info for name, info in self._engines.items() if name not in self._names.unplaceable]
        if not self._to_restart or any(info.status in busy for info in placed):
            return
        name = self._to_restart.popleft()
        if name in self._engines and name not in self._names.unplaceable:
            logger.info("%s is drained and started anew", name)
            self._drain(name, will_restart=True)

    # Who leaves ----------------------------------------------------------------------------------------------

    def remove(self, name: str) -> None:
        """Have it leave, as soon as the cluster's head is there to hear of it."""
        self._wanted.pop(name, None)
        self._missing.discard(name)
        self._to_remove[name] = self._names.actors.get(name)
        if not self._names.is_current:
            logger.warning("the cluster's head is away; %s is removed when it is back", name)

    def _remove_due(self) -> None:
        """Drain those that are to leave. One that waits for a node has nothing to drain."""
        self._to_remove = {name: actor for name, actor in self._to_remove.items() if name in self._engines}
        try:
            for name, meant in sorted(self._to_remove.items()):
                actor = self._names.actor(name)
                if meant is not None and actor is not None and actor != meant:
                    del self._to_remove[name]  # it has left, and another one has its name
                    continue
                self._to_remove[name] = meant or actor
                if name in self._names.unplaceable:
                    remove_engine_actor(name)
                elif self._engines[name].status is not ModelStatus.UNLOADING:
                    self._drain(name, will_restart=False)
        except (OSError, self._ray.exceptions.RayError) as error:
            logger.warning("no engine can be removed now (%r); it is tried again in a moment", error)

    def _drain(self, name: str, will_restart: bool) -> None:
        actor = self._names.actor(name)
        if actor is not None and name in self._engines:
            self._change(name, status=ModelStatus.UNLOADING)
            self._pending[name] = actor.drain.remote(will_restart)

    def leave(self) -> bool:
        """This machine's service ends; returns whether engines end with it, those too that wait for a node."""
        actors = {name: self._names.actors.get(name) for name in self._engines}
        answers = self._answers({name: actor.leave.remote(self._watcher) for name, actor in actors.items() if actor})
        is_last = True in answers.values()
        for name in {*self._engines, *self._created} - answers.keys():
            has_no_process = name in self._names.unplaceable or name not in self._engines
            if is_last or (not answers and name in self._created and has_no_process):
                remove_engine_actor(name)  # it cannot notice by itself that nobody wants it
        return is_last

    def remove_created(self) -> None:
        """Take away what this service has placed: it cannot start."""
        for name in self._created:
            remove_engine_actor(name)


def _number(name: str) -> int:
    return int(name.removeprefix(ENGINE))
