"""What every handler may use, and the gate that counts and refuses answers under way."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, Protocol

from routes.api_keys import KeyRing
from routes.config import HttpConfig
from routes.file_store import Store
from routes.reader_wakeups import ReaderWakeups
from routes.readiness import Readiness
from rwkv_batch.decode_defaults import DecodeDefaults
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.ipc.served_model import ModelCommand, ModelSpec, ServedModel
from rwkv_batch.ipc.wire import Observe
from rwkv_batch.protocol import EngineProtocol
from rwkv_batch.tokenizer import Tokenizer

MAX_SESSION_TRANSFERS, MAX_FILE_DOWNLOADS = 2, 32
"""Answers of each kind that an HTTP worker has under way."""
MAX_SESSION_TRANSFERS_PER_CLIENT, MAX_FILE_DOWNLOADS_PER_CLIENT = 1, 8
"""Those of one client: it may read them as slowly as it likes."""


class ServingEngine(EngineProtocol, Protocol):
    """An engine that can be away, and that keeps the figures of all workers."""

    @property
    def is_connected(self) -> bool:
        """Whether a loaded engine is there."""

    @property
    def lost(self) -> list[str]:
        """Names of those of its engines that take no work."""

    def observe(self, observation: Observe) -> None:
        """Report an ended HTTP request."""


class Models(Protocol):
    """The models loaded while serving; see routes/model_registry.py."""

    @property
    def registered(self) -> Sequence[ServedModel]:
        """All that were asked for and have not left."""

    def find(self, name: str) -> ServedModel | None:
        """What is known of a model that was asked for."""

    def ready_context(self, model: ServedModel) -> Context | None:
        """To look at a model, which is no use of it; None: it is being loaded, has failed, or leaves."""

    def select_model(self, context: Context, requested: str) -> Context:
        """The context of the model that a request names. Raises ServiceError."""

    async def wait_until_known(self, context: Context, requested: str, timeout_s: float) -> None:
        """Return when it is known here whether there is the model that a request names, and whether it is being loaded;
        at the latest after so long."""

    async def load(self, spec: ModelSpec, timeout_s: float | None) -> ServedModel:
        """Have a model loaded, and wait so long for it. Raises ServiceError if that cannot be begun."""

    async def unload(self, name: str, timeout_s: float | None) -> None:
        """Have a model unloaded, and wait so long for it. Raises ServiceError if there is none."""

    @property
    def engines(self) -> Sequence[ServedModel]:
        """Those of the service's own model."""

    async def change_engines(self, change: ModelCommand, timeout_s: float | None) -> None:
        """Add, remove or restart engines, and wait so long until all stand still. Raises ServiceError."""


