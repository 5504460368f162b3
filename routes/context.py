"""The handlers' context, the keys in force, limits on concurrent answers, and waiting for an engine."""

from __future__ import annotations

import asyncio
import hmac
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from routes.api_keys import LIMITS, ApiKey, key_digest
from routes.config import HttpConfig
from routes.file_store import Store
from routes.reader_wakeups import ReaderWakeups
from rwkv_batch.calls import DecodeDefaults
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.ipc.served_model import ModelCommand, ModelSpec, ServedModel
from rwkv_batch.ipc.wire import Observe
from rwkv_batch.protocol import EngineProtocol
from rwkv_batch.tokenizer import Tokenizer

Subject = TypeVar("Subject")


class CancellableTasks(Generic[Subject]):
    """Running handlers that are cancelled when their subject ends: a connection, or a key."""

    def __init__(self) -> None:
        self._subjects: dict[asyncio.Task[object], Subject] = {}

    @contextmanager
    def add_current(self, subject: Subject | None) -> Iterator[None]:
        """Add the current task as long as the block runs. None: do nothing."""
        task = asyncio.current_task()
        if task is None or subject is None:
            yield
            return
        self._subjects[task] = subject
        try:
            yield
        finally:
            del self._subjects[task]

    def cancel(self, has_ended: Callable[[Subject], bool]) -> None:
        """Cancel the tasks whose subject has ended. Any thread may call this."""
        for task, subject in list(self._subjects.items()):
            if has_ended(subject):
                task.get_loop().call_soon_threadsafe(self._cancel, task)

    def _cancel(self, task: asyncio.Task[object]) -> None:
        if task in self._subjects:  # else its answer is complete
            task.cancel()


class KeyRing:
    """The keys in force in an HTTP worker. Thread-safe."""

    def __init__(self, is_configured: bool = False) -> None:
        """`is_configured`: whether there is a keys file."""
        self.is_configured = is_configured
        self._keys: list[tuple[str, ApiKey]] = []
        self._digests: frozenset[str] = frozenset()
        self._handlers: CancellableTasks[str] = CancellableTasks()
        """By the digest of their key."""

    def replace(self, keys: Iterable[ApiKey]) -> None:
        """Put other keys in force. Handlers whose key is removed are cancelled."""
        self._keys = [(key.digest, key) for key in keys]
        self._digests = frozenset(digest for digest, _ in self._keys)
        self._cancel_removed()

    def listed(self) -> list[dict[str, object]]:
        """Return each key's name, rights and limits, without its secret."""
        return [
            {"name": key.name, "admin": key.admin, **{name: getattr(key, name) for name in LIMITS}}
            for _, key in self._keys
        ]

    def is_in_force(self, digest: str) -> bool:
        """Return whether requests of the key with this digest may continue. "": not sent with a key."""
        return not digest or digest in self._digests

    @contextmanager
    def cancelled_if_removed(self, digest: str) -> Iterator[None]:
        """Cancel the current task if its key is removed. The task finds it with `is_in_force`."""
        with self._handlers.add_current(digest or None):
            if not self.is_in_force(digest):  # it was removed just now
                self._cancel_removed()
            yield

    def _cancel_removed(self) -> None:
        self._handlers.cancel(lambda digest: not self.is_in_force(digest))

    def find(self, given: str) -> ApiKey | None:
        """Return the key with this value, or None. Takes the same time for every wrong value."""
        digest, found = key_digest(given), None
        for known, key in self._keys:
            if hmac.compare_digest(digest, known):
                found = key
        return found


