"""What the libraries of tuned states and of adapters share: how a file that a request names is read and entered."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

from rwkv_batch.calls import Reply, reply_on_error
from rwkv_batch.config import STATE_NAME, EngineConfig
from rwkv_batch.core.error_mapping import error_translator
from rwkv_batch.core.file_thread import FileThread
from rwkv_batch.errors import ServiceError, invalid
from rwkv_batch.model.tensor_files import FileError

Info = TypeVar("Info")
Found = TypeVar("Found")


class FileLibrary(Generic[Info]):
    """What is loaded, by name. Engine thread; files are read and written on a thread of their own."""

    def __init__(
        self,
        config: EngineConfig,
        what: str,
        put: Callable[[Callable[[], None]], bool],
        refusal: Callable[[], ServiceError],
    ) -> None:
        """`what` is loaded. `put` runs a command on the engine's thread, or says that it takes none; `refusal` why."""
        self._config = config
        self._put = put
        self._refusal = refusal
        self._to_service_error = error_translator(f"the {what} could not be loaded", {FileError: "file"})
        self._thread = FileThread(f"{what}-files", refusal, self._to_service_error)
        self._infos: dict[str, Info] = {}

    def list(self) -> list[Info]:
        """What is loaded, and what was and cannot be."""
        return list(self._infos.values())

    def _read_and_register(
        self,
        reply: Reply[Info],
        read: Callable[[], Found],
        register: Callable[[Found], Info],
        when_refused: Callable[[], None] = lambda: None,
    ) -> None:
        """`read` on the libraries' thread, `register` on the engine's, and reply with what was entered.

        Either may raise anything: a client's file holds anything. `when_refused`: the engine takes no more commands.
        """

        def was_read(found: Found) -> None:
            if not self._put(lambda: reply_on_error(reply, self._to_service_error, lambda: reply(register(found)))):
                when_refused()
                reply(self._refusal())

        self._thread.run(reply, read, was_read)

    def close(self) -> None:
        """Begin to read nothing more."""
        self._thread.close()


def check_name(name: str) -> None:
    """Raises ServiceError for a name that nothing can have."""
    if not STATE_NAME.fullmatch(name):
        raise invalid("name", "must be 1..64 letters, digits, '.', '_' or '-', beginning with one of the first", name)


@contextlib.contextmanager
def with_requested_name(path: Path, asked: str) -> Iterator[None]:
    """Raises FileErrors over a file as the request named it ("": it was sent): where it is, is nobody's business."""
    try:
        yield
    except FileError as error:
        raise FileError(str(error).replace(str(path), asked or "that was sent"), given=asked or None) from error
