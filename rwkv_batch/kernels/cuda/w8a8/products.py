"""W8A8 GEMMs on a GPU: weights, inputs in 8 bits, and launches. All kernels give the bits of model/quant/w8a8.py."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rwkv_batch.kernels.cuda.hopper_gemm import has_hopper_gemm, is_mps_active
from rwkv_batch.kernels.cuda.library import cuda_pointer, hopper_library, library
from rwkv_batch.kernels.cuda.w8a8.arguments import (
    MAX_W8A8_GEMMS,
    W8A8Args,
    W8A8QuantiseArgs,
    W8A8SparseArgs,
)
from rwkv_batch.kernels.cuda.w8a8.plans import (
    BLOCK_OUTPUTS,
    FED_PLAN,
    MAX_EXCHANGED_ROWS,
    MAX_TILE_ROWS,
    SEGMENT,
    Launch,
    Plan,
    plan_w8a8,
)
from rwkv_batch.kernels.cuda.workspace import MAX_SPARSE_ROWS
from rwkv_batch.model.quant.w8a8 import Codes, InputTransform

MAX_K = 16384
MAX_OUTPUTS_PER_TILE = 128
"""Outputs of a tile whose sums are exchanged."""
COUNTERS_PER_TILE = 8
SPARSE_COLUMNS = 128
"""Outputs of a tile of csrc/w8a8/w8a8_sparse.cu; n is a multiple."""
INT8_DTYPES = (torch.int8, torch.uint8)
MAX_SUM_OUTPUTS = 4096
"""Of a row's exact sums that CTAs add in memory; the next kernel scales them."""


@dataclass(frozen=True, slots=True)
class W8A8Weights:
    """One int8 matrix W [n, K], with the transform of its inputs."""

    codes: Tensor
    """[n, K] int8, columns permuted"""
    scales: Tensor
    """[n] fp32"""
    ratios: Tensor
    """[n] int32"""
    factors: Tensor
    """[K] fp32 by channel; negative in segment 1"""
    stored_factors: Tensor
    """[K] fp32 by position"""
    order: Tensor
    """[K] int16: the channel that is stored at a position, and the reverse"""

    @classmethod
    def prepare(cls, codes: Codes, transform: InputTransform) -> W8A8Weights:
        """Copy a matrix's tensors into the form of the kernels.

        The copies are on the device of the codes. Raises ValueError for sizes that the kernels do not take.
        """
        n, k = codes.codes.shape
        if n % BLOCK_OUTPUTS or k % SEGMENT or k > MAX_K:
            raise ValueError(
                f"got a matrix of {n} outputs and {k} inputs; int8 products take outputs that are a multiple of "
                f"{BLOCK_OUTPUTS}, and inputs that are a multiple of {SEGMENT} up to {MAX_K}; use --dtype fp16"
            )
        device = codes.codes.device
        positions = transform.positions.to(device).long()
        is_large = positions < SEGMENT
        order = stored_order(is_large)
        factors = transform.factors.to(device, torch.float32)
        factors = torch.where(is_large, -factors, factors)
        scales, ratios = codes.scales.to(device, torch.float32), codes.ratios.to(device, torch.int32)
        return cls(
            codes.codes.index_select(1, positions[order]),
            scales.contiguous(),
            ratios.contiguous(),
            factors,
            factors[order],
            order.to(torch.int16),
        )

    @property
    def shape(self) -> torch.Size:
        """The matrix's shape, [n, K]."""
        return self.codes.shape

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(
            t.nbytes for t in (self.codes, self.scales, self.ratios, self.factors, self.stored_factors, self.order)
        )


def stored_order(is_large: Tensor) -> Tensor:
    """Return the channel that the kernels store at each position [K] int64, from is_large [K] bool.

    The 128 large channels are at the first positions. As few channels as possible move, and they swap in pairs, so
    that a kernel can round the channels that a thread holds.
    """
    order = torch.arange(len(is_large), device=is_large.device)
    inside = (~is_large[:SEGMENT]).nonzero().flatten()
    outside = is_large[SEGMENT:].nonzero().flatten() + SEGMENT
    order[inside], order[outside] = outside, inside
    return order


