"""Tuned states: reads initial WKV states from files, in this engine's layout.

A wrong orientation does not fail but gives worse answers. So the chosen orientation and its reason are reported.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rwkv_batch.model.state import ModelShape
from rwkv_batch.model.tensor_files import MAX_VALUE, FileError, FileKind, metadata_of, read_tensors
from rwkv_batch.model.weights import FLOATS

AUTO, VALUE_KEY, KEY_VALUE = "auto", "value_key", "key_value"
ORIENTATION = "orientation"
"""key in a safetensors file's metadata"""
STATE_FILE = FileKind(
    "state file",
    "state file",
    "tuned states",
    ".pth or .safetensors",
    (".pth", ".pt", ".bin", ".safetensors", ".st", ".state"),
)
_NAME = re.compile(r"(?:^|\.)blocks\.(\d+)\.att\.time_state$")
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class TunedTensor:
    wkv: Tensor
    """[layers, H, 64 (value), 64 (key)] fp32"""
    orientation: str
    """in the file: VALUE_KEY or KEY_VALUE"""
    reason: str
    """of this orientation"""
    digest: str
    """of the numbers in `wkv`"""


def read_tuned_state(path: Path, shape: ModelShape, orientation: str = AUTO) -> TunedTensor:
    """Read a tuned state, [layers, H, 64, 64]. Raises FileError with the file and the reason."""
    tensors = read_tensors(path, STATE_FILE)
    stored = _states(path, tensors, shape)
    detected, reason = _orientation(path, stored, orientation)
    wkv = torch.stack([tensor.reshape(tensor.shape[-3:]).float() for tensor in stored])
    if detected == KEY_VALUE:
        wkv = wkv.transpose(-1, -2)
    wkv = wkv.contiguous()
    if not wkv.isfinite().all():
        raise FileError(f"state file {path} has NaN or infinity; it is damaged, or its training failed")
    if (largest := wkv.abs().max().item()) > MAX_VALUE:
        raise FileError(f"state file {path} has {largest:.3g}, at most {MAX_VALUE:.0f} is valid; its training failed")
    digest = hashlib.blake2b(wkv.numpy().tobytes(), digest_size=8).hexdigest()
    return TunedTensor(wkv, detected, reason, digest)


def write_tuned_state(path: Path, state: TunedTensor, about: Mapping[str, str]) -> None:
    """Write a tuned state, [layers, H, 64, 64]. As safetensors for `read_tuned_state`. Raises OSError."""
    from safetensors.numpy import save  # safetensors.torch leaves reference cycles, which are rarely collected

    tensors = {f"blocks.{i}.att.time_state": wkv for i, wkv in enumerate(state.wkv.numpy())}
    path.write_bytes(save(tensors, metadata={**about, ORIENTATION: VALUE_KEY}))  # save_file raises no OSError


def _states(path: Path, tensors: Mapping[str, Tensor], shape: ModelShape) -> list[Tensor]:
    """Return the layers' tensors in order. Raises FileError. Each is [H, 64, 64] or [1, H, 64, 64]."""
    if shape.version == "RWKV-4":
        raise FileError(f"state file {path}: RWKV-4 has no tuned states, because its state has no matrices")
    found = {int(m.group(1)): tensor for name, tensor in tensors.items() if (m := _NAME.search(name))}
    others = [name for name in tensors if not _NAME.search(name)]
    if any(name.endswith("att.time_offset") for name in others):
        raise FileError(f"state file {path} has 'att.time_offset' tensors of RWKV-6, which are not supported")
    if not found:
        have = ", ".join(others[:_SHOWN]) or "nothing"
        raise FileError(f"state file {path} has no 'blocks.N.att.time_state' (it has {have}); it is not a tuned state")
    if others:
        raise FileError(
            f"state file {path} has {len(others)} tensors that are not a tuned state ({', '.join(others[:_SHOWN])}); "
            "load an adapter with --adapter"
        )
    if sorted(found) != list(range(shape.layers)):
        raise FileError(
            f"state file {path} has {len(found)} layers (up to number {max(found)}), the model has {shape.layers}; "
            "it was tuned for another model"
        )
    expected = shape.wkv
    for i, tensor in found.items():
        if tuple(tensor.shape) not in (expected, (1, *expected)):
            raise FileError(
                f"state file {path}: 'blocks.{i}.att.time_state' has shape {tuple(tensor.shape)}, expected {expected}; "
                "it was tuned for another model"
            )
        if tensor.dtype not in FLOATS:
            raise FileError(f"state file {path}: 'blocks.{i}.att.time_state' is {tensor.dtype}, expected floats")
    return [found[i] for i in range(shape.layers)]


def _orientation(path: Path, stored: list[Tensor], requested: str) -> tuple[str, str]:
    if requested != AUTO:
        return requested, "as requested"
    declared = metadata_of(path).get(ORIENTATION)
    if declared in (VALUE_KEY, KEY_VALUE):
        return declared, "as the file says"
    if _is_pth(path):
        return VALUE_KEY, "a .pth as it was trained"
    if all(tensor.dtype is torch.float16 for tensor in stored):
        return KEY_VALUE, "a converted file (fp16 safetensors), which has its matrices transposed"
    return VALUE_KEY, "safetensors that are not fp16: not a converted file"


def _is_pth(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"PK"
