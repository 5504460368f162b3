"""Products and layers of quantised weights on a GPU. Compares them with the dequantised weights."""

from __future__ import annotations

import pytest
import torch

from rwkv_batch.model.quant.formats import WEIGHT_ONLY, Format
from test.gpu.quant_errors import kernel_errors, layer_errors, limit_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("format_", WEIGHT_ONLY)
def test_kernels_equal_the_dequantised_product(format_: Format) -> None:
    errors = kernel_errors(format_)
    assert {name: error for name, error in errors.items() if not error <= limit_of(name)} == {}


@pytest.mark.parametrize("format_", WEIGHT_ONLY)
def test_half_layers_equal_the_dequantised_ones(format_: Format) -> None:
    errors = layer_errors(format_, "0.1b")
    assert {name: error for name, error in errors.items() if not error <= limit_of(f"{format_} {name}")} == {}
