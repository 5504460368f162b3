"""Sessions as files: encoding and decoding beside the engine's thread, copying through its pool."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from rwkv_batch.calls import Reply
from rwkv_batch.core.state_manager import as_service_error
from rwkv_batch.errors import ErrorKind, ServiceError
from state_pool.errors import PoolError
from state_pool.pool import StatePool
from state_pool.session_file import NotASession, SessionFile, decode

Put = Callable[[Callable[[], None]], bool]
"""Runs a command on the engine's thread; False: the engine takes none any more."""


class SessionTransfer:
    """Answers ExportSession and ImportSession; files are encoded and decoded one at a time on another thread."""

    def __init__(self, put: Put, refusal: Callable[[], ServiceError]) -> None:
        self._put = put
        self._refusal = refusal
        self._thread = ThreadPoolExecutor(1, "session-files")

    def export(self, pool: StatePool, reply: Reply[bytes], session_id: str, dialogue: int | None = None) -> None:
        """Engine thread. Replies with the file's bytes."""

        def exported(file: SessionFile | Exception) -> None:
            if isinstance(file, Exception):
                reply(as_service_error(file))
            else:
                self._thread.submit(lambda: reply(file.encode()))

        try:
            pool.export(session_id, exported, dialogue)
        except PoolError as error:
            reply(as_service_error(error))

    def import_session(self, pool: StatePool, reply: Reply[int], session_id: str, content: bytes) -> None:
        """Any thread. Replies with the number of tokens that the session stands for, once it is durable."""

        def decoded() -> None:
            try:
                file = decode(content)
            except NotASession as error:
                reply(_not_a_session(error))
                return
            if not self._put(lambda: self._import(pool, reply, session_id, file)):
                reply(self._refusal())

        self._thread.submit(decoded)

    @staticmethod
    def _import(pool: StatePool, reply: Reply[int], session_id: str, file: SessionFile) -> None:
        def durable(error: Exception | None) -> None:
            reply(file.num_tokens if error is None else as_service_error(error))

        try:
            pool.import_session(session_id, file, durable)
        except NotASession as error:
            reply(_not_a_session(error))
        except PoolError as error:
            reply(as_service_error(error))

    def close(self) -> None:
        """Begin nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _not_a_session(error: Exception) -> ServiceError:
    return ServiceError(ErrorKind.INVALID_FIELD, f"body: {error}", field="body")
