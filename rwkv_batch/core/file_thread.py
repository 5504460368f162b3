"""A thread for work on files, one task at a time. It reads, writes, encodes and decodes them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from rwkv_batch.calls import Reply
from rwkv_batch.errors import ServiceError

Value = TypeVar("Value")


class FileThread:
    """Runs file tasks one after another. Every task gets exactly one reply: its result or an error."""

    def __init__(
        self, name: str, closed_error: Callable[[], ServiceError], as_error: Callable[[Exception], ServiceError]
    ) -> None:
        """
        closed_error: returns the error for tasks that no longer start
        as_error: translates a task's exception
        """
        self._closed_error = closed_error
        self._as_error = as_error
        self._thread = ThreadPoolExecutor(1, name)

    def run(self, reply: Reply[Any], work: Callable[[], Value], then: Callable[[Value], None]) -> None:
        """Run `work`, then `then` with its value, on the thread.

        If `work` fails or never starts, reply with the error.
        """

        def run() -> None:
            try:
                value = work()
            except Exception as error:  # noqa: BLE001 - file content is untrusted; the caller waits for a reply
                reply(self._as_error(error))
                return
            then(value)

        def on_done(future: Future[None]) -> None:
            if future.cancelled():
                reply(self._closed_error())

        try:
            self._thread.submit(run).add_done_callback(on_done)
        except RuntimeError:  # closed
            reply(self._closed_error())

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
