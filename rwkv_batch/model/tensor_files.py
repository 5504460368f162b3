"""Maps named tensors of `.pth`, `.safetensors` and GGUF files, without running code.

Another process finds the tensors in a file (tensor_index.py), because headers and pickles are untrusted.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from native.sandbox import ENDED, Sandbox, Sandboxes
from rwkv_batch.model.files.gguf import SPLIT_COUNT
from rwkv_batch.model.files.gguf_blocks import BlockTensor
from rwkv_batch.model.files.place import BLOCKS, CPU_S, MEMORY_BYTES, PTH, SAFETENSORS, Place, TensorIndex
from rwkv_batch.models_folder import shard_names

MAX_VALUE = torch.finfo(torch.float16).max
"""Largest valid number in weights."""
MAX_JSON_BYTES = 4 << 20
Json = TypeVar("Json")
_PROGRAM = "rwkv_batch.model.tensor_index"
_lock = threading.Lock()
_sandboxes = Sandboxes(partial(Sandbox, _PROGRAM))


class FileError(ValueError):
    """A tensor file that cannot be read. The message has the file and the remedy.

    given: the request's name of the file.
    """

    def __init__(self, message: str, given: str | None = None) -> None:
        super().__init__(message)
        self.given = given


@dataclass(frozen=True, slots=True)
class FileKind:
    """The wording of error messages for one kind of file."""

    noun: str = "model file"
    folder: str = "model path"
    content: str = "RWKV-7 weights"
    formats: str = ".pth, .safetensors, .st or .gguf"
    suffixes: tuple[str, ...] = (PTH, *SAFETENSORS, ".gguf")
    """The first bytes decide which of the formats a file has."""


MODEL = FileKind()


def read_tensors(path: Path, kind: FileKind = MODEL) -> Mapping[str, Tensor]:
    """Read tensors [...] by name, mapped from the file.

    A split GGUF is mapped from all its files. Do not write to the tensors. Raises FileError with the file and the
    remedy.
    """
    tensors, metadata = _read_one(path, kind)
    count = metadata.get(SPLIT_COUNT, "1")
    if count in ("0", "1"):
        return tensors
    shards = files_of(path)
    if str(len(shards)) != count:
        raise FileError(
            f"{kind.noun} {path} is one of {count} files of a split model; keep their names, like "
            f"NAME-00001-of-{count:0>5}.gguf"
        )
    return {name: tensor for shard in shards for name, tensor in _read_one(shard, kind)[0].items()}


def files_of(path: Path) -> list[Path]:
    """Return the files that a model's path means: those of a folder, of a split GGUF, or the file itself."""
    if path.is_dir():
        return sorted(path.glob("*.safetensors"))
    return [path.with_name(name) for name in shard_names(path.name)]


def _read_one(path: Path, kind: FileKind) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return a file's tensors [...] and its metadata. Raises FileError."""
    if not path.exists():
        raise FileError(f"{kind.noun} {path} does not exist; give a {kind.formats} file")
    if path.is_dir():
        raise FileError(f"{kind.folder} {path} is a folder; give the {kind.formats} file in it")
    if not path.is_file():
        raise FileError(f"{kind.noun} {path} is not a regular file; give a file")
    if path.suffix not in kind.suffixes:
        raise FileError(f"{kind.noun} {path} ends in {path.suffix!r}; {kind.content} come as {kind.formats}")
    try:
        with path.open("rb"):
            pass
    except PermissionError as error:
        raise FileError(f"{kind.noun} {path} cannot be read ({error.strerror}); check its permissions") from error
    index = _index(path)
    if isinstance(index, str):
        raise FileError(f"{kind.noun} {path} {index}")
    try:
        storage = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)
        return {place.name: _mapped(storage, place) for place in index.places}, index.metadata
    except (OSError, RuntimeError) as error:
        raise FileError(f"{kind.noun} {path} cannot be mapped ({error}); write it to another file") from error


def _mapped(storage: Any, place: Place) -> Tensor:
    """Return a tensor [...] of the file's bytes. Raises RuntimeError if the file became shorter."""
    own = storage[place.begin : place.begin + place.num_bytes]
    if place.dtype in BLOCKS:
        blocks = torch.empty(0, dtype=torch.uint8).set_(own).view(-1, BLOCKS[place.dtype][1])
        return BlockTensor(blocks, place.dtype, place.shape)
    tensor = torch.empty(0, dtype=getattr(torch, place.dtype))
    return tensor.set_(own, 0, place.shape, place.strides)


def _index(path: Path) -> TensorIndex | str:
    """Return the file's tensors, or a refusal that continues "FILE ..."."""
    try:
        with _lock:
            index: TensorIndex | str = _sandboxes.call(path.absolute())
        return index
    except ENDED:
        return f"takes more than {CPU_S} s or {MEMORY_BYTES >> 30} GiB to read; save a dict of tensors"


def metadata_of(path: Path) -> dict[str, str]:
    """Return a safetensors file's metadata. {} for other or unreadable files."""
    index = _index(path) if path.is_file() else ""
    return {} if isinstance(index, str) else index.metadata


def read_json_file(path: Path, kind: type[Json], what: str) -> Json:
    """Return the content of a small JSON file. `what` it belongs to: a model or an adapter. Raises FileError."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise FileError(f"{path} cannot be read ({error}); download it again") from error
    if len(content) > MAX_JSON_BYTES:
        raise FileError(f"{path} has more than {MAX_JSON_BYTES} bytes; it is not the JSON of a model or an adapter")
    try:
        return msgspec.json.decode(content, type=kind)
    except (RecursionError, UnicodeDecodeError, msgspec.MsgspecError) as error:
        raise FileError(f"{path} cannot be read ({error}); download the {what} again") from error
