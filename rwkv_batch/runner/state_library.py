"""Tuned states: reads them from files and puts them into the state pool.

States come from --state at start, or from requests. Those of requests are *kept*: written to a folder next to the
session database and loaded at every start. Rebuilding a session needs its initial state. A separate thread
reads and writes files.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from native.files import make_private, make_private_folder, remove_stale_files, replace_private, sync
from rwkv_batch.calls import AddState, DecodeDefaults, Reply, StateInfo
from rwkv_batch.config import STATE_NAME, EngineConfig
from rwkv_batch.core.mixtures import check_members
from rwkv_batch.errors import ServiceError, StartupError, invalid
from rwkv_batch.model.state import ModelShape
from rwkv_batch.model.tensor_files import FileError, metadata_of
from rwkv_batch.model.tuned_state import AUTO, KEY_VALUE, VALUE_KEY, TunedTensor, read_tuned_state, write_tuned_state
from rwkv_batch.models_folder import path_within
from rwkv_batch.request import Job
from rwkv_batch.runner.file_library import FileLibrary, check_name, with_requested_name
from rwkv_batch.runner.state_copy import HostTensors, PipelineArena
from state_pool.errors import NameTaken, PoolError
from state_pool.origins import Origin
from state_pool.pool import StatePool

logger = logging.getLogger(__name__)

_STATE_SUFFIX = ".safetensors"
_MIXTURE_SUFFIX = ".mixture.json"
_FILE, _DEFAULTS = "file", "decode_defaults"
_SENT = "sent"
"""for a state without a file name"""


class _KeptMixture(msgspec.Struct):
    members: list[tuple[str, float]]
    defaults: DecodeDefaults = DecodeDefaults()


class StateLibrary(FileLibrary[StateInfo]):
    """Loaded states and mixtures by name. Engine thread, except for files."""

    def __init__(
        self, config: EngineConfig, put: Callable[[Callable[[], None]], bool], refusal: Callable[[], ServiceError]
    ) -> None:
        """put: queues a command for the engine's thread, or returns False
        refusal: the error for the client if it returns False
        """
        super().__init__(config, "state", put, refusal)
        self._folder = Path(f"{config.pool.files_stem}.states") if config.pool.state_db else None

    def open(self, pool: StatePool, arena: PipelineArena, shape: ModelShape) -> None:
        """Load the states of --state and the kept ones. Raises StartupError if one of --state cannot be loaded."""
        self._pool, self._arena, self._shape = pool, arena, shape
        for entry in self._config.states:
            name, _, file = entry.partition("=")
            try:
                self._register(name, *self._read(Path(file), AUTO), file, False, DecodeDefaults())
            except (FileError, PoolError) as error:
                raise StartupError(f"--state {entry}: {error}") from error
        if self._folder is not None and self._folder.is_dir():
            make_private(self._folder)
            remove_stale_files(self._folder)
        self._open_mixtures()
        for path in sorted(self._folder.glob(f"*{_STATE_SUFFIX}")) if self._folder is not None else []:
            if not STATE_NAME.fullmatch(path.stem):  # a temporary file, which another engine may be writing
                continue
            if path.stem in self._infos:
                logger.warning("state %s of --state replaces the one kept in %s", path.stem, path)
                continue
            try:
                self._open_kept(path)
            except (FileError, PoolError) as error:
                logger.error("tuned state %s, kept in %s, cannot be loaded: %s", path.stem, path, error)
                self._infos[path.stem] = StateInfo(
                    name=path.stem, file=_kept_source(path), is_kept=True, error=str(error)
                )

    def _open_mixtures(self) -> None:
        """Load the kept mixtures. Missing members are reported when a request uses the mixture."""
        for path in sorted(self._folder.glob(f"*{_MIXTURE_SUFFIX}")) if self._folder is not None else []:
            name = path.name.removesuffix(_MIXTURE_SUFFIX)
            try:
                mixture = msgspec.json.decode(path.read_bytes(), type=_KeptMixture | list[tuple[str, float]])
                if not isinstance(mixture, _KeptMixture):  # the older format, without defaults
                    mixture = _KeptMixture(mixture)
                self._infos[name] = StateInfo(
                    name=name, mixture=mixture.members, defaults=mixture.defaults, is_kept=True
                )
            except (OSError, msgspec.MsgspecError) as error:
                logger.error("kept mixture %s cannot be loaded: %s", name, error)
                self._infos[name] = StateInfo(
                    name=name, file=path.name, is_kept=True, error=str(error).replace(str(path), path.name)
                )

    def _open_kept(self, path: Path) -> None:
        """Load a kept state. Raises PoolError, or FileError; their messages name the file without its folder."""
        with with_requested_name(path, path.name):
            state, host = self._read(path, AUTO)
            self._register(path.stem, state, host, _kept_source(path), True, _kept_defaults(path))

    def _read(self, path: Path, orientation: str) -> tuple[TunedTensor, HostTensors]:
        """Read a state file, converted to the slots' dtypes and stages. Any thread. Raises FileError."""
        state = read_tuned_state(path, self._shape, orientation)
        try:
            return state, self._arena.tuned_state(state.wkv)
        except ValueError as error:
            raise FileError(f"state file {path}: {error}") from error

    def _register(
        self, name: str, state: TunedTensor, host: HostTensors, file: str, is_kept: bool, defaults: DecodeDefaults
    ) -> StateInfo:
        """Add a state to the pool. Raises PoolError."""
        self._pool.tuned.add(Origin(name, state.digest), host)
        logger.info("tuned state %s (%s): matrices are %s, %s", name, file, state.orientation, state.reason)
        info = self._infos[name] = StateInfo(
            name=name,
            digest=state.digest,
            file=file,
            orientation=state.orientation,
            orientation_reason=state.reason,
            created=int(time.time()),
            bytes=self._arena.state_bytes,
            is_kept=is_kept,
            defaults=defaults,
        )
        return info

    # Calls ---------------------------------------------------------------------------------------------------

    def infos(self) -> list[StateInfo]:
        """The loaded states, and kept ones that cannot be used."""
        in_slots = {name for name in self._pool.tuned.names if self._pool.tuned.get(name).slot is not None}
        return [msgspec.structs.replace(info, in_slot=name in in_slots) for name, info in self._infos.items()]

    def resolve_mixtures(self, job: Job) -> Job:
        """Replace names of mixtures in rows by the mixtures."""
        mixtures = {name: info.mixture for name, info in self._infos.items() if info.mixture}
        if not any(row.state in mixtures for row in job.rows):
            return job
        rows = [
            msgspec.structs.replace(row, state="", mixture=mixtures[row.state]) if row.state in mixtures else row
            for row in job.rows
        ]
        return msgspec.structs.replace(job, rows=rows)

    def add(self, call: AddState, reply: Reply[StateInfo]) -> None:
        """Read, keep and register a state. Replies when requests may name the state."""
        try:
            _check(call)
            self._check_new(call)
            if call.mixture:
                reply(self._add_mixture(call))
                return
            path = path_within(self._config.models_dir, call.file, ", or send the file") if call.file else None
        except (OSError, PoolError, ServiceError) as error:
            reply(self._to_service_error(error))
            return
        temp_path = None if self._folder is None else _temp_path_in(self._folder)
        self._read_and_register(
            reply,
            lambda: self._read_given(call, path, temp_path),
            lambda found: self._finish(call, temp_path, *found),
            lambda: _discard(temp_path),
        )

    def _check_new(self, call: AddState) -> None:
        """Check that the name can be added. Raises PoolError."""
        self._pool.tuned.check_new(call.name)
        is_mixture = call.name in self._infos and bool(self._infos[call.name].mixture)
        if is_mixture and not (call.replace and call.mixture):
            raise NameTaken("a mixture", call.name)

    def _add_mixture(self, call: AddState) -> StateInfo:
        """Register a mixture of existing states. Raises ServiceError, PoolError; OSError if it cannot be kept."""
        members = [(name, float(weight)) for name, weight in call.mixture]
        check_members(members, self._pool)
        if self._folder is not None:
            make_private_folder(self._folder)
            kept = _KeptMixture(members, call.defaults)
            replace_private(self._folder / f"{call.name}{_MIXTURE_SUFFIX}", msgspec.json.encode(kept))
        info = self._infos[call.name] = StateInfo(
            name=call.name,
            mixture=members,
            created=int(time.time()),
            is_kept=self._folder is not None,
            defaults=call.defaults,
        )
        return info

    def _read_given(self, call: AddState, path: Path | None, temp_path: Path | None) -> tuple[TunedTensor, HostTensors]:
        """Read a request's state, and write it to `temp_path`.

        The request sent the state, or named it in --models-dir. Raises FileError; OSError if it cannot be written.
        """
        with contextlib.ExitStack() as stack:
            source = path or stack.enter_context(_as_file(call.content, self._folder))
            stack.enter_context(with_requested_name(source, call.file))
            state, host = self._read(source, call.orientation)
        if temp_path is not None:
            _write(temp_path, state, {_FILE: call.file, _DEFAULTS: msgspec.json.encode(call.defaults).decode()})
        return state, host

    def _finish(self, call: AddState, temp_path: Path | None, state: TunedTensor, host: HostTensors) -> StateInfo:
        """Register a state that was read. Engine thread. Raises PoolError, OSError."""
        try:
            info = self._register(call.name, state, host, call.file or _SENT, temp_path is not None, call.defaults)
            if temp_path is not None:
                self._rename_kept(temp_path, call.name)
        except (PoolError, OSError):
            _discard(temp_path)
            raise
        return info

    def _rename_kept(self, temp_path: Path, name: str) -> None:
        """Give a state's file its final name. Raises OSError; then the state is not registered either."""
        try:
            temp_path.replace(temp_path.with_name(f"{name}{_STATE_SUFFIX}"))
        except OSError:
            self._pool.tuned.remove(name)
            del self._infos[name]
            raise

    def remove(self, name: str) -> StateInfo:
        """Remove a state from the pool and the disk. Raises ServiceError, and then removes nothing."""
        info = self._infos.get(name)
        is_in_pool = info is None or not (info.error or info.mixture)
        try:
            if is_in_pool:
                self._pool.tuned.get(name)
            if self._folder is not None:
                for suffix in (_STATE_SUFFIX, _MIXTURE_SUFFIX):
                    (self._folder / f"{name}{suffix}").unlink(missing_ok=True)
            if is_in_pool:
                self._pool.tuned.remove(name)
        except (PoolError, OSError) as error:
            raise self._to_service_error(error) from error
        assert info is not None, "every state of the pool is listed"
        del self._infos[name]
        return info


