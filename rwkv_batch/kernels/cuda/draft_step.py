"""A draft model on a GPU: its decode step in one launch, and tokens of drafts that the host does not know yet.

The step also chooses the likeliest token of each row.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rwkv_batch.kernels.cuda.hopper_gemm import has_hopper_gemm, is_mps_active
from rwkv_batch.kernels.cuda.layer import CudaLayer
from rwkv_batch.kernels.cuda.library import (
    DraftStepArgs,
    GuessTableArgs,
    cuda_pointer,
    hopper_library,
    library,
    slots_pointer,
)
from rwkv_batch.model.layer import Linear, Norm
from rwkv_batch.model.state import RWKV7, ModelShape, StateArena

MAX_ROWS = 8
WIDTHS = (768, 1024)
LOW_RANK, GATE_RANK = 64, 128
SETS = 3
"""Buffers of exchanged activations, which layers use in rotation."""
FP32, INT16, INT32, INT64 = torch.float32, torch.int16, torch.int32, torch.int64


def fits(shape: ModelShape, device: torch.device) -> bool:
    """Return whether the kernel takes models of this shape on the device, with weights and states in fp16."""
    if device.type != "cuda" or not has_hopper_gemm(device) or is_mps_active():
        return False
    low_rank = max(shape.decay_rank, shape.a_rank, shape.v_rank)
    is_known = shape.version == RWKV7 and shape.width in WIDTHS and shape.ffn == 4 * shape.width and not shape.vocab % 8
    return is_known and low_rank <= LOW_RANK and shape.gate_rank <= GATE_RANK


def in_order_of_loads(weight: Tensor) -> Tensor:
    """Return a weight [N, K] in tiles of 8 outputs and chunks of 32 inputs: [N / 8, K / 32, 256].

    A lane of a warp loads 8 inputs of one output: its left operands of two mma.m16n8k16.
    """
    outputs, inputs = weight.shape
    chunks = weight.reshape(outputs // 8, 8, inputs // 32, 32)
    return chunks.transpose(1, 2).reshape(outputs // 8, inputs // 32, 256)


class DraftStep:
    """Launches steps of one model; holds its weights as the kernel loads them, and the memory that CTAs exchange.

    Engine thread.
    """

    max_rows = MAX_ROWS

    def __init__(
        self,
        layers: Sequence[CudaLayer],
        embedding: Tensor,
        ln_out: Norm,
        head: Linear,
        state: StateArena,
        num_ctas: int,
    ) -> None:
        """embedding: [V, C], normalised; num_ctas: multiprocessors of the device. See `fits`."""
        device, width = embedding.device, embedding.shape[1]
        exchanged = MAX_ROWS * (10 * width + 3 * LOW_RANK + GATE_RANK)  # fp16 numbers: DraftExchange::SIZE
        tensors = {
            "weights": _stacked(_maps, layers),
            "ups": _stacked(_low_rank_ups, layers),
            "vectors": _stacked(_vectors, layers),
            "mixes": torch.stack([torch.cat([layer.att_mix, layer.ffn_mix]) for layer in layers]),
            "embedding": embedding,
            "head": in_order_of_loads(head.weight),
            "out_weight": ln_out.weight,
            "out_bias": ln_out.bias,
            "exchange": torch.full((SETS * exchanged,), -1, dtype=INT16, device=device),
            "keys": torch.full((MAX_ROWS * num_ctas,), -1, dtype=INT64, device=device),
            "v_first": torch.empty(MAX_ROWS, width, dtype=FP32, device=device),
            "launches": torch.zeros(1, dtype=INT32, device=device),
        }
        dtypes = dict.fromkeys(("vectors", "out_weight", "out_bias", "v_first"), FP32)
        dtypes |= {"exchange": INT16, "keys": INT64, "launches": INT32}
        self._tensors = tensors
        self._state = state
        self._args = DraftStepArgs(
            **{name: cuda_pointer(tensor, dtypes.get(name, torch.float16)) for name, tensor in tensors.items()},
            wkv=slots_pointer(state.layer_wkv(0), (torch.float16,)),
            shift=slots_pointer(state.att_shift(0), (torch.float16,)),
            wkv_slot=state.wkv.stride(0),
            wkv_layer=state.wkv.stride(1),
            shift_slot=state.shift.stride(0),
            shift_layer=state.shift.stride(1),
            num_layers=len(layers),
            width=width,
            vocab=head.weight.shape[0],
        )

    def launch(self, rows: int, table: Tensor, step: Tensor, chosen: Tensor, guesses: Tensor) -> None:
        """See `DraftStep` in model/ops.py."""
        args = self._args
        for name, tensor in (("table", table), ("step", step), ("chosen", chosen), ("guesses", guesses)):
            setattr(args, name, cuda_pointer(tensor, INT64))
        args.rows, args.table_rows = rows, table.shape[-1]
        hopper_library().call("rwkv_draft_step", ctypes.byref(args))


def place_tokens(to: Tensor, places: Tensor, tokens: Tensor, sources: Tensor) -> None:
    """See HasLateTokens."""
    pointers = [cuda_pointer(one, INT64) for one in (to, places, tokens, sources)]
    library().call("rwkv_place_tokens", *pointers, places.shape[0])


def fill_guess_table(
    table: Tensor, rows: Tensor, num_rows: int, padded_rows: int, last: Tensor, after: Tensor, num_slots: int
) -> None:
    """See HasLateTokens."""
    pointers = [cuda_pointer(one, INT64) for one in (rows, last, after, table)]
    sizes = (num_rows, rows.shape[1], padded_rows, table.shape[0], table.shape[2], num_slots)
    library().call("rwkv_fill_guess_table", ctypes.byref(GuessTableArgs(*pointers, *sizes)))


def _stacked(part: Callable[[CudaLayer], Tensor], layers: Sequence[CudaLayer]) -> Tensor:
    """Return a part of each layer [layers, ...]; no two layers' parts are in memory beside the result."""
    first = part(layers[0])
    stacked = first.new_empty(len(layers), *first.shape)
    for number, layer in enumerate(layers):
        stacked[number] = part(layer)
    return stacked


