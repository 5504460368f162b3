"""Common code of the tuned-state and adapter libraries: reading and registering files."""

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
    """Loaded items by name. Engine thread; a separate thread reads and writes files."""

    def __init__(
        self,
        config: EngineConfig,
        kind: str,
        put: Callable[[Callable[[], None]], bool],
        refusal: Callable[[], ServiceError],
    ) -> None:
        """kind: noun for messages and the thread's name
        put: queues a command for the engine's thread; returns False if the engine accepts no commands.
        refusal: the error for that case.
        """
        self._config = config
        self._put = put
        self._refusal = refusal
        self._to_service_error = error_translator(
            f"the {kind} could not be loaded or removed", {FileError: "file"}, "name"
        )
        self._thread = FileThread(f"{kind}-files", refusal, self._to_service_error)
        self._infos: dict[str, Info] = {}

    def infos(self) -> list[Info]:
        """The loaded items, and those that could not be loaded."""
        return list(self._infos.values())

    def _read_and_register(
        self,
        reply: Reply[Info],
        read: Callable[[], Found],
        register: Callable[[Found], Info],
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        """Run `read` on the file thread, `register` on the engine's, then reply.

        Both may raise anything, because a file may contain anything. `on_refused` runs if the engine accepts
        no commands.
        """

        def on_read(found: Found) -> None:
            if not self._put(lambda: reply_on_error(reply, self._to_service_error, lambda: reply(register(found)))):
                on_refused()
                reply(self._refusal())

        self._thread.run(reply, read, on_read)

    def close(self) -> None:
        self._thread.close()


def check_name(name: str) -> None:
    """Check an item's name. Raises ServiceError."""
    if not STATE_NAME.fullmatch(name):
        raise invalid(
            "name", "must be 1 to 64 letters, digits, '.', '_' or '-', and begin with a letter or digit", name
        )


@contextlib.contextmanager
def with_requested_name(path: Path, requested: str) -> Iterator[None]:
    """Replace the path in FileErrors by the name in the request ("": an upload).

    Clients must not learn the server's paths.
    """
    try:
        yield
    except FileError as error:
        raise FileError(
            str(error).replace(str(path), requested or "in the request"), given=requested or None
        ) from error