@contextlib.contextmanager
def _as_file(content: bytes, folder: Path | None) -> Iterator[Path]:
    """Write bytes to a file that exists only during the block."""
    if folder is not None:
        make_private_folder(folder)
    with tempfile.NamedTemporaryFile(prefix=".", suffix=".state", dir=folder) as file:
        file.write(content)
        file.flush()
        yield Path(file.name)


def _kept_source(path: Path) -> str:
    return metadata_of(path).get(_FILE) or _SENT


def _kept_defaults(path: Path) -> DecodeDefaults:
    """Return the decode parameters kept with a state. Raises FileError."""
    try:
        return msgspec.json.decode(metadata_of(path).get(_DEFAULTS, "{}"), type=DecodeDefaults)
    except msgspec.MsgspecError as error:
        raise FileError(f"state file {path}: its decode parameters cannot be read: {error}") from error


def _write(path: Path, state: TunedTensor, about: dict[str, str]) -> None:
    make_private_folder(path.parent)
    try:
        write_tuned_state(path, state, about)
        sync(path)
    except BaseException:
        _discard(path)
        raise


def _temp_path_in(folder: Path) -> Path:
    """Return a temporary name in a folder. A later start deletes leftovers."""
    return folder / f".{uuid.uuid4().hex}{_STATE_SUFFIX}"


def _discard(path: Path | None) -> None:
    """Delete a temporary file. If that fails, a later start does."""
    if path is not None:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _check(call: AddState) -> None:
    """Check the arguments of an added state.

    Raises ServiceError for a bad name or orientation, or not exactly one source.
    """
    check_name(call.name)
    if call.orientation not in (AUTO, VALUE_KEY, KEY_VALUE):
        raise invalid("orientation", f"must be {AUTO}, {VALUE_KEY} or {KEY_VALUE}", call.orientation)
    if [bool(call.file), bool(call.content), bool(call.mixture)].count(True) != 1:
        raise invalid(
            "file", "must be a path within --models-dir or uploaded; or give `states` for a mixture", call.file
        )