def _maps(layer: CudaLayer) -> Tensor:
    """Return DraftWeights. ffn.value is four tiles for the same outputs, of a quarter of the inputs each."""
    width = layer.att_mix.shape[1]
    assert layer.rkv is not None, "its weights are fp16"
    quarters = layer.ffn_value.weight.view(width // 8, 8, 4, width).transpose(1, 2)
    inputs = [_padded(layer.low_in, 3, LOW_RANK, width), _padded(layer.gate_in, GATE_RANK, width)]
    weights = [layer.rkv, *inputs, layer.output.weight, layer.ffn_key.weight, quarters]
    return in_order_of_loads(torch.cat([weight.reshape(-1, width) for weight in weights])).flatten()


def _low_rank_ups(layer: CudaLayer) -> Tensor:
    """Return the second halves of the low-rank maps, by head and warp: chunks of v, w, a and g."""
    width = layer.att_mix.shape[1]
    low = _padded(layer.low_out, 3, width, LOW_RANK)
    maps = torch.cat([*low, _padded(layer.gate_out, width, GATE_RANK)], 1)
    return in_order_of_loads(maps).flatten()


def _padded(weight: Tensor, *size: int) -> Tensor:
    """Return a weight with zeros before its first axis (layer 0 has no v), and after the others, up to a size."""
    missing = [want - has for want, has in zip(size, weight.shape, strict=True)]
    first = (missing[0], 0) if len(size) == 3 else (0, missing[0])
    after = [part for count in reversed(missing[1:]) for part in (0, count)]
    return torch.nn.functional.pad(weight, (*after, *first))


def _vectors(layer: CudaLayer) -> Tensor:
    """Return [12, C] fp32: enum Vector."""
    norms = [part for norm in (layer.ln1, layer.ln2, layer.ln_x) for part in (norm.weight, norm.bias)]
    v0 = layer.w0 if layer.v_residual is None else layer.v_residual.v0
    return torch.stack([*norms, layer.w0, layer.a0, v0, layer.k_k, layer.k_a, layer.r_k.flatten()])
