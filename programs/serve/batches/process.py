"""The process that runs batches, and starts tunings: one for the service, started and watched by the supervisor.

It reads the active batches from the store's database twice per second. So HTTP workers need no link to it, and batches
continue after a restart. The supervisor sends the API keys and the engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import msgspec

from native.heap import mmap_large_blocks, release_free_pages
from programs.record import RunError
from programs.serve.batches.job import BatchJob
from programs.serve.batches.retention import delete_ended
from programs.serve.batches.tunings import TuningRunner
from routes.config import HttpConfig
from routes.context import Context, Readiness, RequestLimiter
from routes.file_store import Batch, Counts, Status, Store, open_store
from routes.model_registry import ModelRegistry, connect_model
from rwkv_batch.calls import DecodeDefaults
from rwkv_batch.config import EngineConfig
from rwkv_batch.fleet.fleet import Fleet
from rwkv_batch.fleet.routing import FleetLimits
from rwkv_batch.ipc.process import LogConfig, become_child
from rwkv_batch.translation.plan import CACHE_KEY, TranslationCache

logger = logging.getLogger(__name__)

_MAX_BATCHES, _MAX_BATCHES_PER_CLIENT = 8, 4
"""Limits for a client's further batches: all batches that run, and those of this client. The first one is exempt."""
_MAX_CLIENTS = 64
"""Limit of all batches. A client's first one waits only for this limit."""
_MAX_THREADS = 4 * _MAX_CLIENTS
"""Threads that read and write files."""
_POLL_S = 0.5
_SWEEP_S = 600.0
_RETRY_S = 10.0
"""Wait before a batch that failed for a passing reason, such as a full disk, is tried again."""
_GIVE_UP_S = 3600.0
"""A batch fails for good if its tries fail for this long and no further line is answered."""


def run_batches(
    config: HttpConfig, engine: EngineConfig, log_config: LogConfig, name: str, supervisor: Connection
) -> None:
    """Main function of the process.

    It sends the supervisor ("started", None) and ("used", names of the models that lines named). The supervisor sends
    ("keys", names of the API keys or None), ("models", the running engines) and "drain".
    """
    become_child(name, log_config)
    mmap_large_blocks()
    store = open_store(config)
    assert store is not None
    fleet = Fleet(FleetLimits(config.resubmit, config.engine_wait_s, config.shares_sessions))
    limits = RequestLimiter(1), Readiness(0)  # both serve HTTP requests only
    context = Context(fleet, config, *limits, files=store, defaults=msgspec.convert(config.defaults, DecodeDefaults))
    context.shared[CACHE_KEY] = TranslationCache(config.translate_cache)
    models = ModelRegistry(
        send_command=lambda _: None,  # batches load no models
        connect=lambda model: connect_model(context, model, name, fleet.quotas),
        own_changed=fleet.update,
    )
    context.models = models
    fleet.start(name)
    supervisor.send(("started", None))

    def report_used() -> None:
        if used := models.pop_used():
            supervisor.send(("used", used))

    tunings = TuningRunner(store, context, engine)
    asyncio.run(_run_until_drain(BatchRunner(store, context, report_used), tunings, models, supervisor))


async def _run_until_drain(
    runner: BatchRunner, tunings: TuningRunner, models: ModelRegistry, supervisor: Connection
) -> None:
    """Run until the supervisor sends "drain" or ends. First waits for the supervisor's first list of engines."""
    loop, stop, has_models = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    loop.set_default_executor(ThreadPoolExecutor(_MAX_THREADS))

    def listen() -> None:
        with contextlib.suppress(EOFError, OSError):
            while (message := supervisor.recv()) != "drain":
                match message:
                    case ("keys", names):
                        loop.call_soon_threadsafe(runner.set_key_names, names)
                        loop.call_soon_threadsafe(tunings.set_key_names, names)
                    case ("models", table):
                        models.update(table)
                        loop.call_soon_threadsafe(has_models.set)
        loop.call_soon_threadsafe(stop.set)
        loop.call_soon_threadsafe(has_models.set)

    threading.Thread(target=listen, name="supervisor", daemon=True).start()
    await has_models.wait()
    await asyncio.gather(runner.run(stop), tunings.run(stop))


