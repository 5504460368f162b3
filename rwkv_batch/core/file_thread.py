"""A thread for what takes time beside the engine's: files read, written, encoded and decoded, one after another."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from rwkv_batch.calls import Reply
from rwkv_batch.errors import ServiceError

Value = TypeVar("Value")


class FileThread:
    """Every piece of work has one answer: what is made of its value, or an error that says what happened."""

    def __init__(
        self, name: str, refusal: Callable[[], ServiceError], as_error: Callable[[Exception], ServiceError]
    ) -> None:
        """`refusal`: why nothing is begun any more; `as_error`: a failure of the work in the words of the table."""
        self._refusal = refusal
        self._as_error = as_error
        self._thread = ThreadPoolExecutor(1, name)

    def run(self, reply: Reply[Any], work: Callable[[], Value], then: Callable[[Value], None]) -> None:
        """Run `work` and then `then` on the thread; if it fails, or never begins, that is the reply."""

        def run() -> None:
            try:
                value = work()
            except Exception as error:  # noqa: BLE001 - a file holds anything; the caller waits for an answer
                reply(self._as_error(error))
                return
            then(value)

        def ended(future: Future[None]) -> None:
            if future.cancelled():
                reply(self._refusal())

        try:
            self._thread.submit(run).add_done_callback(ended)
        except RuntimeError:  # closed
            reply(self._refusal())

    def close(self) -> None:
        """Begin nothing more; what has not begun is refused."""
        self._thread.shutdown(wait=False, cancel_futures=True)
