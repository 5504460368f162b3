"""The models that are loaded while the service runs, as an HTTP worker sees them: a context for each, chosen by name.

The supervisor tells what there is; a request whose `model` names one of them is handled with that model's context, so
that no route knows of more than one.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from routes.context import Context
from routes.request.error_value import error_value
from routes.request.model_names import base_name
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.ipc.served_model import DEFAULT_MODEL_NAME, ModelCommand, ModelSpec, ModelStatus, ServedModel

_RETRY_S = 2.0
_FINAL_STATUSES = (ModelStatus.READY, ModelStatus.FAILED)
_POLL_S = 2.0
"""Within which what the supervisor has done is in the table; so often it is looked at anyway."""


class ModelClient(Protocol):
    """The way to a model's engine."""

    @property
    def num_jobs(self) -> int:
        """Jobs under way."""

    def update(self, engines: Sequence[ServedModel]) -> None:
        """What is told of it."""

    def stop(self) -> None:
        """Close it for good."""


Connect = Callable[[ServedModel], tuple[Context, ModelClient]]


class ModelRegistry:
    """See above. `send_command` sends a command to the supervisor, `connect` makes a model's context.

    Threads: the one that listens to the supervisor calls `update` and `command_answered`, any `pop_used`; the loop all else.
    """

    def __init__(
        self,
        send_command: Callable[[ModelCommand], None],
        connect: Connect,
        own_changed: Callable[[Sequence[ServedModel]], None] = lambda engines: None,
    ) -> None:
        """`own_changed` is told the engines of the service's own model."""
        self._send_command = send_command
        self._connect = connect
        self._own_changed = own_changed
        self.engines: tuple[ServedModel, ...] = ()
        """of the service's own model"""
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._pending: dict[int, Callable[[str | None, int], object]] = {}
        self._listeners: set[Callable[[], object]] = set()
        self._connected: dict[str, tuple[Context, ModelClient]] = {}
        """by their address"""
        self._used_names: set[str] = set()
        self._num_updates = 0
        """tables that the supervisor has sent"""
        self._sync_lock = asyncio.Lock()
        """held by who puts a question to the supervisor"""
        self._sync_started = self._sync_finished = 0
        """questions: how many, and which was answered last"""
        self.registered: tuple[ServedModel, ...] = ()

    def update(self, registered: Sequence[ServedModel]) -> None:
        """What the supervisor says there is now."""
        self.engines = tuple(engine for engine in registered if engine.is_own)
        self._own_changed(self.engines)
        registered = [engine for engine in registered if not engine.is_own]
        addresses = {model.address for model in registered}
        for model in registered:
            if model.address in self._connected:
                self._connected[model.address][1].update([model])
            elif model.status is ModelStatus.READY:
                self._connected[model.address] = self._connect(model)
        with self._lock:
            self.registered = tuple(registered)
            self._num_updates += 1
            wakes, self._listeners = self._listeners, set()
        for address in set(self._connected) - addresses:  # now: a model that the table has as ready is here
            self._connected.pop(address)[1].stop()
        for wake in wakes:
            wake()

    def command_answered(self, number: int, refusal: str | None) -> None:
        """The supervisor's answer to a command."""
        with self._lock:
            settle = self._pending.pop(number, None)
        if settle is not None:
            settle(refusal, self._num_updates)

    def find(self, name: str) -> ServedModel | None:
        """What is known of a model that was asked for."""
        return next((model for model in self.registered if model.spec.name == name), None)

    def ready_context(self, model: ServedModel) -> Context | None:
        """To look at a model, which is no use of it; None: it is being loaded, has failed, or leaves."""
        connected = self._connected.get(model.address)
        return connected[0] if connected is not None and model.status is ModelStatus.READY else None

    def select_model(self, context: Context, requested: str) -> Context:
        """The context of the model that a request names. Raises ServiceError if it is not to be had."""
        model = self._find_by_request(requested)
        if model is None:
            return self._own_context(context, requested)
        name, context_here = model.spec.name, self.ready_context(model)
        match model.status:
            case ModelStatus.READY if context_here is not None:
                with self._lock:
                    self._used_names.add(name)
                return context_here
            case ModelStatus.FAILED:
                raise _not_found(f"model: {name!r} could not be loaded: {model.error}", requested)
            case ModelStatus.UNLOADING:
                raise _not_found(f"model: {name!r} is being unloaded", requested)
            case _:
                message = f"model: {name!r} is being loaded; GET /v1/models/{name} says when it is ready"
                raise ServiceError(ErrorKind.ENGINE_LOST, message, field="model", retry_after_s=_RETRY_S)

    async def wait_until_known(self, context: Context, requested: str, timeout_s: float) -> None:
        """Return when this worker knows all that others had been told of the model that a request names: another may
        have been told just now that there is one, or that it is ready. At the latest after so long.

        No model is waited for: who waits has a place, and it may load for minutes while others serve.
        """

        def is_known() -> bool:
            model = self._find_by_request(requested)
            return _is_own(context, requested) if model is None else model.status is not ModelStatus.LOADING

        if is_known():
            return
        limit = min(timeout_s, _POLL_S)
        waits = [asyncio.ensure_future(one) for one in (self._wait_until(is_known, limit), self._sync())]
        try:
            await asyncio.wait(waits, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()

    def pop_used(self) -> tuple[str, ...]:
        """The models that have been asked for since the last call, or answer right now."""
        busy = {model.spec.name for model in self.registered if self._is_busy(model)}
        with self._lock:
            used, self._used_names = self._used_names | busy, set()
        return tuple(used)

    async def load(self, spec: ModelSpec, timeout_s: float | None) -> ServedModel:
        """Have a model loaded, and wait so long until it is ready or has failed; None: do not wait."""
        failed = self.find(spec.name)  # earlier under that name, and in the table until the supervisor tells more
        num_updates = await self._command(spec=spec)
        return await self._wait_for_status(
            spec.name, timeout_s, num_updates, failed.address if failed is not None else ""
        )

    async def unload(self, name: str, timeout_s: float | None) -> None:
        """Have a model unloaded, and wait so long until it is gone; None: do not wait."""
        await self._command(unload=name)
        await self._wait_until(lambda: self.find(name) is None, timeout_s)

    async def change_engines(self, change: ModelCommand, timeout_s: float | None) -> None:
        """Add, remove or restart engines of the own model, and wait so long until all stand still; None: do not."""
        previous = self.engines
        if change.add_engine is not None:
            await self._send(change, ErrorKind.INVALID_FIELD, "devices", list(change.add_engine))
        else:
            await self._send(change, ErrorKind.INVALID_FIELD, "engine", change.remove_engine or change.restart_engine)
        await self._wait_until(lambda: self.engines != previous and _is_settled(self.engines, change), timeout_s)

    def _find_by_request(self, requested: str) -> ServedModel | None:
        """The model that a name means, also with a state or an adapter in it; of several the longest name."""
        matching = [model for model in self.registered if base_name(requested, model.spec.name) is not None]
        return max(matching, key=lambda one: (requested.startswith(one.spec.name), len(one.spec.name)), default=None)

    def _own_context(self, context: Context, requested: str) -> Context:
        """The service's own model. Raises ServiceError if that is not meant."""
        if _is_own(context, requested):
            return context
        own = context.config.model_name
        others = [model.spec.name for model in self.registered if model.status is ModelStatus.READY]
        listed = ", ".join(map(repr, [own, *others]))
        raise _not_found(f"model: no model {error_value(requested)!r} is served here, only {listed}", requested)

    def _is_busy(self, model: ServedModel) -> bool:
        connected = self._connected.get(model.address)
        return connected is not None and connected[1].num_jobs > 0

    async def _command(self, spec: ModelSpec | None = None, unload: str = "") -> int:
        kind = ErrorKind.NAME_TAKEN if spec is not None else ErrorKind.MODEL_NOT_FOUND
        return await self._send(ModelCommand(0, spec, unload), kind, "name", spec.name if spec is not None else unload)

    async def _send(self, command: ModelCommand, kind: ErrorKind, field: str, given: object) -> int:
        """Have the supervisor obey; returns how many tables it had sent before its answer: the next one knows of it.

        Raises ServiceError of that kind with its reason if it does not.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[str | None, int]] = loop.create_future()
        number = next(self._numbers)

        def settle(refusal: str | None, num_updates: int) -> None:
            if not answer.done():  # else nobody waits any more
                answer.set_result((refusal, num_updates))

        with self._lock:
            self._pending[number] = lambda *command_answered: loop.call_soon_threadsafe(settle, *command_answered)
        self._send_command(msgspec.structs.replace(command, number=number))
        refusal, num_updates = await answer
        if refusal is not None:
            raise ServiceError(kind, refusal, field=field, given=given)
        return num_updates

    async def _sync(self) -> None:
        """Return when all has come that any worker was told before; who ask at the same time share a question."""
        started = self._sync_started
        async with self._sync_lock:
            if self._sync_finished > started:
                return
            self._sync_started = number = self._sync_started + 1
            await self._send(ModelCommand(0, is_barrier=True), ErrorKind.INTERNAL, "model", "")
            self._sync_finished = number

    async def _wait_for_status(
        self, name: str, timeout_s: float | None, num_updates: int, previous: str
    ) -> ServedModel:
        """What is told of a model, at the latest after the time. Raises ServiceError if it leaves meanwhile.

        `num_updates`: tables that may not know of it; `previous`: the address of another one that had the name.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (timeout_s or 0.0)
        while True:
            seen_updates = self._num_updates
            model = next((one for one in self.registered if one.spec.name == name and one.address != previous), None)
            if model is not None and (model.status in _FINAL_STATUSES or loop.time() >= deadline):
                return model
            if model is None and (seen_updates > num_updates or loop.time() >= deadline + _POLL_S):
                raise _not_found(f"name: {name!r} was unloaded before it was ready", name, "name")
            await self._wait_for_update(seen_updates, min(max(deadline - loop.time(), 0.05), _POLL_S))

    async def _wait_until(self, condition: Callable[[], bool], timeout_s: float | None) -> None:
        """Until that holds of what the supervisor has told; at the latest after so long, None: at once."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (timeout_s or 0.0)
        while True:
            seen_updates = self._num_updates
            if condition() or loop.time() >= deadline:
                return
            await self._wait_for_update(seen_updates, min(deadline - loop.time(), _POLL_S))

    async def _wait_for_update(self, num_updates: int, timeout_s: float) -> None:
        """Until the supervisor has sent more tables than so many, or the time is over."""
        loop, updated = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(updated.set)

        with self._lock:
            if self._num_updates > num_updates:
                return
            self._listeners.add(wake)
        try:
            await asyncio.wait_for(updated.wait(), timeout_s)
        except TimeoutError:
            pass
        finally:
            with self._lock:
                self._listeners.discard(wake)


def _is_own(context: Context, requested: str) -> bool:
    """Whether the service's own model is meant; any name is its own where no other can be loaded."""
    config = context.config
    return (
        not config.models_dir or requested == DEFAULT_MODEL_NAME or base_name(requested, config.model_name) is not None
    )


def _is_settled(engines: Sequence[ServedModel], change: ModelCommand) -> bool:
    """Whether what was asked for has been done, as far as it can be."""
    if change.remove_engine:
        return all(engine.engine != change.remove_engine for engine in engines)
    return all(engine.status in _FINAL_STATUSES for engine in engines)


def _not_found(message: str, requested: str, field: str = "model") -> ServiceError:
    return ServiceError(ErrorKind.MODEL_NOT_FOUND, message, field=field, given=error_value(requested))
