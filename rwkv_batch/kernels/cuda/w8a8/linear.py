"""Linear maps of int8 weights on a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from rwkv_batch.kernels.cuda.library import fp32_result
from rwkv_batch.kernels.cuda.w8a8.products import (
    Cleared,
    ExactSums,
    W8A8Gemm,
    W8A8Mix,
    W8A8Weights,
    fits_sparse,
    multiply,
    multiply_sparse,
    multiply_sparse_row,
    prepare_w8a8,
    quantise_inputs,
    quantise_mixed,
)
from rwkv_batch.kernels.cuda.w8a8.row import RowGemm, fits_row, multiply_row
from rwkv_batch.model.layer import Linear
from rwkv_batch.model.quant.formats import Quantised
from rwkv_batch.model.quant.w8a8 import Codes


class CudaInt8Linear(Linear):
    """Int8 weights [out, in] times inputs in 8 or 16 bits; exact sums, results in fp16."""

    bits = 8
    """of an input"""

    def __init__(self, stored: Quantised, squares_inputs: bool = False) -> None:
        """squares_inputs: the map takes x and multiplies max(x, 0)^2.

        Raises ValueError for sizes that the kernels do not take.
        """
        assert stored.transform is not None, "int8 has a transform of its inputs"
        self.weights = W8A8Weights.prepare(stored.in_segments(), stored.transform)
        self.weight = self.weights.codes
        self.squares_inputs = squares_inputs
        self.output_positions: Tensor | None = None
        self.takes_one_row = self.bits == 8 and not squares_inputs and fits_row(self.weights)
        """whether a launch rounds one input itself"""
        prepare_w8a8(self.weight.device)

    @property
    def num_bytes(self) -> int:
        """Bytes of codes, scales and the inputs' transform."""
        return self.weights.num_bytes

    def feed(self, consumer: CudaInt8Linear) -> None:
        """Store the outputs in the order of another map's codes. Called once, at load."""
        order = consumer.weights.order.long()
        parts = {name: getattr(self.weights, name)[order] for name in ("codes", "scales", "ratios")}
        self.weights = dataclasses.replace(self.weights, **parts)
        self.weight = self.weights.codes
        self.output_positions = order.argsort()

    def __call__(self, x: Tensor) -> Tensor:
        """Maps [T, in] fp16 to [T, out] fp16."""
        y = self.to_stored(x)
        return y if self.output_positions is None else y.index_select(1, self.output_positions)

    def quantise(self, x: Tensor, in_order: bool = False) -> Codes:
        """Quantise inputs [T, in] fp16. in_order: they are in the order of the codes."""
        return quantise_inputs(x, self.weights, self.squares_inputs, in_order, self.bits)

    def multiply_stored(self, x: Tensor) -> Tensor:
        """Map [T, in] fp16 to [T, out] fp16. The input comes from a map that feeds this one."""
        return self.multiply_codes(self.quantise(x, in_order=True))

    def to_stored(self, x: Tensor | Codes) -> Tensor:
        """Map [T, in] fp16 or quantised to [T, out] fp16, in the stored order of outputs."""
        if isinstance(x, Codes):
            return self.multiply_codes(x)
        if len(x) > 1 or not self.takes_one_row:
            return self.multiply_codes(self.quantise(x))
        y = x.new_empty(1, len(self.weight))
        multiply_row([RowGemm(self.weights, x, y)])
        return y

    def multiply_codes(self, codes: Codes, y: Tensor | None = None) -> Tensor:
        """Map quantised [T, in] to [T, out] fp16, or to fp16 values in y [T, out].

        The outputs are in the stored order.
        """
        rows = len(codes.codes) * 8 // self.bits
        if y is None:
            y = torch.empty(rows, len(self.weight), dtype=torch.float16, device=self.weight.device)
        if rows:
            multiply([W8A8Gemm(codes, self.weights, y)], bits=self.bits)
        return y

    def to_fp32(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Maps [T, in] fp16 to [T, out] fp32 in `out`.

        The results are rounded to fp16. Raises ValueError if `out` has another shape.
        """
        assert self.output_positions is None, "only ffn.key feeds another map"
        out = fp32_result(out, len(x), len(self.weight), x.device)
        if len(x) == 1 and self.takes_one_row:
            multiply_row([RowGemm(self.weights, x, out)])
            return out
        return self.multiply_codes(self.quantise(x), out)


class CudaW8A8Linear(CudaInt8Linear):
    """Inputs in 8 bits. Few rows skip inputs that are zero in all of them."""

    def __init__(self, stored: Quantised, squares_inputs: bool = False) -> None:
        """As `CudaInt8Linear`."""
        super().__init__(stored, squares_inputs)
        is_sparse = squares_inputs and fits_sparse(len(self.weight), self.weight.device)
        self.transposed = self.weight.T.contiguous() if is_sparse else None

    @property
    def num_bytes(self) -> int:
        """Also counts the transposed codes if there are some."""
        return super().num_bytes + (0 if self.transposed is None else self.transposed.nbytes)

    def multiply_stored(self, x: Tensor) -> Tensor:
        """Map [T, in] fp16 to [T, out] fp16, as `CudaInt8Linear`."""
        if self.transposed is not None and len(x) == 1:
            return multiply_sparse_row(x, self.weights, self.transposed)
        return super().multiply_stored(x)

    def multiply_fed(self, key: CudaInt8Linear, x: Codes, cleared: Cleared) -> ExactSums:
        """Map quantised [T, in of key] by `key`, which feeds this map, and by this one."""
        hidden = torch.empty(len(x.codes), len(key.weight), dtype=torch.float16, device=key.weight.device)
        multiply([W8A8Gemm(x, key.weights, hidden)], fed=self.weights, largest=cleared.largest)
        assert self.transposed is not None, "cleared sums are for widths that multiply_sparse takes"
        return multiply_sparse(hidden, self.weights, self.transposed, cleared)


class CudaW8A16Linear(CudaInt8Linear):
    """Inputs in 16 bits, as two rows of bytes each: twice the products."""

    bits = 16


def multiply_mixed(linears: Sequence[CudaInt8Linear], x: Tensor | W8A8Mix, y: Tensor) -> None:
    """Run up to 3 maps over inputs of their own: x [M, T, in] fp16 or in 8 bits -> y [M, T, out] fp16."""
    multiply(mixed_gemms(linears, x, y), bits=linears[0].bits)


def mixed_gemms(linears: Sequence[CudaInt8Linear], x: Tensor | W8A8Mix, y: Tensor) -> list[W8A8Gemm]:
    """Return the GEMMs of `multiply_mixed`, x [M, T, in]; quantises x if it is in fp16."""
    weights = [linear.weights for linear in linears]
    count, bits = len(linears), linears[0].bits
    codes = [x[i] for i in range(count)] if isinstance(x, W8A8Mix) else quantise_mixed(x[:count], weights, bits=bits)
    return [W8A8Gemm(*gemm) for gemm in zip(codes, weights, y, strict=True)]
