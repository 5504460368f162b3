"""ffn.value by the rows whose input is not zero, against plain torch.

The CPU runs the kernel thread by thread.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from rwkv_batch.kernels.cuda.channel_mix import SPARSE_FEW_SPLITS
from rwkv_batch.kernels.cuda.packed_weights import NUMBERS, Packed, pack
from rwkv_batch.model.quant.formats import WEIGHT_ONLY, Format, dequantise, quantise
from test.model.emulated.library import call, emulation_of, error, needs_headers

pytestmark = [pytest.mark.slow, needs_headers]
WIDTH, FFN = 64, 2304
FFN_OF_ONE_ROW = 8320
"""Three times as many rows of a warp as it looks at at once"""


library = emulation_of("sparse_value_quant")
"""The kernel of several rows on the CPU."""


few_library = emulation_of("sparse_few_quant")
"""The kernel of 2 to 8 rows on the CPU."""


of_one_row = emulation_of("sparse_row_quant")
"""That of one row."""


def hidden_of(rows: int, share: float, ffn: int = FFN) -> Tensor:
    """[rows, ffn] fp16, so many of which are not zero; a group without any, one without a zero."""
    hidden = torch.rand(rows, ffn).half() * (torch.rand(rows, ffn) < share)
    hidden[:, 256:384] = 0
    hidden[0, 1024:1152] = 1
    return hidden


def of_format(format_: Format, ffn: int = FFN) -> tuple[Packed, Tensor]:
    """A matrix as the kernels read it, and what it stands for."""
    stored = quantise(torch.randn(WIDTH, ffn) / ffn**0.5, format_)
    return pack(stored, transposed=True), dequantise(stored)


@pytest.mark.parametrize(("rows", "share"), [(2, 0.12), (3, 1.0)])
@pytest.mark.parametrize("format_", WEIGHT_ONLY)
def test_products(library: ctypes.CDLL, format_: Format, rows: int, share: float) -> None:
    hidden, y = hidden_of(rows, share), torch.full((rows, WIDTH), torch.nan).half()
    packed, meaning = of_format(format_)
    places = hidden.data_ptr(), packed.qweight.data_ptr(), packed.scales.data_ptr(), y.data_ptr()
    call(library, "rwkv_sparse_value_quant", *places, NUMBERS[format_], rows, WIDTH, FFN)
    reference = hidden.float() @ meaning.T
    assert error(y, reference) < 1e-3


@pytest.mark.parametrize(("width", "ffn"), [(128, FFN), (256, 1024)])
def test_few_rows(few_library: ctypes.CDLL, width: int, ffn: int) -> None:
    """Also for the demo model, which has few inputs. They are fewer than the four blocks of a column could share."""
    rows = 5
    hidden, weight = hidden_of(rows, 0.3, max(ffn, FFN))[:, :ffn].contiguous(), torch.randn(width, ffn) / ffn**0.5
    shares = torch.full((SPARSE_FEW_SPLITS + 1, rows, width), torch.nan)
    stored = quantise(weight, Format.FP8)
    packed, meaning = pack(stored, transposed=True), dequantise(stored)
    places = hidden.data_ptr(), packed.qweight.data_ptr(), packed.scales.data_ptr(), shares.data_ptr()
    call(few_library, "rwkv_sparse_few_quant", *places, NUMBERS[Format.FP8], rows, width, ffn)
    reference = hidden.float() @ meaning.T
    assert error(shares[:-1].sum(0), reference) < 1e-3
    assert shares[-1].isnan().all()


@pytest.mark.parametrize("share", [0.0, 0.12, 0.5, 1.0])
@pytest.mark.parametrize("format_", WEIGHT_ONLY)
def test_one_row(of_one_row: ctypes.CDLL, format_: Format, share: float) -> None:
    """Fewer active rows than a warp has places for. Also some more, and many more."""
    hidden, y = hidden_of(1, share, FFN_OF_ONE_ROW), torch.full((1, WIDTH), torch.nan).half()
    packed, meaning = of_format(format_, FFN_OF_ONE_ROW)
    places = hidden.data_ptr(), packed.qweight.data_ptr(), packed.scales.data_ptr(), y.data_ptr()
    call(of_one_row, "rwkv_sparse_row_quant", *places, NUMBERS[format_], WIDTH, FFN_OF_ONE_ROW)
    reference = hidden.float() @ meaning.T
    assert error(y, reference) < 1e-3


@pytest.mark.parametrize("format_", WEIGHT_ONLY)
def test_a_row_without_numbers_stays_so(
    library: ctypes.CDLL, of_one_row: ctypes.CDLL, few_library: ctypes.CDLL, format_: Format
) -> None:
    """And the others have theirs."""
    hidden = hidden_of(3, 0.3)
    hidden[1, 70] = torch.nan
    packed, _ = of_format(format_)
    found = torch.zeros(3, WIDTH).half()
    places = hidden.data_ptr(), packed.qweight.data_ptr(), packed.scales.data_ptr(), found.data_ptr()
    call(library, "rwkv_sparse_value_quant", *places, NUMBERS[format_], 3, WIDTH, FFN)
    assert found.isnan().all(1).tolist() == [False, True, False] and found[::2].isfinite().all()
    if format_ is not Format.INT4:
        shares = torch.zeros(SPARSE_FEW_SPLITS, 3, 128)
        stored = pack(quantise(torch.randn(128, FFN), format_), transposed=True)
        places = hidden.data_ptr(), stored.qweight.data_ptr(), stored.scales.data_ptr(), shares.data_ptr()
        call(few_library, "rwkv_sparse_few_quant", *places, NUMBERS[format_], 3, 128, FFN)
        assert shares.sum(0).isnan().all(1).tolist() == [False, True, False]
    alone, y = torch.rand(1, FFN_OF_ONE_ROW).half(), torch.zeros(1, WIDTH).half()
    alone[0, 70] = torch.nan
    packed, _ = of_format(format_, FFN_OF_ONE_ROW)
    places = alone.data_ptr(), packed.qweight.data_ptr(), packed.scales.data_ptr(), y.data_ptr()
    call(of_one_row, "rwkv_sparse_row_quant", *places, NUMBERS[format_], WIDTH, FFN_OF_ONE_ROW)
    assert y.isnan().all()
