"""Tensors and C: checked calls of functions that take raw pointers, and copies between host and devices."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Shape = tuple[int | None, ...]


def pointer(tensor: Tensor, name: str, dtype: torch.dtype, shape: Shape, device: torch.device) -> int:
    """Return the address of a tensor's data for a C function.

    The tensor must be contiguous, [*shape] of `dtype`, on `device`; None in `shape` means any size. Raises TypeError or
    ValueError with the argument, the allowed and the given value.
    """
    if tensor.dtype is not dtype:
        raise TypeError(f"{name}: must be {dtype}, not {tensor.dtype}")
    if tensor.device.type != device.type or (device.index is not None and tensor.device.index != device.index):
        raise ValueError(f"{name}: must be on device {device}, not {tensor.device}")
    fits = tensor.dim() == len(shape) and all(w is None or w == s for w, s in zip(shape, tensor.shape, strict=True))
    if not fits:
        raise ValueError(f"{name}: must have shape {shape}, not {tuple(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: must be contiguous, has strides {tensor.stride()}")
    return tensor.data_ptr()


def stream_pointer(device: torch.device) -> int:
    """Returns torch's current cudaStream_t of the device."""
    return torch.cuda.current_stream(device).cuda_stream


def fields(kind: type, names: str) -> list[tuple[str, type]]:
    """Returns fields of one type for a C structure."""
    return [(name, kind) for name in names.split()]


def bind(library: ctypes.CDLL, function: str, *argument_types: type) -> Callable[..., int]:
    """Returns the library's C function `int function(...)` with its argument types declared."""
    bound = library[function]
    bound.restype = ctypes.c_int
    bound.argtypes = list(argument_types)
    return bound


def check_status(code: int, function: str) -> None:
    """Checks a launcher's status. Raises RuntimeError if a launcher returned a CUDA error (0 is success)."""
    if code != 0:
        raise RuntimeError(f"{function}: CUDA error {code}")


MAX_PITCH = 2**31 - 1
"""Maximum distance in bytes between two pieces of a copy."""
ANY_DIRECTION = 4  # cudaMemcpyDefault
Numbers = Sequence[float] | Sequence[Sequence[float]]


def on_device(values: Numbers, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copies a list [n] to a device. `torch.tensor(..., device=...)` would wait until its queue is empty."""
    return pinned(torch.tensor(values, dtype=dtype), device).to(device, non_blocking=True)


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a host tensor [...] for asynchronous copies to the device."""
    return tensor.pin_memory() if device.type == "cuda" and not tensor.is_cuda else tensor


def copy_pieces(target: Tensor, source: Tensor) -> None:
    """Copies in pieces: target <- source, on the current stream.

    [n, ...] of one type. Either may be n separate pieces.

    Between a GPU and pinned memory it returns at once; keep both tensors until the copy is done. The copy engine does
    all of it; `Tensor.copy_` would first gather the pieces on the GPU. Raises ValueError for different shapes or types,
    and for pieces that are not contiguous.
    """
    if target.shape != source.shape or target.dtype != source.dtype:
        raise ValueError(f"{source.dtype} {tuple(source.shape)} does not fit {target.dtype} {tuple(target.shape)}")
    if not (target[0].is_contiguous() and source[0].is_contiguous()):
        raise ValueError(f"a piece is contiguous, not of strides {target[0].stride()} or {source[0].stride()}")
    pitches = [tensor.stride(0) * tensor.element_size() for tensor in (target, source)]
    copy_2d = _copy_2d() if target.is_cuda or source.is_cuda else None
    if copy_2d is None or max(pitches) > MAX_PITCH:
        target.copy_(source, non_blocking=True)
        return
    stream = torch.cuda.current_stream(target.device if target.is_cuda else source.device).cuda_stream
    places = target.data_ptr(), pitches[0], source.data_ptr(), pitches[1]
    size = source[0].numel() * source.element_size()
    check_status(copy_2d(*places, size, len(source), ANY_DIRECTION, stream), "cudaMemcpy2DAsync")


def copy_on(stream: torch.cuda.Stream, target: Tensor, source: Tensor) -> None:
    """Copies target <- source on one stream of a GPU. Returns at once.

    Both are contiguous [...] of one size in bytes.

    Between two GPUs, `Tensor.copy_` also makes a stream of the other device wait. Work in the same hardware queue then
    waits too. Keep both tensors until the copy is done. Call `enable_peer_access` for two GPUs first. Raises ValueError
    for different sizes.
    """
    if target.nbytes != source.nbytes:
        raise ValueError(f"{source.nbytes} bytes do not fit {target.nbytes}")
    copy = _copy_1d()
    if copy is None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return
    code = copy(target.data_ptr(), source.data_ptr(), source.nbytes, ANY_DIRECTION, stream.cuda_stream)
    check_status(code, "cudaMemcpyAsync")


class Copier:
    """`copy_on` for one GPU stream, with less host work per copy. For copies in every step."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._copy, self._handle = _copy_1d(), stream.cuda_stream

    def copy(self, target: Tensor, source: Tensor, count: int) -> None:
        """Copies target[:count] <- source[:count], contiguous [n] of one type. The caller checks the lengths."""
        if self._copy is None:
            copy_on(self._stream, target[:count], source[:count])
            return
        size = count * source.element_size()
        code = self._copy(target.data_ptr(), source.data_ptr(), size, ANY_DIRECTION, self._handle)
        if code:
            check_status(code, "cudaMemcpyAsync")


@functools.cache
def enable_peer_access(one: torch.device, other: torch.device) -> None:
    """Let two GPUs access each other's memory. Torch enables it at its first copy."""
    for source, target in ((one, other), (other, one)):
        torch.empty(1, device=target).copy_(torch.zeros(1, device=source))


@functools.cache
def _copy_1d() -> Callable[..., int] | None:
    pointer = ctypes.c_void_p
    return _runtime_function("cudaMemcpyAsync", pointer, pointer, ctypes.c_size_t, ctypes.c_int, pointer)


@functools.cache
def _copy_2d() -> Callable[..., int] | None:
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    return _runtime_function("cudaMemcpy2DAsync", pointer, size, pointer, size, size, size, ctypes.c_int, pointer)


def _runtime_function(name: str, *argument_types: type) -> Callable[..., int] | None:
    """Returns a function of torch's CUDA runtime; None for another runtime."""
    try:
        runtime = ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}")
    except OSError:
        return None
    return bind(runtime, name, *argument_types)
