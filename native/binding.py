"""Checked calls from tensors to C functions that take raw pointers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

Shape = tuple[int | None, ...]


def pointer(tensor: Tensor, name: str, dtype: torch.dtype, shape: Shape, device: torch.device) -> int:
    """Address of the tensor's data, once it is what the C function takes: contiguous, [*shape] of `dtype` on `device`.

    `shape` may hold None where any size will do. Raises TypeError or ValueError naming the argument, what is
    wanted and what was given.
    """
    if tensor.dtype is not dtype:
        raise TypeError(f"{name}: wants {dtype}, not {tensor.dtype}")
    if tensor.device.type != device.type or (device.index is not None and tensor.device.index != device.index):
        raise ValueError(f"{name}: wants device {device}, not {tensor.device}")
    fits = tensor.dim() == len(shape) and all(w is None or w == s for w, s in zip(shape, tensor.shape, strict=True))
    if not fits:
        raise ValueError(f"{name}: wants shape {shape}, not {tuple(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: must be contiguous, has strides {tensor.stride()}")
    return tensor.data_ptr()


def stream_pointer(device: torch.device) -> int:
    """Returns torch's current cudaStream_t of the device."""
    return torch.cuda.current_stream(device).cuda_stream


def bind(library: ctypes.CDLL, function: str, *argument_types: type) -> Callable[..., int]:
    """Returns the library's C function `int function(...)` with its argument types declared."""
    bound = library[function]
    bound.restype = ctypes.c_int
    bound.argtypes = list(argument_types)
    return bound


def check_status(code: int, function: str) -> None:
    """Raises RuntimeError if a launcher returned a CUDA error (0 is success)."""
    if code != 0:
        raise RuntimeError(f"{function}: CUDA error {code}")
