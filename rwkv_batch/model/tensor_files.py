"""Reads named tensors from `.pth` (`weights_only`) and `.safetensors` files, without running code."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PTH, SAFETENSORS = ".pth", ".safetensors"
MAX_SIZE_FACTOR = 4
"""Largest size of the tensors relative to the file: some are stored once under two names."""

MAX_VALUE = torch.finfo(torch.float16).max
"""Largest valid number in weights."""


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
    """Accepted suffixes. The first bytes decide which of the two formats a file has."""


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
        loaded = _read_safetensors(path) if _is_safetensors(path) else _read_pth(path, kind)
    except PermissionError as error:
        raise FileError(f"{kind.noun} {path} cannot be read ({error.strerror}); check its permissions") from error
    except FileError:
        raise
    except Exception as error:  # a damaged file makes the parsers raise almost anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FileError(f"{kind.noun} {path} is damaged or not a weight file ({reason}); download it again") from error
    if not isinstance(loaded, dict) or not all(isinstance(t, Tensor) for t in loaded.values()):
        raise FileError(f"{kind.noun} {path} is not a dict of tensors; give the weights themselves, not a checkpoint")
    _check_memory(path, kind, loaded)
    return loaded


def _check_memory(path: Path, kind: FileKind, tensors: Mapping[str, Tensor]) -> None:
    """Raises FileError for tensors without data of their own, which could take any amount of memory."""
    held = sum(tensor.nbytes for tensor in tensors.values() if tensor.layout is torch.strided)
    odd = [name for name, tensor in tensors.items() if tensor.layout is not torch.strided or tensor.is_meta]
    if odd or held > MAX_SIZE_FACTOR * path.stat().st_size:
        why = f"tensor {odd[0]!r} has no data of its own" if odd else f"its tensors would take {held} bytes"
        raise FileError(f"{kind.noun} {path} is not a weight file ({why}); save dense, complete tensors")


def _is_safetensors(path: Path) -> bool:
    return path.suffix == SAFETENSORS or (path.suffix != PTH and not zipfile.is_zipfile(path))


def _read_pth(path: Path, kind: FileKind) -> Any:
    if not zipfile.is_zipfile(path):
        raise FileError(
            f"{kind.noun} {path} is not a zip-format .pth (truncated, or saved by torch < 1.6); download it again"
        )
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def _read_safetensors(path: Path) -> Any:
    from safetensors.torch import load_file

    return load_file(path)


def metadata_of(path: Path) -> dict[str, str]:
    """Return the metadata in a safetensors file's header; {} for other or unreadable files."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file() or not _is_safetensors(path):
        return {}
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except (SafetensorError, OSError):
        return {}
