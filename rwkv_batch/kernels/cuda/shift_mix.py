"""Residual add, LayerNorm, token shift and mix (csrc/mix/shift_mix.cu).

The output has the format that the next GEMM reads.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import torch
from torch import Tensor

from rwkv_batch.kernels.cuda.adapters import has_adapters
from rwkv_batch.kernels.cuda.library import NormMixArgs, ShiftMixArgs, cuda_pointer, library, slots_pointer
from rwkv_batch.kernels.cuda.quant_linear import CudaQuantLinear
from rwkv_batch.kernels.cuda.quantised_rows import (
    SCALE_ALIGNMENT,
    DeferredMix,
    MixedInputs,
    PartialSums,
    QuantisedMix,
    RowSums,
    SingleRowInput,
    sum_partials,
)
from rwkv_batch.kernels.cuda.skinny_quant import fits_hopper_row, fits_row_value
from rwkv_batch.kernels.cuda.w8a8.linear import CudaW8A8Linear
from rwkv_batch.kernels.cuda.w8a8.products import ExactSums, W8A8Mix, empty_rows, prepare_w8a8
from rwkv_batch.kernels.cuda.workspace import Workspace
from rwkv_batch.model.layer import MIX_ORDER, Prologue
from rwkv_batch.model.quant.formats import Format
from rwkv_batch.model.step_inputs import StepInputs, rows_of_tokens

MAX_WIDTH = 4096
TOKEN_CTAS = 4
"""CTAs per token, with partials and two-part output."""
TOKEN_CHANNELS = 256
"""A CTA's channels are a multiple of this."""
SHIFT_BLOCKS = 1
"""CTAs of shift_mix per SM."""


class HasWorkspaces(Protocol):
    """`CudaOps`, whose method `shift_and_mix` is."""

    workspaces: dict[torch.device, Workspace]


