"""A file as an answer: read while its client reads it, whatever its size."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import BinaryIO, NoReturn

from routes.request_context import current_request
from routes.response.http_response import failure, to_json
from rwkv_batch.errors import ErrorInfo, ErrorKind

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 18
"""Of a file that is handed to Robyn at a time."""


class FileChunks:
    """Implements `Chunks`. `on_close` is called when the file has been read, or its client has gone.

    A disk that fails on the way ends it with a line that says so: what Robyn is given ends as if it were whole.
    """

    def __init__(self, file: BinaryIO, on_close: Callable[[], None] = lambda: None) -> None:
        self._file = file
        self._on_close: Callable[[], None] | None = on_close
        self.ended = False

    def __iter__(self) -> FileChunks:
        return self

    def __next__(self) -> bytes:
        """The next piece."""
        if self.ended:
            return self._end()
        try:
            piece = self._file.read(CHUNK_BYTES)
        except OSError as error:
            logger.error("a file cannot be read to its end: %s", error)
            current_request().failure = ErrorKind.INTERNAL
            self.ended = True
            message = f"the file cannot be read to its end: {error}; fetch it again"
            return b"\n" + to_json(failure(ErrorInfo(kind=ErrorKind.INTERNAL, message=message))) + b"\n"
        self.ended = len(piece) < CHUNK_BYTES
        return piece or self._end()

    def close(self) -> None:
        """See Chunks."""
        self._file.close()
        self._call_on_close()

    def _end(self) -> NoReturn:
        """The last piece has been taken, however slowly, and the client is not told of the end yet: whoever has the
        whole file finds its place free. Raises StopIteration."""
        self._call_on_close()
        raise StopIteration

    def _call_on_close(self) -> None:
        """Say once that it has been read."""
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()
