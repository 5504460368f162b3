"""The models loaded at run time, as an HTTP worker knows them.

The supervisor sends the list of models. A request whose `model` names one of them runs with that model's context, so
routes only know one model.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
from collections.abc import Callable, Sequence

import msgspec

from routes.context import Context, News, Readiness
from routes.request.fields import error_value
from routes.request.model_names import base_name, means_model, model_not_found
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.fleet.fleet import Fleet
from rwkv_batch.fleet.quota_ledger import QuotaLedger
from rwkv_batch.fleet.routing import FleetLimits
from rwkv_batch.ipc.served_model import ModelCommand, ModelSpec, ModelStatus, ServedModel
from rwkv_batch.translation.plan import CACHE_KEY, TranslationCache
from rwkv_batch.translation.prompt_forms import prompt_form

_RETRY_S = 2.0
_FINAL_STATUSES = (ModelStatus.READY, ModelStatus.FAILED)
_POLL_S = 2.0
"""Interval of checks. The supervisor's list is up to date after at most this time."""

Connect = Callable[[ServedModel], tuple[Context, Fleet]]


class ModelRegistry:
    """Selects models by name; see the module.

    Threads: the supervisor's listener calls `update` and `command_answered`. `pop_used` may be called by any thread.
    The event loop calls everything else.
    """

    def __init__(
        self,
        send_command: Callable[[ModelCommand], None],
        connect: Connect,
        own_changed: Callable[[Sequence[ServedModel]], None] = lambda engines: None,
    ) -> None:
        """Create the registry.

        send_command: sends a command to the supervisor
        connect: creates the context of a model
        own_changed: called with the engines of the service's own model
        """
        self._send_command = send_command
        self._connect = connect
        self._own_changed = own_changed
        self.engines: tuple[ServedModel, ...] = ()
        """The engines of the service's own model."""
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._pending: dict[int, Callable[[str | None, int], object]] = {}
        self._updated = News()
        self._connected: dict[str, tuple[Context, Fleet]] = {}
        """By address."""
        self._used_names: set[str] = set()
        self._num_updates = 0
        """Number of lists received from the supervisor."""
        self._sync_lock = asyncio.Lock()
        """Held while a barrier command is sent."""
        self._sync_started = self._sync_finished = 0
        """Number of barrier commands sent, and the last one answered."""
        self.registered: tuple[ServedModel, ...] = ()

    def update(self, registered: Sequence[ServedModel]) -> None:
        """Apply the supervisor's list of models."""
        self.engines = tuple(engine for engine in registered if engine.is_own)
        self._own_changed(self.engines)
        registered = [engine for engine in registered if not engine.is_own]
        addresses = {model.address for model in registered}
        for model in registered:
            if model.address in self._connected:
                self._connected[model.address][1].update([model])
            elif model.status is ModelStatus.READY:
                self._connected[model.address] = self._connect(model)
        self.registered = tuple(registered)
        self._num_updates += 1
        # After the new list is visible: models that it lists as ready have a connection.
        for address in set(self._connected) - addresses:
            self._connected.pop(address)[1].stop()
        self._updated.announce()

    def drain(self) -> None:
        """The service is shutting down, so the loss of an engine is no fault."""
        for _, client in list(self._connected.values()):
            client.is_shutting_down = True

    def command_answered(self, number: int, refusal: str | None) -> None:
        """Pass on the supervisor's answer to a command."""
        with self._lock:
            settle = self._pending.pop(number, None)
        if settle is not None:
            settle(refusal, self._num_updates)

    def find(self, name: str) -> ServedModel | None:
        return next((model for model in self.registered if model.spec.name == name), None)

    def ready_context(self, model: ServedModel) -> Context | None:
        """Return a model's context without marking it as used. None unless the model is ready."""
        connected = self._connected.get(model.address)
        return connected[0] if connected is not None and model.status is ModelStatus.READY else None

    def select_model(self, context: Context, requested: str) -> Context:
        """Return the context of the model that a request names. Raises ServiceError if it is not available."""
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
                message = f"model: {name!r} is being loaded; GET /v1/models/{name} shows when it is ready"
                raise ServiceError(ErrorKind.ENGINE_LOST, message, field="model", retry_after_s=_RETRY_S)

    async def wait_until_known(self, context: Context, requested: str, timeout_s: float) -> None:
        """Wait until this worker knows what other workers already know.

        Waits at most `timeout_s` seconds. Another worker may have learned earlier that the model exists or is ready.
        Does not wait for loading, which can take minutes: a waiting request occupies a stream.
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
        """Return models used since the last call, and those with running jobs."""
        busy = {model.spec.name for model in self.registered if self._is_busy(model)}
        with self._lock:
            used, self._used_names = self._used_names | busy, set()
        return tuple(used)

    async def load(self, spec: ModelSpec, timeout_s: float | None) -> ServedModel:
        """Load a model and wait until it is ready or failed. Waits at most `timeout_s` seconds. None: does not wait."""
        failed = self.find(spec.name)  # an earlier model of that name stays in the list until the supervisor's next one
        num_updates = await self._command(spec=spec)
        return await self._wait_for_status(
            spec.name, timeout_s, num_updates, failed.address if failed is not None else ""
        )

    async def unload(self, name: str, timeout_s: float | None) -> None:
        """Unload a model and wait at most `timeout_s` seconds. None: do not wait."""
        await self._command(unload=name)
        await self._wait_until(lambda: self.find(name) is None, timeout_s)

    async def change_engines(self, change: ModelCommand, timeout_s: float | None) -> None:
        """Add, remove or restart engines of the own model, and wait.

        Waits at most `timeout_s` seconds. None: does not wait.
        """
        previous = self.engines
        if change.add_engine is not None:
            await self._send(change, ErrorKind.INVALID_FIELD, "devices", list(change.add_engine))
        else:
            await self._send(change, ErrorKind.INVALID_FIELD, "engine", change.remove_engine or change.restart_engine)
        await self._wait_until(lambda: self.engines != previous and _is_settled(self.engines, change), timeout_s)

    def _find_by_request(self, requested: str) -> ServedModel | None:
        """Return the model that a name selects.

        The name may have a state or an adapter. Prefers the longest model name.
        """
        matching = [model for model in self.registered if base_name(requested, model.spec.name) is not None]
        return max(matching, key=lambda one: (requested.startswith(one.spec.name), len(one.spec.name)), default=None)

    def _own_context(self, context: Context, requested: str) -> Context:
        """Return the service's own context. Raises ServiceError if the name selects another model."""
        if _is_own(context, requested):
            return context
        own = context.config.model_name
        others = [model.spec.name for model in self.registered if model.status is ModelStatus.READY]
        raise model_not_found(requested, [own, *others])

    def _is_busy(self, model: ServedModel) -> bool:
        connected = self._connected.get(model.address)
        return connected is not None and connected[1].num_jobs > 0

    async def _command(self, spec: ModelSpec | None = None, unload: str = "") -> int:
        kind = ErrorKind.NAME_TAKEN if spec is not None else ErrorKind.MODEL_NOT_FOUND
        return await self._send(ModelCommand(0, spec, unload), kind, "name", spec.name if spec is not None else unload)

    async def _send(self, command: ModelCommand, kind: ErrorKind, field: str, given: object) -> int:
        """Send a command. Return the number of lists received before its answer; the next list includes the change.

        Raises ServiceError of `kind` with the supervisor's reason if it refuses.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[str | None, int]] = loop.create_future()
        number = next(self._numbers)

        def settle(refusal: str | None, num_updates: int) -> None:
            if not answer.done():  # else the caller was cancelled
                answer.set_result((refusal, num_updates))

        with self._lock:
            self._pending[number] = lambda *command_answered: loop.call_soon_threadsafe(settle, *command_answered)
        self._send_command(msgspec.structs.replace(command, number=number))
        refusal, num_updates = await answer
        if refusal is not None:
            raise ServiceError(kind, refusal, field=field, given=given)
        return num_updates

    async def _sync(self) -> None:
        """Wait until this worker has received everything that was sent before. Concurrent calls share a barrier."""
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
        """Return the model's last known status, at the latest after the timeout. Raises ServiceError if it is unloaded.

        num_updates: number of lists that may not contain the model
        previous: address of an earlier model of that name
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
        """Wait until the condition holds for the received lists.

        Waits at most `timeout_s` seconds. None: returns at once.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (timeout_s or 0.0)
        while True:
            seen_updates = self._num_updates
            if condition() or loop.time() >= deadline:
                return
            await self._wait_for_update(seen_updates, min(deadline - loop.time(), _POLL_S))

    async def _wait_for_update(self, num_updates: int, timeout_s: float) -> None:
        """Wait until more than `num_updates` lists were received, or for the timeout."""
        await self._updated.wait(lambda: self._num_updates > num_updates, timeout_s)


def connect_model(context: Context, model: ServedModel, name: str, quotas: QuotaLedger) -> tuple[Context, Fleet]:
    """Connect to a ready model and return its context and its engines.

    name: this process's name in the engine's status
    quotas: the ledger that counts API keys' limits over all models
    """
    readiness = Readiness(context.config.engine_wait_s)
    limits = FleetLimits(context.config.resubmit, context.config.engine_wait_s)
    fleet = Fleet(limits, readiness.engine_changed, quotas)
    fleet.update([model])
    fleet.start(name)
    form = prompt_form("auto", model.spec.file)
    config = msgspec.structs.replace(context.config, model_name=model.spec.name, translation_prompt=form)
    shared = {**context.shared, CACHE_KEY: TranslationCache(config.translate_cache)}
    return (
        dataclasses.replace(
            context, engine=fleet, readiness=readiness, config=config, shared=shared, defaults=model.spec.defaults
        ),
        fleet,
    )


def _is_own(context: Context, requested: str) -> bool:
    """Return whether the name selects the service's own model. Any name does if no other can be loaded."""
    return not context.config.models_dir or means_model(requested, context.config.model_name)


def _is_settled(engines: Sequence[ServedModel], change: ModelCommand) -> bool:
    """Return whether the change is done, or has failed."""
    if change.remove_engine:
        return all(engine.engine != change.remove_engine for engine in engines)
    return all(engine.status in _FINAL_STATUSES for engine in engines)


def _not_found(message: str, requested: str, field: str = "model") -> ServiceError:
    return ServiceError(ErrorKind.MODEL_NOT_FOUND, message, field=field, given=error_value(requested))
