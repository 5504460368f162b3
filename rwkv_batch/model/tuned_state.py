"""Tuned states: files with the WKV state that prompts are read from, brought into this engine's layout.

A wrong orientation does not fail, it answers worse: which one was taken, and why, is told with the state.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rwkv_batch.model.shape import ModelShape
from rwkv_batch.model.tensor_files import MAX_VALUE, FileError, FileKind, metadata_of, read_tensors
from rwkv_batch.model.weights import FLOATS

AUTO, VALUE_KEY, KEY_VALUE = "auto", "value_key", "key_value"
ORIENTATION = "orientation"
"""Key in a safetensors file's metadata."""
STATE_FILE = FileKind(
    "state file", "state file", "tuned states", "give", (".pth", ".pt", ".bin", ".safetensors", ".st", ".state")
)
_NAME = re.compile(r"(?:^|\.)blocks\.(\d+)\.att\.time_state$")
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class TunedTensor:
    """A tuned state as it was read."""

    wkv: Tensor
    """[layers, H, 64 (value), 64 (key)] fp32"""
    orientation: str
    """VALUE_KEY or KEY_VALUE: how the file had it"""
    reason: str
    """why that was taken"""
    digest: str
    """of the numbers, as they are in `wkv`"""


def read_tuned_state(path: Path, shape: ModelShape, orientation: str = AUTO) -> TunedTensor:
    """The state [layers, H, 64, 64] in a file, for a model of this shape.

    Raises FileError, naming the file and what is wrong with it.
    """
    tensors = read_tensors(path, STATE_FILE)
    stored = _states(path, tensors, shape)
    taken, reason = _orientation(path, stored, orientation)
    wkv = torch.stack([tensor.reshape(tensor.shape[-3:]).float() for tensor in stored])
    if taken == KEY_VALUE:
        wkv = wkv.transpose(-1, -2)
    wkv = wkv.contiguous()
    if not wkv.isfinite().all():
        raise FileError(f"state file {path} holds NaN or infinity; it is damaged, or its training failed")
    if (largest := wkv.abs().max().item()) > MAX_VALUE:
        raise FileError(f"state file {path} holds {largest:.3g}, {MAX_VALUE:.0f} is the most; its training failed")
    digest = hashlib.blake2b(wkv.numpy().tobytes(), digest_size=8).hexdigest()
    return TunedTensor(wkv, taken, reason, digest)


def write_tuned_state(path: Path, state: TunedTensor, about: Mapping[str, str]) -> None:
    """Keep a state [layers, H, 64, 64] as safetensors that `read_tuned_state` reads back as it is. Raises OSError."""
    from safetensors.torch import save_file

    tensors = {f"blocks.{i}.att.time_state": wkv.clone() for i, wkv in enumerate(state.wkv)}
    save_file(tensors, path, metadata={**about, ORIENTATION: VALUE_KEY})


def _states(path: Path, tensors: Mapping[str, Tensor], shape: ModelShape) -> list[Tensor]:
    """The layers' tensors in order, each [H, 64, 64] or [1, H, 64, 64]."""
    if shape.version == "RWKV-4":
        raise FileError(f"state file {path}: RWKV-4 takes no tuned states, its state has no matrices")
    found = {int(m.group(1)): tensor for name, tensor in tensors.items() if (m := _NAME.search(name))}
    others = [name for name in tensors if not _NAME.search(name)]
    if any(name.endswith("att.time_offset") for name in others):
        raise FileError(f"state file {path} has 'att.time_offset' tensors of RWKV-6's, which are not served")
    if not found:
        have = ", ".join(others[:_SHOWN]) or "nothing"
        raise FileError(f"state file {path} has no 'blocks.N.att.time_state' (it has {have}); it is no tuned state")
    if others:
        raise FileError(
            f"state file {path} has {len(others)} tensors that are no tuned state ({', '.join(others[:_SHOWN])}); "
            "an adapter is given by --adapter"
        )
    if sorted(found) != list(range(shape.layers)):
        raise FileError(
            f"state file {path} has {len(found)} layers (up to number {max(found)}), the model has {shape.layers}; "
            "it was tuned for another model"
        )
    wanted = shape.wkv
    for i, tensor in found.items():
        if tuple(tensor.shape) not in (wanted, (1, *wanted)):
            raise FileError(
                f"state file {path}: 'blocks.{i}.att.time_state' has shape {tuple(tensor.shape)}, expected {wanted}; "
                "it was tuned for another model"
            )
        if tensor.dtype not in FLOATS:
            raise FileError(f"state file {path}: 'blocks.{i}.att.time_state' is {tensor.dtype}, expected floats")
    return [found[i] for i in range(shape.layers)]


def _orientation(path: Path, stored: list[Tensor], asked: str) -> tuple[str, str]:
    """How the file has its matrices, and why that is taken."""
    if asked != AUTO:
        return asked, "as asked for"
    said = metadata_of(path).get(ORIENTATION)
    if said in (VALUE_KEY, KEY_VALUE):
        return said, "as the file says"
    if _is_pth(path):
        return VALUE_KEY, "a .pth as it was trained"
    if all(tensor.dtype is torch.float16 for tensor in stored):
        return KEY_VALUE, "a converted file (fp16 safetensors), which has its matrices transposed"
    return VALUE_KEY, "safetensors that are not fp16: not a converted file"


def _is_pth(path: Path) -> bool:
    """Whether the file is in the format of torch.save."""
    with path.open("rb") as file:
        return file.read(2) == b"PK"
