"""Exports and imports sessions as files. Files are encoded and decoded on a thread of their own.

Every call gets exactly one reply: the result or an error.
"""

from __future__ import annotations

from collections.abc import Callable

from rwkv_batch.calls import ExportSession, Reply, reply_on_error
from rwkv_batch.core.error_mapping import as_service_error, error_translator
from rwkv_batch.core.file_thread import FileThread
from rwkv_batch.errors import ServiceError
from state_pool.pool import StatePool
from state_pool.session_file import InvalidSessionFile, SessionFile, decode
from state_pool.turns.import_export import FittedFile

_to_service_error = error_translator("the session file could not be read or written", {InvalidSessionFile: "body"})

Put = Callable[[Callable[[], None]], bool]
"""Runs a function on the engine's thread. Returns False if the engine accepts no work."""


class SessionTransfer:
    """Answers ExportSession and ImportSession, one call at a time."""

    def __init__(self, put: Put, closed_error: Callable[[], ServiceError]) -> None:
        self._put = put
        self._closed_error = closed_error
        self._thread = FileThread("session-files", closed_error, _to_service_error)

    def export(self, pool: StatePool, reply: Reply[bytes], call: ExportSession) -> None:
        """Reply with the session's file; without `include_file` with no bytes. Engine thread."""

        def on_exported(file: SessionFile | Exception) -> None:
            if isinstance(file, Exception):
                reply(as_service_error(file, given=call.session_id))
            elif call.include_file:
                self._thread.run(reply, file.encode, reply)
            else:
                reply(b"")

        export = pool.import_export.export
        reply_on_error(reply, _to_service_error, lambda: export(call.session_id, on_exported, call.dialogue))

    def import_session(self, pool: StatePool, reply: Reply[int], session_id: str, content: bytes) -> None:
        """Reply with the session's number of tokens once it is durable. Any thread."""

        def on_fitted(file: FittedFile) -> None:
            if not self._put(lambda: self._import(pool, reply, session_id, file)):
                reply(self._closed_error())

        self._thread.run(reply, lambda: pool.import_export.fit(decode(content)), on_fitted)

    @staticmethod
    def _import(pool: StatePool, reply: Reply[int], session_id: str, file: FittedFile) -> None:
        def on_durable(error: Exception | None) -> None:
            reply(file.num_tokens if error is None else as_service_error(error, given=session_id))

        reply_on_error(
            reply, _to_service_error, lambda: pool.import_export.import_session(session_id, file, on_durable)
        )

    def close(self) -> None:
        self._thread.close()