class News:
    """Wakes the coroutines that wait for a change, whichever thread makes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiters: set[Callable[[], object]] = set()

    def announce(self) -> None:
        """Wake all waiters."""
        with self._lock:
            waiting, self._waiters = self._waiters, set()
        for wake in waiting:
            wake()

    async def wait(self, is_known: Callable[[], bool], timeout_s: float) -> None:
        """Wait for the next announcement, at most `timeout_s` seconds. Return at once if the change is known."""
        heard = asyncio.Event()
        wake = partial(asyncio.get_running_loop().call_soon_threadsafe, heard.set)
        with self._lock:  # before the check, so that no announcement is missed
            self._waiters.add(wake)
        try:
            if not is_known():
                await asyncio.wait_for(heard.wait(), timeout_s)
        except TimeoutError:
            pass
        finally:
            with self._lock:
                self._waiters.discard(wake)


class Readiness:
    """An HTTP worker's knowledge of its engine and the other workers. Thread-safe."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._connected = News()
        self._has_engine = False
        self.all_workers_ready = False
        """Whether all HTTP workers take work, from the supervisor."""
        self.fingerprint = ""
        """`system_fingerprint` of the connected engine's weights. "": not fetched yet."""

    def engine_changed(self, is_connected: bool) -> None:
        """Record that the engine has connected or disconnected."""
        self.fingerprint = ""  # a restarted engine may have read other weights
        self._has_engine = is_connected
        if is_connected:
            self._connected.announce()

    def release_all(self) -> None:
        """Wake all waiters for the shutdown, and let nobody wait."""
        self._wait_s = 0.0
        self._connected.announce()

    async def wait_for_engine(self) -> None:
        """Wait until the engine is connected, at most --engine-wait-s."""
        await self._connected.wait(lambda: self._has_engine or not self._wait_s, self._wait_s)


MAX_SESSION_TRANSFERS, MAX_FILE_DOWNLOADS = 2, 32
"""Concurrent answers of each kind per HTTP worker."""
MAX_DOCUMENT_PROCESSES = 4
"""Concurrent processes for documents per HTTP worker. Each may take gigabytes."""
MAX_SESSION_TRANSFERS_PER_CLIENT, MAX_FILE_DOWNLOADS_PER_CLIENT = 1, 8
"""Limits per client, because a client may read slowly."""


class ServingEngine(EngineProtocol, Protocol):
    """An engine that may disconnect. It collects the metrics of all workers."""

    @property
    def is_connected(self) -> bool:
        """Whether a loaded engine is connected."""

    @property
    def lost(self) -> list[str]:
        """Names of the engines that take no work."""

    def observe(self, observation: Observe) -> None:
        """Report a finished HTTP request."""


class Models(Protocol):
    """The models loaded at run time; see routes/model_registry.py."""

    @property
    def registered(self) -> Sequence[ServedModel]:
        """All models that were requested and not unloaded."""

    def find(self, name: str) -> ServedModel | None:
        """Return the model with this name, or None."""

    def ready_context(self, model: ServedModel) -> Context | None:
        """Return a model's context without marking it as used. None unless the model is ready."""

    def select_model(self, context: Context, requested: str) -> Context:
        """Return the context of the model that a request names. Raises ServiceError."""

    async def wait_until_known(self, context: Context, requested: str, timeout_s: float) -> None:
        """Wait until this worker knows the model's status, at most `timeout_s` seconds."""

    async def load(self, spec: ModelSpec, timeout_s: float | None) -> ServedModel:
        """Load a model and wait at most `timeout_s` seconds. Raises ServiceError if loading cannot start."""

    async def unload(self, name: str, timeout_s: float | None) -> None:
        """Unload a model and wait at most `timeout_s` seconds. Raises ServiceError if it does not exist."""

    @property
    def engines(self) -> Sequence[ServedModel]:
        """The engines of the service's own model."""

    async def change_engines(self, change: ModelCommand, timeout_s: float | None) -> None:
        """Add, remove or restart engines and wait at most `timeout_s` seconds. Raises ServiceError."""


