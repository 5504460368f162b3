"""An engine in this process, asked through the service's own handlers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from bulk.backends.backend import Reply
from bulk.backends.handlers import ask_handler
from bulk.records import RunError
from routes.context import Context, Gate
from routes.readiness import Readiness
from routes.translate import CACHE, TranslationCache
from rwkv_batch.calls import Answer, EngineCall
from rwkv_batch.calls import Reply as OnAnswer
from rwkv_batch.errors import StartupError
from rwkv_batch.ipc.wire import Observe
from rwkv_batch.protocol import Admitted, Sink
from rwkv_batch.request import Job, Priority
from rwkv_batch.tokenizer import make_tables
from settings import Settings

_MOST_IN_FLIGHT = 4096
_AHEAD = 2
"""Questions for each place in the steps: some decode while others wait to."""


class OwnEngine:
    """Loads the model of the settings."""

    def __init__(self, settings: Settings, *, keeps_sessions: bool = False) -> None:
        """`keeps_sessions`: in the settings' database; else in memory alone."""
        if not keeps_sessions:
            pool = msgspec.structs.replace(settings.engine.pool, state_db="")
            settings = msgspec.structs.replace(settings, engine=msgspec.structs.replace(settings.engine, pool=pool))
        self._settings = settings
        self._context: Context | None = None
        self._engine: _Engine | None = None

    async def model(self) -> str:
        """See Backend. A file is known by its name and size, and by how its weights are used."""
        engine = self._settings.engine
        try:
            size = (await asyncio.to_thread(Path(engine.model_path).stat)).st_size
        except OSError as error:
            raise RunError(f"model file {engine.model_path} cannot be read ({error.strerror})") from None
        return f"{Path(engine.model_path).name} ({size} bytes, {engine.dtype})"

    async def open(self) -> int:
        """See Backend."""
        try:
            self._engine = await asyncio.to_thread(_Engine, self._settings)
        except StartupError as error:
            raise RunError(str(error)) from None
        config = self._settings.http
        self._context = Context(self._engine, config, Gate(1), Readiness(0), whole_within_s=None)
        self._context.shared[CACHE] = TranslationCache(config.translate_cache)
        return min(_MOST_IN_FLIGHT, self._engine.places * _AHEAD)

    @property
    def context(self) -> Context:
        """What handlers get; after `open`."""
        assert self._context is not None
        return self._context

    async def ask(self, path: str, body: dict[str, Any]) -> Reply:
        """See Backend."""
        # Nobody else is served here: no place is kept for interactive rows.
        return await ask_handler(self.context, path, body, client="batch", priority=Priority.INTERACTIVE)

    async def close(self) -> None:
        """See Backend."""
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """The same from any thread."""
        if self._engine is not None:
            self._engine.stop()


class _Engine:
    """The engine as routes see it."""

    is_connected = True
    lost: ClassVar[list[str]] = []

    def __init__(self, settings: Settings) -> None:
        """Loads the model. Raises StartupError."""
        from rwkv_batch.engine import Engine

        make_tables()
        self._engine = Engine(settings.engine)
        self._engine.start()
        self.places = self._engine.scheduler.limits.max_running
        self.stop = self._engine.stop

    def submit(self, job: Job, sink: Sink, admitted: Admitted) -> None:
        """See EngineProtocol."""
        self._engine.submit(job, sink, admitted)

    def cancel(self, job_id: str) -> None:
        """See EngineProtocol."""
        self._engine.cancel(job_id)

    def call(self, call: EngineCall[Answer], reply: OnAnswer[Answer]) -> None:
        """See EngineProtocol."""
        self._engine.call(call, reply)

    def observe(self, observation: Observe) -> None:
        """Nobody reads figures here."""