def shift_and_mix(
    ops: HasWorkspaces,
    x: Tensor,
    delta: Tensor | PartialSums | RowSums | ExactSums | None,
    prologue: Prologue,
    shift: Tensor,
    inputs: StepInputs,
) -> tuple[Tensor, MixedInputs | DeferredMix | list[SingleRowInput]]:
    """As naive, x [T, C] fp16 with mix [M, C] fp16; the time mix's inputs in the order r, k, v, w, a, g.

    Inputs of fp8 and w8a8 GEMMs are quantised here, unless adapters read them as fp16. One decode row of other
    quantised weights is mixed in the launch of its GEMMs, or is a SingleRowInput.
    """
    work = ops.workspaces[x.device]
    tokens, width = x.shape
    ragged, is_adapted = inputs.max_seqlen > 1, has_adapters(inputs)
    if ragged and isinstance(delta, PartialSums):  # the kernel of prompts has no registers for them
        delta = sum_partials(delta)
    is_lone = tokens == 1 and not is_adapted
    if is_lone and not isinstance(delta, PartialSums | ExactSums) and _defers_mix(prologue):
        return _defer_mix(x, delta, prologue, shift, inputs, work)
    quantised = None if is_adapted else _quantised_mix(x, prologue)
    in_8_bits = None if is_adapted else _w8a8_mix(x, prologue)
    mix, shares = prologue.mix, delta.partials if isinstance(delta, PartialSums) else None
    result: MixedInputs = quantised or in_8_bits or x.new_empty(len(mix), tokens, width)
    mixed = result if isinstance(result, Tensor) else result.fp16
    added = _row_sums(x, work) if is_lone and _accumulates_row_sums(prologue, work) else None
    x_out, rows = torch.empty_like(x), len(inputs.read_slots)
    tail = torch.empty(rows, width, dtype=x.dtype, device=x.device) if ragged and tokens > work.num_sms else None
    token_rows = inputs.token_rows
    if ragged and token_rows is None:
        token_rows = rows_of_tokens(inputs.cu_seqlens, tokens)
    args = ShiftMixArgs(
        **_row_args(x, delta, x_out, prologue, shift, inputs),
        partials=cuda_pointer(shares, torch.float32),
        to_clear=cuda_pointer(added, torch.int64),
        mixed=cuda_pointer(mixed),
        quantised=None if quantised is None else quantised.codes.data_ptr(),
        scales=None if quantised is None or quantised.scales is None else quantised.scales.data_ptr(),
        last_h=cuda_pointer(tail),
        mix=cuda_pointer(mix),
        cu_seqlens=cuda_pointer(inputs.cu_seqlens, torch.int64) if ragged else None,
        token_rows=cuda_pointer(token_rows, torch.int64),
        tokens=tokens,
        mixes=len(mix),
        tokens_per_cta=-(-tokens // (SHIFT_BLOCKS * work.num_sms)),
        scale_pitch=0 if quantised is None else quantised.scale_pitch,
        num_splits=0 if shares is None else len(shares),
        token_ctas=1 if shares is None else _token_blocks(width, quantised),
        are_rows_known=inputs.token_rows is not None,
    )
    if in_8_bits is not None:
        _fill_w8a8(args, in_8_bits, prologue)
        cleared = prepare_w8a8(x.device).cleared_of(tokens, width) if len(mix) == 1 else None
        args.to_clear = None if cleared is None else cuda_pointer(cleared.sums, torch.int32)
    if isinstance(delta, ExactSums):
        args.sums = cuda_pointer(delta.sums, torch.int32)
        args.row_scales = cuda_pointer(delta.row_scales, torch.float32)
        args.output_scales = cuda_pointer(delta.output_scales, torch.float32)
    library().call("rwkv_shift_mix", ctypes.byref(args), rows)
    if added is not None:
        return x_out, [SingleRowInput(mixed[0], added)]
    return x_out, result


def _row_args(
    x: Tensor,
    delta: Tensor | PartialSums | RowSums | ExactSums | None,
    x_out: Tensor,
    prologue: Prologue,
    shift: Tensor,
    inputs: StepInputs,
) -> dict[str, Any]:
    """Arguments of both launches that add, normalise and shift."""
    return {
        "x": cuda_pointer(x),
        "delta": cuda_pointer(delta) if isinstance(delta, Tensor) else None,
        "sums": cuda_pointer(delta.sums, torch.int64) if isinstance(delta, RowSums) else None,
        "x_out": cuda_pointer(x_out),
        "shift": slots_pointer(shift, (torch.float16,)),
        "weight": cuda_pointer(prologue.norm.weight, torch.float32),
        "bias": cuda_pointer(prologue.norm.bias, torch.float32),
        "read_slots": cuda_pointer(inputs.read_slots, torch.int64),
        "write_slots": cuda_pointer(inputs.write_slots, torch.int64),
        "slot_stride": shift.stride(0),
        "width": x.shape[1],
    }


def _defer_mix(
    x: Tensor,
    delta: Tensor | RowSums | None,
    prologue: Prologue,
    shift: Tensor,
    inputs: StepInputs,
    work: Workspace,
) -> tuple[Tensor, DeferredMix]:
    """One row whose mix the next launch computes: returns that launch's arguments, and x_out."""
    x_out = torch.empty_like(x)
    counter = cuda_pointer(work.mix_counter, torch.int32)
    args = NormMixArgs(**_row_args(x, delta, x_out, prologue, shift, inputs), counter=counter)
    held = (x, delta) if isinstance(delta, Tensor) else (x,)
    return x_out, DeferredMix(prologue.mix.unsqueeze(1), args, held)


def _accumulates_row_sums(prologue: Prologue, work: Workspace) -> bool:
    """Whether the next channel mix adds its one row to fixed-point sums."""
    consumer = prologue.consumer
    if len(prologue.mix) > 1 or not isinstance(consumer, CudaQuantLinear):
        return False
    return fits_row_value(consumer, work.num_sms)


def _row_sums(x: Tensor, work: Workspace) -> Tensor:
    """Returns [8, C / 8] int64, shared by a device's layers.

    Each layer's sums are read before the next layer starts.
    """
    return work.row_sums.flatten()[: x.shape[1]].view(8, -1)


def _token_blocks(width: int, quantised: QuantisedMix | None) -> int:
    """CTAs per token with partials; two-part inputs exist only on Hopper."""
    is_two_part = quantised is not None and quantised.is_two_part
    return TOKEN_CTAS if is_two_part and width % (TOKEN_CTAS * TOKEN_CHANNELS) == 0 else 1


def _defers_mix(prologue: Prologue) -> bool:
    """Whether the GEMM launch also computes one row's mix: slower with 4 bits.

    Hopper's kernel for one row does so for a time mix.
    """
    consumer = prologue.consumer
    if isinstance(consumer, CudaW8A8Linear):
        return consumer.takes_one_row and len(prologue.mix) > 1
    if not isinstance(consumer, CudaQuantLinear) or consumer.format is Format.INT4:
        return False
    if fits_hopper_row(consumer, [consumer.packed.columns]):
        return len(prologue.mix) > 1
    return consumer.uses_skinny_kernel(1) and consumer.packed.columns <= MAX_WIDTH


def _quantised_mix(x: Tensor, prologue: Prologue) -> QuantisedMix | None:
    """Returns buffers for quantised mixed inputs of x [T, C]; None if the GEMM reads fp16."""
    tokens, width = x.shape
    if not isinstance(prologue.consumer, CudaQuantLinear):
        return None
    count, halves = (3, 4) if len(prologue.mix) == len(MIX_ORDER) else (1, 0)
    if prologue.consumer.takes_two_part_rows(tokens):
        return QuantisedMix(
            *prologue.consumer.empty_two_part_rows(tokens, width, count), x.new_empty(halves, tokens, width)
        )
    if not prologue.consumer.takes_fp8_rows(tokens):
        return None
    pitch = -(-tokens // SCALE_ALIGNMENT) * SCALE_ALIGNMENT
    return QuantisedMix(
        torch.empty(count, tokens, width, dtype=torch.float8_e4m3fn, device=x.device),
        torch.empty(count, pitch, dtype=torch.float32, device=x.device)[:, :tokens],
        x.new_empty(halves, tokens, width),
    )


def _w8a8_mix(x: Tensor, prologue: Prologue) -> W8A8Mix | None:
    """Returns buffers for mixed inputs of x [T, C] in 8 bits; None if the GEMM reads others."""
    if not isinstance(prologue.consumer, CudaW8A8Linear) or (len(x) == 1 and prologue.consumer.takes_one_row):
        return None
    (tokens, width), is_time_mix = x.shape, len(prologue.mix) == len(MIX_ORDER)
    codes = empty_rows(tokens, width, 3 if is_time_mix else 1, is_unsigned=False, device=x.device)
    return W8A8Mix(codes, x.new_empty(4 if is_time_mix else 0, tokens, width))


def _fill_w8a8(args: ShiftMixArgs, mix: W8A8Mix, prologue: Prologue) -> None:
    """Fills what the kernel needs to write `mix`."""
    args.quantised = mix.codes.codes.data_ptr()
    args.scales = cuda_pointer(mix.codes.scales, torch.float32)
    args.ratios = cuda_pointer(mix.codes.ratios, torch.int32)
    args.scale_pitch = mix.codes.scales.shape[1]
    for i, linear in enumerate((prologue.consumer, *prologue.others)):
        assert isinstance(linear, CudaW8A8Linear), "r, k and v have one format"
        args.factors[i] = cuda_pointer(linear.weights.factors, torch.float32)
        args.stored_factors[i] = cuda_pointer(linear.weights.stored_factors, torch.float32)
        args.order[i] = cuda_pointer(linear.weights.order, torch.int16)
