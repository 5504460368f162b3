"""Sessions as files: encoding and decoding beside the engine's thread, copying through its pool.

Whatever happens on the way, every call has one answer: the value, or an error that says what happened.
"""

from __future__ import annotations

from collections.abc import Callable

from rwkv_batch.calls import ExportSession, Reply, reply_on_error
from rwkv_batch.core.error_mapping import as_service_error, error_translator
from rwkv_batch.core.file_thread import FileThread
from rwkv_batch.errors import ServiceError
from state_pool.pool import StatePool
from state_pool.session_file import InvalidSessionFile, SessionFile, decode

_to_service_error = error_translator("the session's file could not be handled", {InvalidSessionFile: "body"})

Put = Callable[[Callable[[], None]], bool]
"""Runs a command on the engine's thread; False: the engine takes none any more."""


class SessionTransfer:
    """Answers ExportSession and ImportSession; files are encoded and decoded one at a time on another thread."""

    def __init__(self, put: Put, refusal: Callable[[], ServiceError]) -> None:
        self._put = put
        self._refusal = refusal
        self._thread = FileThread("session-files", refusal, _to_service_error)

    def export(self, pool: StatePool, reply: Reply[bytes], call: ExportSession) -> None:
        """Engine thread. Replies with the file's bytes, with none where only whether there is one was asked."""

        def exported(file: SessionFile | Exception) -> None:
            if isinstance(file, Exception):
                reply(as_service_error(file, given=call.session_id))
            elif call.include_file:
                self._thread.run(reply, file.encode, reply)
            else:
                reply(b"")

        reply_on_error(reply, _to_service_error, lambda: pool.export(call.session_id, exported, call.dialogue))

    def import_session(self, pool: StatePool, reply: Reply[int], session_id: str, content: bytes) -> None:
        """Any thread. Replies with the number of tokens that the session stands for, once it is durable."""

        def decoded(file: SessionFile) -> None:
            if not self._put(lambda: self._import(pool, reply, session_id, file)):
                reply(self._refusal())

        self._thread.run(reply, lambda: decode(content), decoded)

    @staticmethod
    def _import(pool: StatePool, reply: Reply[int], session_id: str, file: SessionFile) -> None:
        def durable(error: Exception | None) -> None:
            reply(file.num_tokens if error is None else as_service_error(error, given=session_id))

        reply_on_error(reply, _to_service_error, lambda: pool.import_session(session_id, file, durable))

    def close(self) -> None:
        """Begin nothing more; what has not begun is refused."""
        self._thread.close()
