"""fp16 linear layers: own kernels up to 256 rows on Hopper, up to 16 elsewhere; else cuBLAS."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cuda.hopper_gemm import (
    MAX_HOPPER_ROWS,
    GemmShape,
    fits_hopper_gemm,
    fixed_splits,
    has_hopper_gemm,
    launch_hopper_gemm,
    launch_in_order,
    may_return_fp32,
)
from rwkv_batch.kernels.cuda.library import MAX_GEMMS, SkinnyLaunchArgs, cuda_pointer, fp32_result, library
from rwkv_batch.model.layer import Linear

MAX_SKINNY_ROWS = 16
MIN_SKINNY_HOPPER_K = 4096
"""Inputs from which the Hopper kernel is used for 1 to 16 rows, too.

Measured at 4096: faster. At 2048: slower with 1 to 8 rows, equal with 12 and 16 (docs/tries.md).
"""


@dataclass(slots=True)
class Gemm:
    """One GEMM of a launch: y = activation(x @ weight.T); weight [n, k], x [rows, k], y [rows, n]."""

    weight: Tensor
    x: Tensor
    y: Tensor
    activation: Activation = Activation.NONE


def fits_skinny(weight: Tensor) -> bool:
    """Whether the skinny kernel takes a weight [n, k] of this shape."""
    return weight.shape[0] % 32 == 0 and weight.shape[1] % 64 == 0


def uses_hopper_gemm(rows: int, weight: Tensor, transposed: bool = False) -> bool:
    """Whether the Hopper kernel takes so many rows times this weight. The weight is [n, k], or [k, n] if transposed."""
    n, k = reversed(weight.shape) if transposed else weight.shape
    worth_it = MAX_SKINNY_ROWS < rows <= MAX_HOPPER_ROWS or (rows <= MAX_SKINNY_ROWS and k >= MIN_SKINNY_HOPPER_K)
    return worth_it and has_hopper_gemm(weight.device) and fits_hopper_gemm(GemmShape(n, k), transposed)


def is_grouped(rows: int, weight: Tensor) -> bool:
    """Whether an own kernel takes so many rows times this weight.

    The weight is [n, k]. One launch takes several weights.
    """
    return uses_hopper_gemm(rows, weight) or (rows <= MAX_SKINNY_ROWS and fits_skinny(weight))


def multiply(gemms: Sequence[Gemm]) -> None:
    """Runs up to 8 GEMMs over the same rows in one launch. `is_grouped` must allow it."""
    rows, weight = gemms[0].x.shape[0], gemms[0].weight
    if uses_hopper_gemm(rows, weight):
        launch_hopper_gemm([(m.weight, m.x, m.y, m.activation) for m in gemms], transposed=False)
    else:
        skinny(gemms)


def skinny(gemms: Sequence[Gemm]) -> None:
    """Runs up to 8 GEMMs over the same rows in one launch.

    At most 16 rows. Raises ValueError for more rows or GEMMs.
    """
    rows = gemms[0].x.shape[0]
    if len(gemms) > MAX_GEMMS or rows > MAX_SKINNY_ROWS:
        raise ValueError(
            f"a grouped launch takes {MAX_GEMMS} GEMMs of {MAX_SKINNY_ROWS} rows, not {len(gemms)} of {rows}"
        )
    args = SkinnyLaunchArgs(count=len(gemms), rows=rows)
    for slot, m in zip(args.gemms, gemms, strict=False):
        n, k = m.weight.shape
        if not fits_skinny(m.weight) or m.x.shape != (rows, k) or m.y.shape != (rows, n):
            raise ValueError(
                f"shapes {tuple(m.weight.shape)}, {tuple(m.x.shape)}, {tuple(m.y.shape)} do not fit each other"
            )
        slot.weight, slot.x, slot.y = cuda_pointer(m.weight), cuda_pointer(m.x), cuda_pointer(m.y, m.y.dtype)
        slot.n, slot.k, slot.ld_y = n, k, n
        slot.activation, slot.out_fp32 = m.activation, m.y.dtype == torch.float32
        slot.warps_k = 8 if k >= 512 else 4 if k >= 256 else 2 if k >= 128 else 1
    library().call("rwkv_skinny", ctypes.byref(args))


def multiply_transposed(x: Tensor, transposed: Tensor) -> Tensor:
    """Returns x [rows, k] @ transposed [k, n]."""
    if not uses_hopper_gemm(len(x), transposed, transposed=True):
        return torch.mm(x, transposed)
    y = x.new_empty(len(x), transposed.shape[1])
    launch_hopper_gemm([(transposed, x, y, Activation.NONE)], transposed=True)
    return y


def multiply_in_order(
    x: Tensor, weight: Tensor, activation: Activation = Activation.NONE, transposed: bool = False
) -> Tensor:
    """Returns x [rows, k] @ weight [n, k]^T, activated; [k, n] if transposed. The order of sums is fixed."""
    n, k = reversed(weight.shape) if transposed else weight.shape
    y = x.new_empty(len(x), n)
    launch_in_order([(weight, x, y, activation)], fixed_splits([GemmShape(n, k)], x.device), transposed)
    return y


class CudaLinear(Linear):
    """A linear map: fp16 weight [out, in], fp32 sums."""

    def __init__(self, weight: Tensor, is_deterministic: bool = False) -> None:
        """is_deterministic: a row's bits do not depend on the other rows."""
        super().__init__(weight)
        self.is_deterministic = is_deterministic

    def __call__(self, x: Tensor) -> Tensor:
        """Maps [T, in] fp16 to [T, out] fp16."""
        if self.is_deterministic:
            return multiply_in_order(x, self.weight)
        if not is_grouped(x.shape[0], self.weight):
            return torch.nn.functional.linear(x, self.weight)
        y = torch.empty(x.shape[0], self.weight.shape[0], dtype=x.dtype, device=x.device)
        multiply([Gemm(self.weight, x, y)])
        return y

    def to_fp32(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Maps [T, in] fp16 to [T, out] fp32 in `out`.

        Not rounded to fp16. Raises ValueError if `out` has another shape.
        """
        out = fp32_result(out, len(x), len(self.weight), x.device)
        if x.shape[0] == 0:
            return out
        if self.is_deterministic:
            launch_in_order([(self.weight, x, out, Activation.NONE)], splits=1)
            return out
        if x.shape[0] <= MAX_SKINNY_ROWS and fits_skinny(self.weight):
            skinny([Gemm(self.weight, x, out)])
            return out
        if may_return_fp32(len(x), GemmShape(*self.weight.shape), self.weight.device):
            launch_hopper_gemm([(self.weight, x, out, Activation.NONE)], transposed=False)
            return out
        return torch.mm(x, self.weight.T, out_dtype=torch.float32, out=out)