class W8A8Gemm(NamedTuple):
    """One GEMM of a launch: y = x @ W^T."""

    x: Codes
    """[T, K], in 16 bits [2 T, K]; scales and ratios padded to `pitch_of` the rows"""
    weights: W8A8Weights
    y: Tensor
    """[T, n] fp16, or fp32 with the same values"""


@dataclass(slots=True)
class W8A8Mix:
    """Mixed inputs of a half layer, the first ones in 8 bits."""

    codes: Codes
    """[3 or 1, T, C] int8, scales and ratios [3 or 1, pitch]"""
    fp16: Tensor
    """[4 or 0, T, C] fp16: v, w, a, g"""

    def __getitem__(self, i: int) -> Codes:
        """One of the inputs in 8 bits."""
        return Codes(*(values[i] for values in self.codes))


class Cleared(NamedTuple):
    """What the launches of a channel mix of few rows add to. The largest inputs lie behind the sums."""

    sums: Tensor
    """[T, n] int32: exact sums of ffn.value"""
    largest: Tensor
    """[T, 2] int32: bits of its largest inputs of the rest and of segment 1"""


class ExactSums(NamedTuple):
    """Outputs of a channel mix before they are scaled, as the next `shift_mix` reads them."""

    sums: Tensor
    """[T, n] int32"""
    row_scales: Tensor
    """[T] fp32"""
    output_scales: Tensor
    """[n] fp32"""


@dataclass(slots=True)
class W8A8Workspace:
    """Memory through which CTAs exchange sums on one device. Launches that use it must not run at once."""

    exchange: Tensor
    """bytes"""
    counters: Tensor
    """[tiles, 8] int32, a multiple of the splits between launches"""
    num_sms: int
    cleared: Tensor
    """[MAX_SPARSE_ROWS * (MAX_SUM_OUTPUTS + 2)] int32"""

    def cleared_of(self, rows: int, n: int) -> Cleared | None:
        """Return what `shift_mix` clears before a channel mix of n outputs; None if its results are scaled at once."""
        if not (1 < rows <= MAX_SPARSE_ROWS and _has_sparse_tiles(n) and len(self.cleared)):
            return None
        sums, largest = self.cleared[: rows * (n + 2)].split((rows * n, rows * 2))
        return Cleared(sums.view(rows, n), largest.view(rows, 2))


@functools.cache
def prepare_w8a8(device: torch.device) -> W8A8Workspace:
    """Build the kernels and allocate their workspace. Called once per device, at load."""
    library()
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    is_hopper = has_hopper_gemm(device)
    size = num_sms * MAX_OUTPUTS_PER_TILE * MAX_EXCHANGED_ROWS * 4 if is_hopper else 0
    return W8A8Workspace(
        torch.empty(size, dtype=torch.uint8, device=device),
        torch.zeros(num_sms, COUNTERS_PER_TILE, dtype=torch.int32, device=device),
        num_sms,
        torch.empty(MAX_SPARSE_ROWS * (MAX_SUM_OUTPUTS + 2) if is_hopper else 0, dtype=torch.int32, device=device),
    )


