"""An engine in this process, and the event loop on a thread of its own that asks it."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from native.temporary_folder import TemporaryFolder
from programs.backends.local_engine import LocalEngine
from programs.library.errors import LLMError, as_llm_error
from programs.record import RunError
from programs.settings import Settings
from routes.context import Context
from routes.request_context import RequestContext, set_current_request
from rwkv_batch.errors import ServiceError, StartupError
from rwkv_batch.request import Priority

Result = TypeVar("Result")
_UNBOUNDED = 2**31 - 1
_CLOSED = "this LLM was closed; make another one"
_FORKED = "this LLM was made before this process was forked, and its threads are not here: make one in each process"
_READERS = 128
"""Streams that coroutines read at a time."""


class _LoopSubmitter:
    """Asks the loop, and nothing more once it is to end: what came too late would never be answered.

    Any thread; also again within a call of its own, when an object ends there that forgets its state.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._is_open = True
        self._lock = threading.RLock()

    def submit_work(self, work: Coroutine[Any, Any, Result]) -> Future[Result] | None:
        """None: it was closed, and `work` is not begun."""
        with self._lock:
            return asyncio.run_coroutine_threadsafe(work, self._loop) if self._is_open else None

    def close(self) -> None:
        """What has been begun is on the loop by now."""
        with self._lock:
            self._is_open = False


class EngineThread:
    """A started engine; closed by `close`, when nobody has it any more, or with the program. Any thread may ask."""

    def __init__(self, settings: Settings, folder: TemporaryFolder | None) -> None:
        """Loads the model. `folder`: to be removed at the end. Raises LLMError."""
        self._process = os.getpid()
        self._local_engine = LocalEngine(_without_client_limits(settings), stores_sessions=True)
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
        """What the routes' parts get."""
        return self._local_engine.context

    def close(self) -> None:
        """End the rows that still run, the engine and its threads. A second time it does nothing."""
        self._finalizer()

    def submit_work(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Have `work` done on the loop; cancelling it cancels its job.

        Raises LLMError if the engine was closed, or is in the process that this one was forked from.
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
        """What `work` returns. Raises LLMError."""
        future = self.submit_work(work)
        try:
            return future.result()
        except CancelledError:
            raise LLMError(_CLOSED, status=503) from None
        finally:
            future.cancel()  # of no effect unless the wait was interrupted


def _without_client_limits(settings: Settings) -> Settings:
    """Without the limits that keep clients from each other."""
    http = msgspec.structs.replace(
        settings.http,
        max_contents=_UNBOUNDED,
        max_prompt_tokens=_UNBOUNDED,
        max_request_tokens=_UNBOUNDED,
        stall_timeout_s=float(_UNBOUNDED),
    )
    engine = msgspec.structs.replace(
        settings.engine, max_waiting_rows=_UNBOUNDED, max_waiting_rows_per_client=_UNBOUNDED
    )
    return msgspec.structs.replace(settings, http=http, engine=engine)


async def _as_library_client(work: Coroutine[Any, Any, Result]) -> Result:
    set_current_request(RequestContext(method="POST", route="library", client="library", priority=Priority.INTERACTIVE))
    try:
        return await work
    except ServiceError as error:
        raise as_llm_error(error) from None


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.run_until_complete(asyncio.sleep(0))  # what came last begins: cancelled before, its work were never awaited
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def _finalizer(
    own: LocalEngine,
    calls: _LoopSubmitter,
    loop: asyncio.AbstractEventLoop,
    thread: threading.Thread,
    readers: ThreadPoolExecutor,
    folder: TemporaryFolder | None,
    process: int,
) -> None:
    """Knows nothing of the EngineThread, whose end it is."""
    if os.getpid() != process:
        return  # a fork that ends: the engine and its sessions are its parent's
    calls.close()
    own.stop()
    loop.call_soon_threadsafe(loop.stop)
    if threading.current_thread() is not thread:
        thread.join()
    readers.shutdown(wait=False)
    if folder is not None:
        folder.remove()
