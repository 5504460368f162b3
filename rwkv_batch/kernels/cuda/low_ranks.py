"""The low ranks of a time mix on a CUDA device: their GEMMs, and projections that may still lack the second ones."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cuda.hopper_gemm import FP16_SPLITS, Fp16Gemm, launch_in_order
from rwkv_batch.kernels.cuda.layer import CudaLayer
from rwkv_batch.kernels.cuda.library import LowRankUpArgs, cuda_pointer
from rwkv_batch.kernels.cuda.linear import Gemm, multiply
from rwkv_batch.model.layer import Projections

MAX_FUSED_WKV_ROWS = 4
"""Decode rows whose low ranks up are computed in the launch of the WKV; with 8 rows of fp8 that was 1.6 % slower."""
MAX_UP_TILES = 64
"""Tiles of 16 outputs x UP_TILE_INPUTS inputs per head that fit that launch."""
UP_TILE_INPUTS = 64
MAX_WAITING_TILES = 28
"""Tiles beyond the first two of each 16 outputs, which wait in shared memory."""


def fp16_gemms(gemms: list[Gemm]) -> list[Fp16Gemm]:
    return [(m.weight, m.x, m.y, m.activation) for m in gemms]


@dataclass(slots=True)
class LowRanks:
    """The GEMMs of a layer's low ranks and gate, and their outputs. The GEMMs take two launches."""

    down_gemms: list[Gemm]
    up_gemms: list[Gemm]
    low: Tensor
    """[2 or 3, T, D]: hidden values of (v,) w, a"""
    gate: Tensor
    """[T, Dg]: hidden values of the gate"""
    out: Tensor
    """[3 or 4, T, C]: (v,) w, a, gate"""
    is_in_order: bool
    """the order of sums does not depend on the rows"""

    @classmethod
    def build(cls, layer: CudaLayer, inputs: Tensor) -> LowRanks:
        """Builds the GEMMs over inputs [4, T, C]: v, w, a, g."""
        _, tokens, width = inputs.shape
        groups, rank, _ = layer.low_in.shape
        low = inputs.new_empty(groups, tokens, rank)
        gate = inputs.new_empty(tokens, len(layer.gate_in))
        out = inputs.new_empty(groups + 1, tokens, width)
        first = 3 - groups
        acts = [Activation.TANH if i == groups - 2 else Activation.NONE for i in range(groups)]
        down_gemms = [Gemm(layer.low_in[i], inputs[first + i], low[i], acts[i]) for i in range(groups)]
        up_gemms = [Gemm(layer.low_out[i], low[i], out[i]) for i in range(groups)]
        return cls(
            [*down_gemms, Gemm(layer.gate_in, inputs[3], gate, Activation.SIGMOID)],
            [*up_gemms, Gemm(layer.gate_out, gate, out[groups])],
            low,
            gate,
            out,
            layer.is_deterministic,
        )

    @property
    def weights(self) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the weights [n, k] of both launches."""
        return [m.weight for m in self.down_gemms], [m.weight for m in self.up_gemms]

    def multiply_down(self) -> None:
        """Computes `low` and `gate`; in order."""
        launch_in_order(fp16_gemms(self.down_gemms), FP16_SPLITS)

    def multiply_up(self) -> None:
        """Computes `out`."""
        if self.is_in_order:
            launch_in_order(fp16_gemms(self.up_gemms), splits=1)
        else:
            multiply(self.up_gemms)

    def projections(self, r: Tensor, k: Tensor, v: Tensor, *, pending: bool = False) -> CudaProjections:
        """With r, k, v [T, C] of the same layer. pending: the up projections are not computed yet."""
        *v_gate, w, a, g = self.out.unbind()
        low = self if pending else None
        return CudaProjections(r=r, k=k, v=v, w=w, a=a, g=g, v_gate=v_gate[0] if v_gate else None, low=low)

    def up_args_for_wkv(self, layer: CudaLayer) -> LowRankUpArgs | None:
        """Returns the up projections as arguments of wkv_few; None if that kernel does not take them."""
        (groups, tokens, rank), gate_rank = self.low.shape, self.gate.shape[1]
        waiting = [max(0, size // UP_TILE_INPUTS - 2) for size in (*[rank] * groups, gate_rank)]
        is_small = (
            4 * (groups * rank + gate_rank) <= MAX_UP_TILES * UP_TILE_INPUTS and 4 * sum(waiting) <= MAX_WAITING_TILES
        )
        if tokens > MAX_FUSED_WKV_ROWS or not is_small:
            return None
        return LowRankUpArgs(
            hidden=cuda_pointer(self.low),
            gate_hidden=cuda_pointer(self.gate),
            up_weight=cuda_pointer(layer.low_out),
            gate_up_weight=cuda_pointer(layer.gate_out),
            groups=groups,
            rank=rank,
            gate_rank=gate_rank,
            in_order=self.is_in_order,
        )


@dataclass(slots=True)
class CudaProjections(Projections):
    """A layer's projections. The second low-rank products (D -> C) may be pending: w, a, g, v_gate."""

    low: LowRanks | None = None
    """the results of the first products (C -> D), until the second are computed"""

    def finish(self) -> None:
        """Computes the pending products."""
        if self.low is not None:
            self.low.multiply_up()
            self.low = None
