"""Adapters that requests may name: reads, checks and loads them next to the weights.

Adapters of --adapter-serve are loaded at start. Adapters loaded by requests are listed in a file next to the session
database. They are loaded again after a restart if their files are unchanged. A separate thread reads the files.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from native.files import make_private, replace_private
from rwkv_batch.calls import AdapterInfo, AddAdapter, Reply
from rwkv_batch.config import EngineConfig
from rwkv_batch.errors import ServiceError, StartupError
from rwkv_batch.model.adapters.files import read_adapter, split_scale
from rwkv_batch.model.adapters.per_row import ServedAdapter, per_row_adapter
from rwkv_batch.model.tensor_files import FileError
from rwkv_batch.models_folder import check_adapter_within, path_within
from rwkv_batch.runner.file_library import FileLibrary, check_name, with_requested_name
from rwkv_batch.runner.pipeline import Pipeline
from state_pool.errors import NameTaken, PoolError
from state_pool.origins import Adapters, Origin

logger = logging.getLogger(__name__)


class AdapterLibrary(FileLibrary[AdapterInfo]):
    """Loaded adapters by name. Engine thread, except `_read`."""

    def __init__(
        self, config: EngineConfig, put: Callable[[Callable[[], None]], bool], refusal: Callable[[], ServiceError]
    ) -> None:
        super().__init__(config, "adapter", put, refusal)
        self._list = Path(f"{config.pool.files_stem}.adapters.json") if config.pool.state_db else None

    def open(self, adapters: Adapters, pipeline: Pipeline) -> None:
        """Load the adapters of --adapter-serve and of the list.

        Raises StartupError if one of --adapter-serve cannot be loaded.
        """
        self._adapters, self._pipeline, self._weights = adapters, pipeline, pipeline.weights
        adapters.on_unused = pipeline.drop_adapter
        for entry in self._config.served_adapters:
            name, _, file = entry.partition("=")
            try:
                self._register(name, self._read(*split_scale(file)), split_scale(file)[1])
            except (FileError, PoolError) as error:
                raise StartupError(f"--adapter-serve {entry}: {error}") from error
        for kept in self._load_saved():
            if kept.name in self._infos:
                logger.warning("adapter %s of --adapter-serve replaces the one that a request loaded", kept.name)
                continue
            self._open_saved(kept)

    def _open_saved(self, kept: AdapterInfo) -> None:
        try:
            adapter = self._read(Path(kept.file), kept.scale)
            if adapter.digest != kept.digest:
                raise FileError(f"adapter file {kept.file} changed after it was loaded; load it again")
            self._register(kept.name, adapter, kept.scale, is_kept=True)
        except (FileError, PoolError) as error:
            logger.error("adapter %s of an earlier run cannot be loaded: %s", kept.name, error)
            self._infos[kept.name] = msgspec.structs.replace(kept, error=str(error))

    def _load_saved(self) -> list[AdapterInfo]:
        if self._list is None or not self._list.is_file():
            return []
        try:
            make_private(self._list)
            return msgspec.json.decode(self._list.read_bytes(), type=list[AdapterInfo])
        except (OSError, msgspec.MsgspecError) as error:
            logger.error("%s cannot be read, so the adapters of an earlier run are not loaded: %s", self._list, error)
            return []

    def _save(self, without: str = "") -> None:
        """Write the list of adapters that requests loaded, but not `without`. Raises OSError."""
        if self._list is None:
            return
        kept = [info for name, info in self._infos.items() if info.is_kept and name != without]
        replace_private(self._list, msgspec.json.encode(kept))

    def _read(self, path: Path, scale: float | None) -> ServedAdapter:
        """Read an adapter file. Any thread. Raises FileError."""
        try:
            return per_row_adapter(self._weights, read_adapter(path, scale))
        except (FileError, MemoryError):
            raise
        except Exception as error:  # a client's file may break the reader in any way
            logger.warning("adapter file %s cannot be loaded", path, exc_info=error)
            reason = f"{type(error).__name__}: {error}"
            raise FileError(f"adapter file {path} is not an adapter of a supported kind ({reason})") from error

    def _register(self, name: str, adapter: ServedAdapter, scale: float | None, is_kept: bool = False) -> AdapterInfo:
        """Load an adapter onto the devices, then allow rows to use it.

        Raises PoolError, or FileError if memory is short.
        """
        held = self._adapters.add(Origin(name, adapter.digest))
        try:
            info = self._load_onto_devices(held.slot_index, name, adapter, scale, is_kept)
        except Exception:
            self._adapters.remove(name)
            raise
        self._infos[name] = info
        return info

    def _load_onto_devices(
        self, slot_index: int, name: str, adapter: ServedAdapter, scale: float | None, is_kept: bool
    ) -> AdapterInfo:
        """Load an adapter onto the devices.

        Raises FileError if memory is short or the kernels do not support the adapter.
        """
        try:
            self._pipeline.put_adapter(slot_index, adapter.layers)
        except ValueError as error:
            raise FileError(f"adapter file {adapter.file}: {error}") from error
        except (MemoryError, RuntimeError) as error:
            raise FileError(f"adapter file {adapter.file}: too little device memory ({error})") from error
        logger.info("adapter %s (%s): rank %d on %d layers", name, adapter.file, adapter.rank, len(adapter.layers))
        return AdapterInfo(
            name=name,
            digest=adapter.digest,
            file=adapter.file,
            scale=scale,
            rank=adapter.rank,
            created=int(time.time()),
            bytes=self._pipeline.adapter_bytes(adapter.layers),
            is_kept=is_kept,
        )

    # Calls ---------------------------------------------------------------------------------------------------

    def add(self, call: AddAdapter, reply: Reply[AdapterInfo]) -> None:
        """Read, check and register an adapter.

        Replies when requests may name the adapter, or with an error (NameTaken and others).
        """
        try:
            check_name(call.name)
            if call.name in self._infos:
                raise NameTaken("an adapter", call.name)
            self._adapters.check_new(call.name)
            path = Path(call.file) if call.is_own else path_within(self._config.models_dir, call.file)
        except (PoolError, ServiceError) as error:
            reply(self._to_service_error(error))
            return
        self._read_and_register(
            reply, lambda: self._read_within(path, call), lambda adapter: self._finish(call, path, adapter)
        )

    def _read_within(self, path: Path, call: AddAdapter) -> ServedAdapter:
        """Read files within --models-dir. Raises ServiceError for a file outside --models-dir, FileError."""
        if not call.is_own:
            check_adapter_within(self._config.models_dir, path, "file")
        with with_requested_name(path, call.file):
            return self._read(path, call.scale)

    def _finish(self, call: AddAdapter, path: Path, adapter: ServedAdapter) -> AdapterInfo:
        """Register an adapter. Engine thread. A bad file may raise any exception."""
        with with_requested_name(path, call.file):
            info = self._register(call.name, adapter, call.scale, is_kept=self._list is not None)
        try:
            self._save()
        except OSError:
            self._adapters.remove(call.name)
            del self._infos[call.name]
            raise
        return info

    def remove(self, name: str) -> AdapterInfo:
        """Remove an adapter.

        Rows that use the adapter keep it to their end. Raises ServiceError, and then removes nothing.
        """
        info = self._infos.get(name)
        try:
            if info is not None:
                self._save(without=name)
            if info is None or not info.error:
                self._adapters.remove(name)
        except (PoolError, OSError) as error:
            raise self._to_service_error(error) from error
        del self._infos[name]
        assert info is not None, "every registered adapter is listed"
        return info
