"""An engine in this process. A thread has the event loop that calls it."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from native.files import TemporaryFolder
from programs.library.params import LLMError, as_llm_error
from programs.record import RunError
from routes.context import Context
from routes.request_context import RequestContext, set_current_request
from rwkv_batch.errors import ServiceError, StartupError
from rwkv_batch.request import Priority

Result = TypeVar("Result")
_CLOSED = "this LLM is closed; create a new one"
_FORKED = "this LLM was created before a fork, which does not copy its threads; create one in each process"
_READERS = 128
"""Streams that coroutines can read at a time."""


class OwnEngine(Protocol):
    """An engine of this process (`LocalEngine`)."""

    async def open(self) -> int:
        """Loads the model."""

    @property
    def context(self) -> Context:
        """The handlers' context. Available after `open`."""

    def stop(self) -> None:
        """Ends the engine. Any thread."""


class _LoopSubmitter:
    """Submits work to the loop until it is closed. Later work would never be answered.

    Thread-safe and reentrant: a finaliser may submit work during a call.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._is_open = True
        self._lock = threading.RLock()

    def submit_work(self, work: Coroutine[Any, Any, Result]) -> Future[Result] | None:
        """Submits `work` to the loop. Returns None if the loop is closed; then `work` does not start."""
        with self._lock:
            return asyncio.run_coroutine_threadsafe(work, self._loop) if self._is_open else None

    def close(self) -> None:
        """Refuses further work. Submitted work is on the loop already."""
        with self._lock:
            self._is_open = False


class EngineThread:
    """A started engine. `close`, garbage collection or the program's end closes it. Thread-safe."""

    def __init__(self, engine: OwnEngine, folder: TemporaryFolder | None) -> None:
        """Loads the model. `folder` is removed at the end. Raises LLMError."""
        self._process = os.getpid()
        self._local_engine = engine
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run, args=(self._loop,), name="library", daemon=True)
        self.readers = ThreadPoolExecutor(_READERS, "library-reader")
        self._calls = _LoopSubmitter(self._loop)
        self._thread.start()
        self._finalizer = weakref.finalize(
            self,
            _finalizer,
            self._local_engine,
            self._calls,
            self._loop,
            self._thread,
            self.readers,
            folder,
            self._process,
        )
        try:
            self.wait(self._local_engine.open())
        except (RunError, StartupError) as error:
            self.close()
            raise LLMError(str(error)) from None
        except BaseException:
            self.close()
            raise

    @property
    def context(self) -> Context:
        return self._local_engine.context

    def close(self) -> None:
        """Ends running rows, the engine and its threads. Idempotent."""
        self._finalizer()

    def submit_work(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Submits `work` to the loop. Cancelling the future cancels its job.

        Raises LLMError if the engine is closed or belongs to the parent of a fork.
        """
        if os.getpid() != self._process:
            work.close()
            raise LLMError(_FORKED, status=503)
        named = _as_library_client(work)
        if (future := self._calls.submit_work(named)) is None:
            named.close()
            work.close()
            raise LLMError(_CLOSED, status=503)
        return future

    def wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs `work` and returns its result. Raises LLMError."""
        future = self.submit_work(work)
        try:
            return future.result()
        except CancelledError:
            raise LLMError(_CLOSED, status=503) from None
        finally:
            future.cancel()  # no effect unless the wait was interrupted


async def _as_library_client(work: Coroutine[Any, Any, Result]) -> Result:
    set_current_request(RequestContext(method="POST", route="library", client="library", priority=Priority.INTERACTIVE))
    try:
        return await work
    except ServiceError as error:
        raise as_llm_error(error) from None


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.run_until_complete(
        asyncio.sleep(0)
    )  # lets the last work start, because a cancelled coroutine that never started warns
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def _finalizer(
    own: OwnEngine,
    calls: _LoopSubmitter,
    loop: asyncio.AbstractEventLoop,
    thread: threading.Thread,
    readers: ThreadPoolExecutor,
    folder: TemporaryFolder | None,
    process: int,
) -> None:
    """Finaliser of EngineThread, without a reference to it."""
    if os.getpid() != process:
        return  # in a forked child: engine and sessions belong to the parent
    calls.close()
    own.stop()
    loop.call_soon_threadsafe(loop.stop)
    if threading.current_thread() is not thread:
        thread.join()
    readers.shutdown(wait=False)
    if folder is not None:
        folder.remove()
