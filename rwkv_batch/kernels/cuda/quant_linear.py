"""Linear maps of 8- and 4-bit weights on the GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from rwkv_batch.kernels.cuda.coded_weights import CodedWeights
from rwkv_batch.kernels.cuda.cublas_fp8 import is_multiplied_by_codes
from rwkv_batch.kernels.cuda.few_rows import QuantMap
from rwkv_batch.kernels.cuda.packed_codes import check_shape, pack
from rwkv_batch.kernels.cuda.products import multiply_into, multiply_rows
from rwkv_batch.kernels.cuda.row_codes import RowCodes
from rwkv_batch.kernels.cuda.wide import has_wide
from rwkv_batch.kernels.cuda.wide_int8 import BYTES_GROUP
from rwkv_batch.model.layer import HEAD_SIZE
from rwkv_batch.model.linear import Linear
from rwkv_batch.model.quant.formats import Quantised


class CudaQuantLinear(CodedWeights, Linear):
    """Codes [out, in] on a GPU, or [in, out] if transposed, fp32 sums."""

    def __init__(self, stored: Quantised, group: int = BYTES_GROUP, transposed: bool = False) -> None:
        """group: inputs that share a scale where they are bytes.

        Raises ValueError for sizes that the kernels do not take.
        """
        check_shape(stored)
        super().__init__(pack(stored, transposed), group)
        self.weight = self.packed.codes
        self.in_features = stored.in_features

    def __call__(self, x: Tensor | RowCodes) -> Tensor:
        """[T, in] fp16, or in two parts, -> [T, out] fp16."""
        if isinstance(x, RowCodes):
            return multiply_rows(self, x)
        y = torch.empty(len(x), self.packed.outputs, dtype=torch.float16, device=x.device)
        multiply_into([QuantMap(self, x, y)])
        return y

    def to_fp32(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[T, in] fp16 -> [T, out] fp32; into `out` if that is given. Raises ValueError if it does not fit."""
        shape = x.shape[0], self.packed.outputs
        if out is None:
            out = torch.empty(shape, dtype=torch.float32, device=x.device)
        elif out.shape != shape:
            raise ValueError(f"the result is {shape}, the place for it {tuple(out.shape)}")
        if x.shape[0]:
            multiply_into([QuantMap(self, x, out)])
        return out


class CudaQuantValue(CudaQuantLinear):
    """ffn.value: transposed, so that rows whose input is zero need not be read.

    As stored as well where every product of rows in codes would have to turn it: of fp8 where there is no Hopper.
    """

    def __init__(self, stored: Quantised) -> None:
        """Raises ValueError for sizes that the kernels do not take."""
        super().__init__(stored, transposed=True)
        device = stored.codes.device
        both = is_multiplied_by_codes(stored.format, device) and not has_wide(device)
        self.as_stored = CudaQuantLinear(stored) if both else None

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and scales, of both where there are two."""
        return self.packed.num_bytes + (0 if self.as_stored is None else self.as_stored.num_bytes)

    @property
    def is_turned(self) -> bool:
        """Whether products of very many rows want it in the other order."""
        return self.as_stored is None and is_multiplied_by_codes(self.format, self.packed.codes.device)

    @property
    def of_codes(self) -> CudaQuantLinear:
        """What rows in codes are multiplied by."""
        return self.as_stored or self

    def __call__(self, x: Tensor | RowCodes) -> Tensor:
        """[T, in] fp16 -> [T, out] fp16, nothing skipped."""
        if self.as_stored is None or isinstance(x, RowCodes):
            return super().__call__(x)
        return self.as_stored(x)


def make_quantised(name: str, stored: Quantised) -> Linear:
    """The map of the weight file's tensor of that name."""
    if name.endswith("ffn.value.weight"):
        return CudaQuantValue(stored)
    return CudaQuantLinear(stored, HEAD_SIZE if name.endswith("att.output.weight") else BYTES_GROUP)
