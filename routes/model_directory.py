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
from routes.request.model_names import base_name
from routes.request.shown import shown
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.ipc.served_model import USUAL_NAME, ModelCommand, ModelStatus, ModelWish, ServedModel

_RETRY_S = 2.0
_SETTLED = (ModelStatus.READY, ModelStatus.FAILED)
_TOLD_S = 2.0
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


class ModelDirectory:
    """See above. `tell` sends a command to the supervisor, `connect` makes a model's context.

    Threads: the one that listens to the supervisor calls `update` and `answered`, any `take_used`; the loop all else.
    """

    def __init__(
        self,
        tell: Callable[[ModelCommand], None],
        connect: Connect,
        own_changed: Callable[[Sequence[ServedModel]], None] = lambda engines: None,
    ) -> None:
        """`own_changed` is told the engines of the service's own model."""
        self._tell = tell
        self._connect = connect
        self._own_changed = own_changed
        self.engines: tuple[ServedModel, ...] = ()
        """of the service's own model"""
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, Callable[[str | None, int], object]] = {}
        self._changed: set[Callable[[], object]] = set()
        self._here: dict[str, tuple[Context, ModelClient]] = {}
        """by their address"""
        self._used: set[str] = set()
        self._num_told = 0
        """tables that the supervisor has sent"""
        self._asks = asyncio.Lock()
        """held by who puts a question to the supervisor"""
        self._begun = self._answered = 0
        """questions: how many, and which was answered last"""
        self.table: tuple[ServedModel, ...] = ()

    def update(self, table: Sequence[ServedModel]) -> None:
        """What the supervisor says there is now."""
        self.engines = tuple(engine for engine in table if engine.is_own)
        self._own_changed(self.engines)
        table = [engine for engine in table if not engine.is_own]
        addresses = {model.address for model in table}
        for model in table:
            if model.address in self._here:
                self._here[model.address][1].update([model])
            elif model.status is ModelStatus.READY:
                self._here[model.address] = self._connect(model)
        with self._lock:
            self.table = tuple(table)
            self._num_told += 1
            wakes, self._changed = self._changed, set()
        for address in set(self._here) - addresses:  # now: a model that the table has as ready is here
            self._here.pop(address)[1].stop()
        for wake in wakes:
            wake()

    def answered(self, number: int, refusal: str | None) -> None:
        """The supervisor's answer to a command."""
        with self._lock:
            settle = self._waiting.pop(number, None)
        if settle is not None:
            settle(refusal, self._num_told)

    def find(self, name: str) -> ServedModel | None:
        """What is known of a model that was asked for."""
        return next((model for model in self.table if model.wish.name == name), None)

    def context_of(self, model: ServedModel) -> Context | None:
        """To look at a model, which is no use of it; None: it is being loaded, has failed, or leaves."""
        here = self._here.get(model.address)
        return here[0] if here is not None and model.status is ModelStatus.READY else None

    def chosen(self, context: Context, asked: str) -> Context:
        """The context of the model that a request names. Raises ServiceError if it is not to be had."""
        model = self._named(asked)
        if model is None:
            return self._own(context, asked)
        name, context_here = model.wish.name, self.context_of(model)
        match model.status:
            case ModelStatus.READY if context_here is not None:
                with self._lock:
                    self._used.add(name)
                return context_here
            case ModelStatus.FAILED:
                raise _unknown(f"model: {name!r} could not be loaded: {model.error}", asked)
            case ModelStatus.UNLOADING:
                raise _unknown(f"model: {name!r} is being unloaded", asked)
            case _:
                message = f"model: {name!r} is being loaded; GET /v1/models/{name} says when it is ready"
                raise ServiceError(ErrorKind.ENGINE_LOST, message, field="model", retry_after_s=_RETRY_S)

    async def wait_until_told(self, context: Context, asked: str, timeout_s: float) -> None:
        """Return when this worker knows all that others had been told of the model that a request names: another may
        have been told just now that there is one, or that it is ready. At the latest after so long.

        No model is waited for: who waits has a place, and it may load for minutes while others serve.
        """

        def is_told() -> bool:
            model = self._named(asked)
            return _is_own(context, asked) if model is None else model.status is not ModelStatus.LOADING

        if is_told():
            return
        most = min(timeout_s, _TOLD_S)
        known = [asyncio.ensure_future(one) for one in (self._until(is_told, most), self._catch_up())]
        try:
            await asyncio.wait(known, timeout=most, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in known:
                one.cancel()

    def take_used(self) -> tuple[str, ...]:
        """The models that have been asked for since the last call, or answer right now."""
        busy = {model.wish.name for model in self.table if self._is_busy(model)}
        with self._lock:
            used, self._used = self._used | busy, set()
        return tuple(used)

    async def load(self, wish: ModelWish, timeout_s: float | None) -> ServedModel:
        """Have a model loaded, and wait so long until it is ready or has failed; None: do not wait."""
        failed = self.find(wish.name)  # earlier under that name, and in the table until the supervisor tells more
        num_told = await self._command(wish=wish)
        return await self._settled(wish.name, timeout_s, num_told, failed.address if failed is not None else "")

    async def unload(self, name: str, timeout_s: float | None) -> None:
        """Have a model unloaded, and wait so long until it is gone; None: do not wait."""
        await self._command(unload=name)
        await self._until(lambda: self.find(name) is None, timeout_s)

    async def change_engines(self, change: ModelCommand, timeout_s: float | None) -> None:
        """Add, remove or restart engines of the own model, and wait so long until all stand still; None: do not."""
        before = self.engines
        if change.add_engine is not None:
            await self._send(change, ErrorKind.INVALID_FIELD, "devices", list(change.add_engine))
        else:
            await self._send(change, ErrorKind.INVALID_FIELD, "engine", change.remove_engine or change.restart_engine)
        await self._until(lambda: self.engines != before and _stand_still(self.engines, change), timeout_s)

    def _named(self, asked: str) -> ServedModel | None:
        """The model that a name means, also with a state or an adapter in it; of several the longest name."""
        named = [model for model in self.table if base_name(asked, model.wish.name) is not None]
        return max(named, key=lambda one: (asked.startswith(one.wish.name), len(one.wish.name)), default=None)

    def _own(self, context: Context, asked: str) -> Context:
        """The service's own model. Raises ServiceError if that is not meant."""
        if _is_own(context, asked):
            return context
        own = context.config.model_name
        others = [model.wish.name for model in self.table if model.status is ModelStatus.READY]
        listed = ", ".join(map(repr, [own, *others]))
        raise _unknown(f"model: no model {shown(asked)!r} is served here, only {listed}", asked)

    def _is_busy(self, model: ServedModel) -> bool:
        here = self._here.get(model.address)
        return here is not None and here[1].num_jobs > 0

    async def _command(self, wish: ModelWish | None = None, unload: str = "") -> int:
        kind = ErrorKind.NAME_TAKEN if wish is not None else ErrorKind.MODEL_NOT_FOUND
        return await self._send(ModelCommand(0, wish, unload), kind, "name", wish.name if wish is not None else unload)

    async def _send(self, command: ModelCommand, kind: ErrorKind, field: str, given: object) -> int:
        """Have the supervisor obey; returns how many tables it had sent before its answer: the next one knows of it.

        Raises ServiceError of that kind with its reason if it does not.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[str | None, int]] = loop.create_future()
        number = next(self._numbers)

        def settle(refusal: str | None, num_told: int) -> None:
            if not answer.done():  # else nobody waits any more
                answer.set_result((refusal, num_told))

        with self._lock:
            self._waiting[number] = lambda *answered: loop.call_soon_threadsafe(settle, *answered)
        self._tell(msgspec.structs.replace(command, number=number))
        refusal, num_told = await answer
        if refusal is not None:
            raise ServiceError(kind, refusal, field=field, given=given)
        return num_told

    async def _catch_up(self) -> None:
        """Return when all has come that any worker was told before; who ask at the same time share a question."""
        came = self._begun
        async with self._asks:
            if self._answered > came:
                return
            self._begun = number = self._begun + 1
            await self._send(ModelCommand(0, is_question=True), ErrorKind.INTERNAL, "model", "")
            self._answered = number

    async def _settled(self, name: str, timeout_s: float | None, num_told: int, before: str) -> ServedModel:
        """What is told of a model, at the latest after the time. Raises ServiceError if it leaves meanwhile.

        `num_told`: tables that may not know of it; `before`: the address of another one that had the name.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (timeout_s or 0.0)
        while True:
            looked_at = self._num_told
            model = next((one for one in self.table if one.wish.name == name and one.address != before), None)
            if model is not None and (model.status in _SETTLED or loop.time() >= deadline):
                return model
            if model is None and (looked_at > num_told or loop.time() >= deadline + _TOLD_S):
                raise _unknown(f"name: {name!r} was unloaded before it was ready", name, "name")
            await self._change(looked_at, min(max(deadline - loop.time(), 0.05), _TOLD_S))

    async def _until(self, holds: Callable[[], bool], timeout_s: float | None) -> None:
        """Until that holds of what the supervisor has told; at the latest after so long, None: at once."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (timeout_s or 0.0)
        while True:
            looked_at = self._num_told
            if holds() or loop.time() >= deadline:
                return
            await self._change(looked_at, min(deadline - loop.time(), _TOLD_S))

    async def _change(self, num_told: int, timeout_s: float) -> None:
        """Until the supervisor has sent more tables than so many, or the time is over."""
        loop, there = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(there.set)

        with self._lock:
            if self._num_told > num_told:
                return
            self._changed.add(wake)
        try:
            await asyncio.wait_for(there.wait(), timeout_s)
        except TimeoutError:
            pass
        finally:
            with self._lock:
                self._changed.discard(wake)


def _is_own(context: Context, asked: str) -> bool:
    """Whether the service's own model is meant; any name is its own where no other can be loaded."""
    config = context.config
    return not config.models_dir or asked == USUAL_NAME or base_name(asked, config.model_name) is not None


def _stand_still(engines: Sequence[ServedModel], change: ModelCommand) -> bool:
    """Whether what was asked for has been done, as far as it can be."""
    if change.remove_engine:
        return all(engine.engine != change.remove_engine for engine in engines)
    return all(engine.status in _SETTLED for engine in engines)


def _unknown(message: str, asked: str, field: str = "model") -> ServiceError:
    return ServiceError(ErrorKind.MODEL_NOT_FOUND, message, field=field, given=shown(asked))
