"""Streams a file of any size as an answer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import BinaryIO, NoReturn

from routes.request_context import current_request
from routes.response.http_response import error_body, to_json
from rwkv_batch.errors import ErrorInfo, ErrorKind

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 18
"""Bytes per chunk passed to Robyn."""


class FileChunks:
    """Implements `Chunks`. Calls `on_close` once, when the file has been read or the client has left.

    If the disk fails, the last line is a JSON error: Robyn cannot end a stream as failed.
    """

    def __init__(self, file: BinaryIO, on_close: Callable[[], None] = lambda: None) -> None:
        self._file = file
        self._on_close: Callable[[], None] | None = on_close
        self.ended = False

    def __iter__(self) -> FileChunks:
        return self

    def __next__(self) -> bytes:
        """Return the next chunk."""
        if self.ended:
            return self._end()
        try:
            piece = self._file.read(CHUNK_BYTES)
        except OSError as error:
            logger.error("a file cannot be read to its end: %s", error)
            current_request().error_kind = ErrorKind.INTERNAL
            self.ended = True
            message = f"the file cannot be read to its end: {error}; fetch it again"
            return b"\n" + to_json(error_body(ErrorInfo(kind=ErrorKind.INTERNAL, message=message))) + b"\n"
        self.ended = len(piece) < CHUNK_BYTES
        return piece or self._end()

    def close(self) -> None:
        """See Chunks."""
        self._file.close()
        self._call_on_close()

    def _end(self) -> NoReturn:
        """End the stream. Raises StopIteration.

        `on_close` runs before the client sees the end: a client that has the whole file finds its slot free.
        """
        self._call_on_close()
        raise StopIteration

    def _call_on_close(self) -> None:
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()