class BatchRunner:
    """Begins batches and follows them. One event loop."""

    def __init__(self, store: Store, context: Context, report_used: Callable[[], None]) -> None:
        """`report_used`: reports the models that lines named to the supervisor, which unloads idle models."""
        self._report_used = report_used
        self._store = store
        self._context = context
        self._jobs: dict[str, BatchJob] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._retry_at: dict[str, float] = {}
        self._failing: dict[str, tuple[Counts, float]] = {}
        """by batch: its lines at its first failed try, and when that was"""
        self._key_names: frozenset[str] | None = None
        self._swept = 0.0
        self._offset = time.time() - time.monotonic()
        self._store_error = ""
        """Why the store could not be read last time; "" if it could."""

    def set_key_names(self, names: frozenset[str] | None) -> None:
        """Set the names of the valid API keys. None: not known. Batches of other keys end at the next poll."""
        self._key_names = names

    async def run(self, stop: asyncio.Event) -> None:
        """Run batches until `stop`. Unfinished ones continue at the next start."""
        while not stop.is_set():
            try:
                await self._poll()
            except OSError as error:  # a locked or full disk: running batches continue, and this is tried again
                self._log_store_error(str(error))
            else:
                self._log_store_error("")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _POLL_S)
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _log_store_error(self, store_error: str) -> None:
        """Log only changes: at two polls per second, a line per failure would fill the disk."""
        if store_error and store_error != self._store_error:
            logger.error("batches wait: %s; if the disk of --files-dir is full, make room there", store_error)
        elif self._store_error and not store_error:
            logger.info("the store of batches can be used again")
        self._store_error = store_error

    async def _poll(self) -> None:
        with contextlib.suppress(OSError):  # the supervisor has ended; this process ends next
            self._report_used()
        before = set(self._jobs)
        for batch in await asyncio.to_thread(self._store.active_batches):
            job = self._jobs.get(batch.id)
            key = batch.key or batch.owner
            is_key_removed = bool(key) and self._key_names is not None and key not in self._key_names
            if job is not None:
                job.is_cancelled = job.is_cancelled or batch.status is Status.CANCELLING
                job.is_key_removed = job.is_key_removed or is_key_removed
            elif batch.id not in before and self._can_start(batch, is_key_removed):
                # a batch of `before` may have ended after the store was read
                self._start(batch)
                self._jobs[batch.id].is_key_removed = is_key_removed
        if time.monotonic() - self._swept > _SWEEP_S:
            self._swept = time.monotonic()
            await asyncio.to_thread(self._store.sweep, self._unix_time())
            await asyncio.to_thread(delete_ended, self._store, self._unix_time())
            release_free_pages()

    def _unix_time(self) -> float:
        """Return the time for expiries. A clock that is set ahead while this process runs expires nothing."""
        return min(time.time(), self._offset + time.monotonic())

    def _can_start(self, batch: Batch, is_key_removed: bool) -> bool:
        if time.monotonic() < self._retry_at.get(batch.id, 0.0):
            return False
        if is_key_removed:  # it only starts to be failed, which needs no room
            return True
        num_of_client = sum(job.batch.client == batch.client for job in self._jobs.values())
        if not num_of_client:
            return len(self._jobs) < _MAX_CLIENTS
        return len(self._jobs) < _MAX_BATCHES and num_of_client < _MAX_BATCHES_PER_CLIENT

    def _start(self, batch: Batch) -> None:
        self._jobs[batch.id] = BatchJob(self._store, self._context, batch, self._unix_time)
        self._tasks[batch.id] = asyncio.create_task(self._run(self._jobs[batch.id]))

    async def _run(self, job: BatchJob) -> None:
        batch_id = job.batch.id
        try:
            await _run_or_fail(job)
            self._report_end(job)
        except (RunError, OSError) as error:
            try:
                await self._retry_or_give_up(job, error)
            except OSError as failure:
                logger.error("the end of batch %s cannot be stored: %s", batch_id, failure)
        finally:
            del self._jobs[batch_id], self._tasks[batch_id]

    def _report_end(self, job: BatchJob) -> None:
        for tries in (self._retry_at, self._failing):
            tries.pop(job.batch.id, None)
        logger.info("batch %s is %s: %s", job.batch.id, job.batch.status, job.batch.counts)

    async def _retry_or_give_up(self, job: BatchJob, error: RunError | OSError) -> None:
        """Try the batch again later. Fail it if that did not help for long. Raises OSError."""
        batch, now = job.batch, time.monotonic()
        logger.error("batch %s cannot continue now: %s", batch.id, error)
        self._retry_at[batch.id] = now + _RETRY_S
        counts, since = self._failing.setdefault(batch.id, (batch.counts, now))
        if counts != batch.counts:
            self._failing[batch.id] = batch.counts, now
        elif now - since >= _GIVE_UP_S:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            reason = reason.replace(f"{self._store.runs.parent}/", "")  # clients do not learn the path
            await job.give_up(f"the batch could not be processed for {_GIVE_UP_S / 60:g} minutes: {reason}")
            self._report_end(job)


async def _run_or_fail(job: BatchJob) -> None:
    """Run a batch until it ends. Raises RunError or OSError for a failure that a later try may mend."""
    try:
        await job.run()
    except (RunError, OSError):
        raise
    except Exception as error:  # a bug: its owner gets the error, other batches continue
        logger.exception("batch %s failed", job.batch.id)
        await job.fail(f"the batch failed: {type(error).__name__}: {error}")
