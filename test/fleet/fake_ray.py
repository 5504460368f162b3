"""The calls of Ray that the service uses, without Ray: a head that lists actors, and actors that tests control."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

from rwkv_batch.ipc.served_model import ModelStatus


class RayError(Exception):
    pass


class GetTimeoutError(RayError, TimeoutError):
    """Also an OSError, as in Ray."""


class RayActorError(RayError):
    pass


class ActorUnavailableError(RayActorError):
    pass


class ActorAlreadyExistsError(ValueError, RayError):
    pass


class FakeActor:
    """An engine's actor. It answers as the test decides, once it has a process."""

    def __init__(self, serves: str) -> None:
        self.serves = serves
        self.status = ModelStatus.LOADING
        self.error = ""
        self.has_served = False
        self.has_process = True
        self.failure: RayError | None = None
        self.is_last = True
        self.received: list[tuple[Any, ...]] = []
        """calls with their arguments"""

    def set_status(self, status: ModelStatus, error: str = "") -> FakeActor:
        self.status, self.error = status, error
        self.has_served = self.has_served or status is ModelStatus.READY
        return self

    def __getattr__(self, call: str) -> Any:
        def remote(*arguments: Any) -> SimpleNamespace:
            self.received.append((call, *arguments))
            return SimpleNamespace(engine=self, call=call)

        if call.startswith("_"):
            raise AttributeError(call)
        return SimpleNamespace(remote=remote)

    def answer(self, call: str) -> Any:
        if self.failure is not None:
            raise self.failure
        if call == "leave":
            return self.is_last
        if call == "drain":
            self.status = ModelStatus.UNLOADING
        from rwkv_batch.fleet.actors.engine_actor import EngineInfo  # it imports `ray`, which is replaced by now

        return EngineInfo(self.status, self.error, 1, "10.0.0.1", 0, self.has_served, self.serves)

    @property
    def drains(self) -> list[bool]:
        """The `will_restart` argument of each drain."""
        return [arguments[1] for arguments in self.received if arguments[0] == "drain"]


class FakeRay:
    """Replaces `ray`, `ray.util` and their modules, as far as `rwkv_batch.fleet.actors` uses them."""

    def __init__(self) -> None:
        self.actors: dict[str, FakeActor] = {}
        self.fault: Exception | None = None
        """raised by every call of the head"""
        self.gpus = 0
        self.initial_status = (ModelStatus.LOADING, "")
        """status of a newly placed engine"""
        self.is_joined = False
        self.exceptions = SimpleNamespace(
            RayError=RayError,
            GetTimeoutError=GetTimeoutError,
            RayActorError=RayActorError,
            ActorUnavailableError=ActorUnavailableError,
            ActorAlreadyExistsError=ActorAlreadyExistsError,
            RaySystemError=RayError,
        )
        self._private: Any = SimpleNamespace()
        self.util = self
        """one object replaces all modules"""

    def modules(self) -> dict[str, Any]:
        return dict.fromkeys(("ray", "ray.util", "ray.util.scheduling_strategies"), self)

    def engine(self, name: str, serves: str, status: ModelStatus = ModelStatus.READY) -> FakeActor:
        self.actors[name] = FakeActor(serves).set_status(status)
        return self.actors[name]

    def _head(self) -> None:
        if self.fault is not None:
            raise self.fault

    # The package ---------------------------------------------------------------------------------------------

    def is_initialized(self) -> bool:
        return self.is_joined

    def init(self, **settings: Any) -> None:
        self.is_joined = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as Ray does

    def cluster_resources(self) -> dict[str, float]:
        self._head()
        return {"GPU": float(self.gpus)}

    def get_actor(self, name: str) -> FakeActor:
        self._head()
        if name not in self.actors:
            raise ValueError(name)
        return self.actors[name]

    def wait(self, references: list[Any], num_returns: int = 1, timeout: float = 0.0) -> tuple[list[Any], list[Any]]:
        ready = [one for one in references if one.engine.has_process or one.engine.failure]
        return ready, [one for one in references if one not in ready]

    def get(self, reference: Any) -> Any:
        return reference.engine.answer(reference.call)

    def kill(self, actor: FakeActor, no_restart: bool) -> None:
        self.actors = {name: one for name, one in self.actors.items() if one is not actor}

    def remote(self, **settings: Any) -> Any:
        def options(name: str, **settings: Any) -> Any:
            return SimpleNamespace(remote=lambda *arguments: self._create(name, settings, arguments[-1]))

        return lambda actor_class: SimpleNamespace(options=options)

    def _create(self, name: str, settings: dict[str, Any], serves: str) -> FakeActor:
        self._head()
        if name not in self.actors:
            self.actors[name] = FakeActor(serves).set_status(*self.initial_status)
        elif not settings.get("get_if_exists"):
            raise ActorAlreadyExistsError(name)
        return self.actors[name]

    def method(self, **settings: Any) -> Any:
        return lambda function: function

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(was_current_actor_reconstructed=False)

    # ray.util ------------------------------------------------------------------------------------------------

    def get_node_ip_address(self) -> str:
        return "10.0.0.1"

    def list_named_actors(self) -> list[str]:
        self._head()
        return list(self.actors)

    def placement_group(self, *bundles: Any, **settings: Any) -> str:
        return str(settings["name"])

    def get_placement_group(self, name: str) -> str:
        return str(self.get_actor(name) and name)

    def placement_group_table(self, group: str) -> dict[str, str]:
        return {"state": "CREATED" if self.actors[group].has_process else "PENDING"}

    def remove_placement_group(self, group: str) -> None:
        pass

    def PlacementGroupSchedulingStrategy(self, *arguments: Any, **settings: Any) -> None:  # noqa: N802
        pass
