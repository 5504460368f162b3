"""Linear maps of 8- and 4-bit weights on the GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from rwkv_batch.kernels.cuda.hopper_gemm import has_hopper_gemm
from rwkv_batch.kernels.cuda.library import fp32_result
from rwkv_batch.kernels.cuda.packed_weights import check_shape, has_fp8_gemm, pack
from rwkv_batch.kernels.cuda.quantised_gemm import multiply_into, multiply_rows
from rwkv_batch.kernels.cuda.quantised_rows import QuantisedRows, QuantisedWeights
from rwkv_batch.kernels.cuda.skinny_quant import QuantGemm
from rwkv_batch.kernels.cuda.w8a8.linear import CudaW8A8Linear, CudaW8A16Linear
from rwkv_batch.model.layer import Linear
from rwkv_batch.model.quant.formats import Format, Quantised, has_squared_inputs


class CudaQuantLinear(QuantisedWeights, Linear):
    """Quantised [out, in] on a GPU, or [in, out] if transposed; fp32 sums."""

    def __init__(self, stored: Quantised, transposed: bool = False) -> None:
        """Raises ValueError for sizes that the kernels do not take."""
        check_shape(stored)
        super().__init__(pack(stored, transposed))
        self.weight = self.packed.qweight
        self.in_features = stored.in_features

    def __call__(self, x: Tensor | QuantisedRows) -> Tensor:
        """Maps [T, in] fp16 or two-part to [T, out] fp16."""
        if isinstance(x, QuantisedRows):
            return multiply_rows(self, x)
        y = torch.empty(len(x), self.packed.outputs, dtype=torch.float16, device=x.device)
        multiply_into([QuantGemm(self, x, y)])
        return y

    def to_fp32(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Maps [T, in] fp16 to [T, out] fp32 in `out`. Raises ValueError if `out` has another shape."""
        out = fp32_result(out, len(x), self.packed.outputs, x.device)
        if x.shape[0]:
            multiply_into([QuantGemm(self, x, out)])
        return out


class CudaQuantValue(CudaQuantLinear):
    """ffn.value, transposed, so that rows with zero input are not read.

    fp8 without Hopper is stored untransposed, too: cuBLAS needs that order.
    """

    def __init__(self, stored: Quantised) -> None:
        """Raises ValueError for sizes that the kernels do not take."""
        super().__init__(stored, transposed=True)
        device = stored.codes.device
        both = has_fp8_gemm(stored.format, device) and not has_hopper_gemm(device)
        self.untransposed = CudaQuantLinear(stored) if both else None

    @property
    def num_bytes(self) -> int:
        """Bytes of weights and scales, of both copies if there are two."""
        return self.packed.num_bytes + (0 if self.untransposed is None else self.untransposed.num_bytes)

    @property
    def needs_transposed(self) -> bool:
        """Whether GEMMs with very many rows need a transposed copy."""
        return self.untransposed is None and has_fp8_gemm(self.format, self.packed.qweight.device)

    @property
    def for_quantised_rows(self) -> CudaQuantLinear:
        """The weight for quantised rows."""
        return self.untransposed or self

    def __call__(self, x: Tensor | QuantisedRows) -> Tensor:
        """Maps [T, in] fp16 to [T, out] fp16, no row skipped."""
        if self.untransposed is None or isinstance(x, QuantisedRows):
            return super().__call__(x)
        return self.untransposed(x)


def make_quantised(name: str, stored: Quantised) -> Linear:
    """Returns the linear layer of the weight file's tensor `name`. Raises ValueError for unsupported sizes."""
    if stored.format is Format.W8A8:
        kind = CudaW8A8Linear if stored.activation_bits == 8 else CudaW8A16Linear
        return kind(stored, squares_inputs=has_squared_inputs(name))
    if name.endswith("ffn.value.weight"):
        return CudaQuantValue(stored)
    return CudaQuantLinear(stored)