def pitch_of(rows: int) -> int:
    """Return the length of rows' scales: the last tile reads scales past the rows."""
    return -(-rows // BLOCK_OUTPUTS) * BLOCK_OUTPUTS + MAX_TILE_ROWS


def empty_rows(rows: int, k: int, count: int, is_unsigned: bool, device: torch.device) -> Codes:
    """Return buffers for the inputs of `count` GEMMs: codes [M, T, K], scales and ratios [M, pitch]."""
    return Codes(
        torch.empty(count, rows, k, dtype=torch.uint8 if is_unsigned else torch.int8, device=device),
        torch.empty(count, pitch_of(rows), dtype=torch.float32, device=device),
        torch.empty(count, pitch_of(rows), dtype=torch.int32, device=device),
    )


def quantise_inputs(
    x: Tensor, weights: W8A8Weights, relu_squared: bool = False, in_order: bool = False, bits: int = 8
) -> Codes:
    """Quantise x [T, K] fp16 as `weights` takes it.

    relu_squared: quantises max(x, 0)^2 to u8. Scales and ratios are padded.
    """
    return quantise_mixed(x.unsqueeze(0), [weights], relu_squared, in_order, bits)[0]


def quantise_mixed(
    x: Tensor, weights: Sequence[W8A8Weights], relu_squared: bool = False, in_order: bool = False, bits: int = 8
) -> list[Codes]:
    """Quantise x [M, T, K] fp16 for M <= 3 matrices, in 8 or 16 bits.

    Each matrix has its own transform. All run in one launch.
    in_order: x is in the order of the codes, not of the channels.

    Raises ValueError for shapes that do not match.
    """
    count, rows, k = x.shape
    if count != len(weights) or count > MAX_W8A8_GEMMS or any(w.shape[1] != k for w in weights):
        shapes = [tuple(w.shape) for w in weights]
        raise ValueError(f"inputs {tuple(x.shape)} do not fit {shapes}; a launch takes {MAX_W8A8_GEMMS} matrices")
    out = empty_rows(rows * bits // 8, k, count, relu_squared, x.device)
    args = W8A8QuantiseArgs(
        x=cuda_pointer(x),
        codes=out.codes.data_ptr(),
        scales=cuda_pointer(out.scales, torch.float32),
        ratios=cuda_pointer(out.ratios, torch.int32),
        count=count,
        rows=rows,
        k=k,
        pitch=out.scales.shape[1],
        relu_squared=relu_squared,
        is_two_byte=bits == 16,
    )
    for i, w in enumerate(weights):
        args.factors[i] = cuda_pointer(w.stored_factors if in_order else w.factors, torch.float32)
        args.stored_factors[i] = cuda_pointer(w.stored_factors, torch.float32)
        args.order[i] = None if in_order else cuda_pointer(w.order, torch.int16)
    library().call("rwkv_w8a8_quantise", ctypes.byref(args))
    return [Codes(*parts) for parts in zip(*out, strict=True)]


def multiply(
    gemms: Sequence[W8A8Gemm],
    plan: Plan | None = None,
    bits: int = 8,
    fed: W8A8Weights | None = None,
    largest: Tensor | None = None,
) -> None:
    """Run up to 3 GEMMs of the same K and rows, with inputs in 8 or 16 bits.

    They run in one launch. plan: for tests and tuning; None: the best known. GPUs without Hopper's kernels use
    mma.sync. Raises ValueError for shapes that do not match.

    fed, largest: ffn.value, whose largest inputs [T, 2] int32 are raised by one GEMM of few rows that feeds it.
    """
    device = gemms[0].y.device
    if not has_hopper_gemm(device):
        multiply_by_mma(gemms, bits)
        return
    args, launch = _launch_args(gemms, bits)
    if launch.rows == 0:
        return
    work = prepare_w8a8(device)
    if fed is not None:
        plan = FED_PLAN
    elif plan is None:
        plan = plan_w8a8(launch, work.num_sms, not is_mps_active())
    for name, value in plan.tile._asdict().items():
        setattr(args, name, value)
    args.lead, args.ctas_per_sm = plan.lead, plan.ctas_per_sm
    args.exchange, args.counters = work.exchange.data_ptr(), work.counters.data_ptr()
    if fed is not None:
        args.fed_factors = cuda_pointer(fed.stored_factors, torch.float32)
        args.fed_largest = cuda_pointer(largest, torch.int32)
    hopper_library().call("rwkv_w8a8", ctypes.byref(args))


def multiply_by_mma(gemms: Sequence[W8A8Gemm], bits: int = 8) -> None:
    """As `multiply`, by the kernel for every GPU."""
    args, _ = _launch_args(gemms, bits)
    library().call("rwkv_w8a8_mma", ctypes.byref(args))


def fits_sparse(n: int, device: torch.device) -> bool:
    """Whether few rows should skip inputs that are zero: `multiply_sparse` takes n outputs on the device.

    Measured on Hopper only.
    """
    return _has_sparse_tiles(n) and has_hopper_gemm(device)


def _has_sparse_tiles(n: int) -> bool:
    return n % SPARSE_COLUMNS == 0 and n <= MAX_SUM_OUTPUTS


def multiply_sparse_row(x: Tensor, weights: W8A8Weights, transposed: Tensor) -> Tensor:
    """Quantise max(x, 0)^2 and multiply it, x [1, K] fp16 in stored order -> y [1, n] fp16.

    transposed: the weights' codes [K, n]. Only the rows are read whose code is not zero. Raises ValueError for shapes
    that do not match.
    """
    y = x.new_empty(1, len(weights.codes))
    _call_sparse("rwkv_w8a8_sparse_row", x, weights, transposed, y=cuda_pointer(y))
    return y


def multiply_sparse(x: Tensor, weights: W8A8Weights, transposed: Tensor, cleared: Cleared) -> ExactSums:
    """As `multiply_sparse_row` for x [T <= 8, K]; adds to the sums, and reads the largest inputs, of `cleared`."""
    scales = torch.empty(len(x), dtype=torch.float32, device=x.device)
    places = cuda_pointer(cleared.sums, torch.int32), cuda_pointer(cleared.largest, torch.int32)
    _call_sparse(
        "rwkv_w8a8_sparse",
        x,
        weights,
        transposed,
        sums=places[0],
        largest=places[1],
        scales=cuda_pointer(scales, torch.float32),
    )
    return ExactSums(cleared.sums, scales, weights.scales)


def _call_sparse(kernel: str, x: Tensor, weights: W8A8Weights, transposed: Tensor, **places: int | None) -> None:
    (rows, k), n = x.shape, len(weights.codes)
    if transposed.shape != (k, n):
        raise ValueError(f"inputs {tuple(x.shape)} do not fit the transposed weights {tuple(transposed.shape)}")
    args = W8A8SparseArgs(
        h=cuda_pointer(x),
        weights=cuda_pointer(transposed, torch.int8),
        factors=cuda_pointer(weights.stored_factors, torch.float32),
        weight_scales=cuda_pointer(weights.scales, torch.float32),
        weight_ratios=cuda_pointer(weights.ratios, torch.int32),
        rows=rows,
        width=n,
        ffn=k,
        **places,
    )
    library().call(kernel, ctypes.byref(args))


def _launch_args(gemms: Sequence[W8A8Gemm], bits: int) -> tuple[W8A8Args, Launch]:
    first = gemms[0].x
    rows, k = first.codes.shape
    pitch, dtype = len(first.scales), first.codes.dtype
    if len(gemms) > MAX_W8A8_GEMMS or dtype not in INT8_DTYPES or pitch < pitch_of(rows):
        raise ValueError(
            f"got {len(gemms)} GEMMs of {dtype} {tuple(first.codes.shape)} with {pitch} scales; a launch takes "
            f"{MAX_W8A8_GEMMS} of int8 or uint8 with {pitch_of(rows)} scales"
        )
    args = W8A8Args(
        count=len(gemms), rows=rows, k=k, pitch=pitch, is_unsigned=dtype == torch.uint8, is_two_byte=bits == 16
    )
    for slot, (x, w, y) in zip(args.gemms, gemms, strict=False):
        n = w.shape[0]
        if w.shape[1] != k or x.codes.shape != (rows, k) or len(x.scales) != pitch or y.shape != (rows * 8 // bits, n):
            raise ValueError(f"shapes {tuple(w.shape)}, {tuple(x.codes.shape)}, {tuple(y.shape)} do not fit each other")
        slot.weights, slot.x, slot.n = cuda_pointer(w.codes, torch.int8), cuda_pointer(x.codes, dtype), n
        slot.weight_scales = cuda_pointer(w.scales, torch.float32)
        slot.weight_ratios = cuda_pointer(w.ratios, torch.int32)
        slot.input_scales = cuda_pointer(x.scales, torch.float32)
        slot.input_ratios = cuda_pointer(x.ratios, torch.int32)
        slot.y, slot.out_fp32 = cuda_pointer(y, y.dtype), y.dtype == torch.float32
    return args, Launch(tuple(w.shape[0] for _, w, _ in gemms), k, dtype == torch.uint8, rows)