class RequestLimiter:
    """Limits the running answers, in total and per client. Refuses new work while draining."""

    def __init__(self, limit: int, limit_per_client: int = 0) -> None:
        self._limit = limit
        self._limit_per_client = limit_per_client or max(1, limit * 7 // 8)
        self._lock = threading.Lock()
        self._num_active = 0
        self._active_by_client: Counter[str] = Counter()
        self.draining = False

    @property
    def num_active(self) -> int:
        return self._num_active

    def acquire(self, is_generation: bool, client: str) -> None:
        """Count an answer. Raises ServiceError (draining, overloaded) if it must be refused."""
        with self._lock:
            if is_generation:
                self._check(client)
            self._num_active += 1
            self._active_by_client[client] += 1

    def release(self, client: str) -> None:
        """Uncount an answer: its last byte was sent, or the client has left."""
        with self._lock:
            self._num_active -= 1
            self._active_by_client[client] -= 1
            if not self._active_by_client[client]:
                del self._active_by_client[client]

    def check_draining(self) -> None:
        """Check that new work is accepted. Raises ServiceError (draining) while the service shuts down."""
        if self.draining:
            raise ServiceError(
                ErrorKind.DRAINING,
                "the service is shutting down and accepts no new requests; retry later",
                retry_after_s=5.0,
            )

    def _check(self, client: str) -> None:
        self.check_draining()
        if self._num_active >= self._limit:
            raise ServiceError(
                ErrorKind.OVERLOADED,
                f"this HTTP worker writes {self._num_active} answers, its limit is {self._limit} "
                "(--max-streams); retry in 1 s, or send more rows per request",
                retry_after_s=1.0,
            )
        if self._active_by_client[client] >= self._limit_per_client:
            raise ServiceError(
                ErrorKind.OVERLOADED,
                f"this HTTP worker writes {self._active_by_client[client]} answers to {client}, its limit per "
                f"client is {self._limit_per_client} (--max-streams-per-client); read the running answers "
                "first, or send more rows per request",
                retry_after_s=1.0,
            )


class TransferLimiter:
    """Limits the transfers of one kind, in total and per client. Thread-safe."""

    def __init__(self, limit: int, limit_per_client: int, what: str) -> None:
        self._limit = limit
        self._limit_per_client = limit_per_client
        self._what = what
        self._lock = threading.Lock()
        self._active_by_client: Counter[str] = Counter()

    def acquire(self, client: str) -> Callable[[], None]:
        """Start a transfer; the returned function ends it. Raises ServiceError (overloaded) at a limit."""
        with self._lock:
            if self._active_by_client[client] >= self._limit_per_client:
                self._refuse(f"{self._limit_per_client} {self._what} of {client} in progress, the maximum per client")
            if self._active_by_client.total() >= self._limit:
                self._refuse(f"{self._limit} {self._what} in progress, the maximum")
            self._active_by_client[client] += 1
        return partial(self._release, client)

    @contextmanager
    def place(self, client: str) -> Iterator[None]:
        """Hold a place while a transfer runs. Raises ServiceError (overloaded) at a limit."""
        release = self.acquire(client)
        try:
            yield
        finally:
            release()

    def _refuse(self, reason: str) -> NoReturn:
        message = f"this HTTP worker has {reason}; retry in 1 s"
        raise ServiceError(ErrorKind.OVERLOADED, message, retry_after_s=1.0)

    def _release(self, client: str) -> None:
        with self._lock:
            self._active_by_client[client] -= 1
            self._active_by_client += Counter()  # removes clients without a transfer


@dataclass(slots=True)
class Context:
    """The context of the handlers, one per HTTP worker."""

    engine: ServingEngine
    config: HttpConfig
    limiter: RequestLimiter
    readiness: Readiness
    keys: KeyRing = field(default_factory=KeyRing)
    wakeups: ReaderWakeups = field(default_factory=ReaderWakeups)
    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    started: int = field(default_factory=lambda: int(time.time()))
    files: Store | None = None
    """Files and batches. None: not configured."""
    session_files: TransferLimiter = field(
        default_factory=lambda: TransferLimiter(
            MAX_SESSION_TRANSFERS, MAX_SESSION_TRANSFERS_PER_CLIENT, "session file transfers"
        )
    )
    """Exports and imports of sessions. Each is in memory here, in the connection and in the engine."""
    stored_files: TransferLimiter = field(
        default_factory=lambda: TransferLimiter(MAX_FILE_DOWNLOADS, MAX_FILE_DOWNLOADS_PER_CLIENT, "file downloads")
    )
    """Downloads of files. Each blocks one of Robyn's threads."""
    document_processes: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_DOCUMENT_PROCESSES))
    file_checks: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    """Checks of examples for fine-tuning. A large file takes a thread for a minute."""
    shared: dict[str, Any] = field(default_factory=dict)
    """Documents built once at start, by name."""
    defaults: DecodeDefaults = field(default_factory=DecodeDefaults)
    """The model's decode parameters for requests that give none."""
    models: Models | None = None
    """None: there is one model, and any name selects it."""

    def for_model(self, requested: object) -> Context:
        """Return the context of the model that a request names. Raises ServiceError."""
        return (
            self.models.select_model(self, requested)
            if self.models is not None and isinstance(requested, str)
            else self
        )

    async def wait_for_model(self, requested: object) -> Context:
        """Like `for_model`, after waiting for news that other workers may already have."""
        if self.models is not None and isinstance(requested, str):
            await self.models.wait_until_known(self, requested, self.config.engine_wait_s)
        return self.for_model(requested)
