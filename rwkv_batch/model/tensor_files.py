"""Maps named tensors of `.pth` and `.safetensors` files, without running code.

Another process finds the tensors in a file (tensor_index.py), because headers and pickles are untrusted.
"""

from __future__ import annotations

import threading
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from native.sandbox import ENDED, Sandbox
from rwkv_batch.model.tensor_index import CPU_S, MEMORY_BYTES, Place, TensorIndex

PTH, SAFETENSORS = ".pth", ".safetensors"
MAX_VALUE = torch.finfo(torch.float16).max
"""Largest valid number in weights."""
MAX_JSON_BYTES = 4 << 20
_PROGRAM = "rwkv_batch.model.tensor_index"
_lock = threading.Lock()
_sandboxes: list[Sandbox] = []
"""idle, started on demand"""


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
    remedy: str = "give --model-path"
    suffixes: tuple[str, ...] = (PTH, SAFETENSORS)
    """The first bytes decide which of the two formats a file has."""


MODEL = FileKind()


def read_tensors(path: Path, kind: FileKind = MODEL) -> Mapping[str, Tensor]:
    """Read tensors [...] by name, mapped from the file. Do not write to them.

    Raises FileError with the file and the remedy.
    """
    if not path.exists():
        raise FileError(f"{kind.noun} {path} does not exist; {kind.remedy} a .pth or .safetensors file")
    if path.is_dir():
        raise FileError(f"{kind.folder} {path} is a folder; {kind.remedy} the .pth or .safetensors file in it")
    if not path.is_file():
        raise FileError(f"{kind.noun} {path} is not a regular file; {kind.remedy} a file")
    if path.suffix not in kind.suffixes:
        raise FileError(f"{kind.noun} {path} ends in {path.suffix!r}; {kind.content} come as .pth or .safetensors")
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
        return {place.name: _mapped(storage, place) for place in index.places}
    except (OSError, RuntimeError) as error:
        raise FileError(f"{kind.noun} {path} cannot be mapped ({error}); write it to another file") from error


def _mapped(storage: Any, place: Place) -> Tensor:
    """Return a tensor [...] of the file's bytes. Raises RuntimeError if the file became shorter."""
    own = storage[place.begin : place.begin + place.num_bytes]
    tensor = torch.empty(0, dtype=getattr(torch, place.dtype))
    return tensor.set_(own, 0, place.shape, place.strides)


def _is_safetensors(path: Path) -> bool:
    return path.suffix == SAFETENSORS or (path.suffix != PTH and not zipfile.is_zipfile(path))


def _index(path: Path) -> TensorIndex | str:
    """Return the file's tensors, or a refusal that continues "FILE ..."."""
    with _lock:
        sandbox = _sandboxes.pop() if _sandboxes else None
        if sandbox is not None and not sandbox.is_alive:
            sandbox.close()
            sandbox = None
        sandbox = sandbox or Sandbox(_PROGRAM)
        try:
            index: TensorIndex | str = sandbox.call((path.absolute(), _is_safetensors(path)))
        except ENDED:
            sandbox.close()
            return f"takes more than {CPU_S} s or {MEMORY_BYTES >> 30} GiB to read; save a dict of tensors"
        _sandboxes.append(sandbox)
        return index


def metadata_of(path: Path) -> dict[str, str]:
    """Return a safetensors file's metadata. {} for other or unreadable files."""
    index = _index(path) if path.is_file() else ""
    return {} if isinstance(index, str) else index.metadata


def read_json_file(path: Path) -> bytes:
    """Return a small file's bytes. Raises FileError."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise FileError(f"{path} cannot be read ({error}); download it again") from error
    if len(content) > MAX_JSON_BYTES:
        raise FileError(f"{path} has more than {MAX_JSON_BYTES} bytes; it is not the JSON of a model or an adapter")
    return content