class RequestLimiter:
    """Counts the answers under way, in all and of each client, up to limits; lets no new work in while draining."""

    def __init__(self, limit: int, limit_per_client: int = 0) -> None:
        self._limit = limit
        self._limit_per_client = limit_per_client or max(1, limit * 7 // 8)
        self._lock = threading.Lock()
        self._num_active = 0
        self._active_by_client: Counter[str] = Counter()
        self.draining = False

    @property
    def num_active(self) -> int:
        """Answers under way."""
        return self._num_active

    def acquire(self, is_generation: bool, client: str) -> None:
        """Count an answer. Raises ServiceError (draining, overloaded) for work that cannot be taken."""
        with self._lock:
            if is_generation:
                self._check(client)
            self._num_active += 1
            self._active_by_client[client] += 1

    def release(self, client: str) -> None:
        """The answer's last byte was handed over, or its client is gone."""
        with self._lock:
            self._num_active -= 1
            self._active_by_client[client] -= 1
            if not self._active_by_client[client]:
                del self._active_by_client[client]

    def check_draining(self) -> None:
        """Raises ServiceError (draining) when no new work is taken."""
        if self.draining:
            raise ServiceError(
                ErrorKind.DRAINING, "the service is shutting down and takes no new requests", retry_after_s=5.0
            )

    def _check(self, client: str) -> None:
        self.check_draining()
        if self._num_active >= self._limit:
            raise ServiceError(
                ErrorKind.OVERLOADED,
                f"this HTTP worker writes {self._num_active} answers already, its limit is {self._limit} "
                "(--max-streams); try again, or put more rows into one request",
                retry_after_s=1.0,
            )
        if self._active_by_client[client] >= self._limit_per_client:
            raise ServiceError(
                ErrorKind.OVERLOADED,
                f"this HTTP worker writes {self._active_by_client[client]} answers to {client} already, its limit for one "
                f"client is {self._limit_per_client} (--max-streams-per-client); read the answers under way, "
                "or put more rows into one request",
                retry_after_s=1.0,
            )


class TransferLimiter:
    """So many of a kind that an HTTP worker has under way, in all and of each client. Any thread may leave one."""

    def __init__(self, limit: int, limit_per_client: int, what: str) -> None:
        self._limit = limit
        self._limit_per_client = limit_per_client
        self._what = what
        self._lock = threading.Lock()
        self._active_by_client: Counter[str] = Counter()

    def acquire(self, client: str) -> Callable[[], None]:
        """Take a place; what is returned gives it back. Raises ServiceError (overloaded) if all are taken."""
        with self._lock:
            if self._active_by_client[client] >= self._limit_per_client:
                self._refuse(f"{self._limit_per_client} {self._what} of {client} under way, the most of one client")
            if self._active_by_client.total() >= self._limit:
                self._refuse(f"{self._limit} {self._what} under way")
            self._active_by_client[client] += 1
        return partial(self._release, client)

    def _refuse(self, reason: str) -> NoReturn:
        message = f"this HTTP worker has {reason}; try again in a moment"
        raise ServiceError(ErrorKind.OVERLOADED, message, retry_after_s=1.0)

    def _release(self, client: str) -> None:
        with self._lock:
            self._active_by_client[client] -= 1
            self._active_by_client += Counter()  # forgets who has none


@dataclass(slots=True)
class Context:
    """One per HTTP worker."""

    engine: ServingEngine
    config: HttpConfig
    limiter: RequestLimiter
    readiness: Readiness
    keys: KeyRing = field(default_factory=KeyRing)
    wakeups: ReaderWakeups = field(default_factory=ReaderWakeups)
    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    started: int = field(default_factory=lambda: int(time.time()))
    status_wait_s: float | None = 2.0
    """What fails, or is whole, within this time has a true status. An answer that takes longer has begun by then, with
    status 200: only what is written shows whether its client is still there. None: it is waited for."""
    files: Store | None = None
    """Files and batches; None: the service keeps none."""
    session_files: TransferLimiter = field(
        default_factory=lambda: TransferLimiter(
            MAX_SESSION_TRANSFERS, MAX_SESSION_TRANSFERS_PER_CLIENT, "sessions' files"
        )
    )
    """Exports and imports: each is in memory here, on its way and in the engine."""
    stored_files: TransferLimiter = field(
        default_factory=lambda: TransferLimiter(MAX_FILE_DOWNLOADS, MAX_FILE_DOWNLOADS_PER_CLIENT, "contents of files")
    )
    """Contents that clients fetch: each has one of Robyn's threads, however slowly it is read."""
    shared: dict[str, Any] = field(default_factory=dict)
    """Documents made once at start, by name."""
    defaults: DecodeDefaults = field(default_factory=DecodeDefaults)
    """What the model brings for requests that leave it out."""
    models: Models | None = None
    """None: there is one model, which any name means."""

    def for_model(self, requested: object) -> Context:
        """The context of the model that a request names, if it names one. Raises ServiceError."""
        return (
            self.models.select_model(self, requested)
            if self.models is not None and isinstance(requested, str)
            else self
        )

    async def wait_for_model(self, requested: object) -> Context:
        """The same, with what other workers may have been told before this one."""
        if self.models is not None and isinstance(requested, str):
            await self.models.wait_until_known(self, requested, self.config.engine_wait_s)
        return self.for_model(requested)
