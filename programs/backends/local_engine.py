"""An engine in this process, called through the service's own handlers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from programs.backends.backend import Reply
from programs.backends.handlers import call_handler
from programs.record import RunError
from programs.settings import Settings
from routes.context import Context, Readiness, RequestLimiter
from rwkv_batch.calls import DecodeDefaults
from rwkv_batch.errors import StartupError
from rwkv_batch.ipc.wire import Observe
from rwkv_batch.request import Priority
from rwkv_batch.tokenizer import make_tables
from rwkv_batch.translation.plan import CACHE_KEY, TranslationCache

_MAX_IN_FLIGHT = 4096
_REQUESTS_PER_SLOT = 2
"""Requests in flight per running slot. Some wait while others decode."""


class LocalEngine:
    """Backend that loads the model of the settings."""

    def __init__(self, settings: Settings, *, stores_sessions: bool = False) -> None:
        """`stores_sessions`: keep sessions in the settings' database. Otherwise they stay in memory."""
        if not stores_sessions:
            pool = msgspec.structs.replace(settings.engine.pool, state_db="")
            settings = msgspec.structs.replace(settings, engine=msgspec.structs.replace(settings.engine, pool=pool))
        self._settings = settings
        self._context: Context | None = None
        self._engine: _Engine | None = None

    async def model(self) -> str:
        """See Backend. The name holds the file's name, its size and the dtype."""
        engine = self._settings.engine
        try:
            size = (await asyncio.to_thread(Path(engine.model_path).stat)).st_size
        except OSError as error:
            raise RunError(f"model file {engine.model_path} cannot be read ({error.strerror})") from None
        inputs = "" if engine.activation_bits == 8 else f", {engine.activation_bits}-bit inputs"
        return f"{Path(engine.model_path).name} ({size} bytes, {engine.dtype}{inputs})"

    async def open(self) -> int:
        """See Backend."""
        try:
            self._engine = await asyncio.to_thread(_Engine, self._settings)
        except StartupError as error:
            raise RunError(str(error)) from None
        config = self._settings.http
        defaults = msgspec.convert(config.defaults, DecodeDefaults)
        self._context = Context(self._engine, config, RequestLimiter(1), Readiness(0), defaults=defaults)
        self._context.shared[CACHE_KEY] = TranslationCache(config.translate_cache)
        return min(_MAX_IN_FLIGHT, self._engine.max_running * _REQUESTS_PER_SLOT)

    @property
    def context(self) -> Context:
        """The handlers' context. Available after `open`."""
        assert self._context is not None
        return self._context

    async def request(self, path: str, body: dict[str, Any]) -> Reply:
        # There are no other clients, so no running slot is reserved for interactive rows.
        return await call_handler(self.context, path, body, client="batch", priority=Priority.INTERACTIVE)

    async def close(self) -> None:
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """Like `close`, from any thread."""
        if self._engine is not None:
            self._engine.stop()


class _Engine:
    """An EngineProtocol: the engine with the interface that routes use."""

    is_connected = True
    lost: ClassVar[list[str]] = []

    def __init__(self, settings: Settings) -> None:
        """Loads the model. Raises StartupError."""
        from rwkv_batch.engine import Engine

        make_tables()
        engine = Engine(settings.engine)
        engine.start()
        self.max_running = engine.scheduler.limits.max_running
        self.submit, self.cancel, self.call, self.stop = engine.submit, engine.cancel, engine.call, engine.stop

    def observe(self, observation: Observe) -> None:
        """Does nothing, because there are no metrics here."""
