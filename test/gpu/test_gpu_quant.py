"""Products of small weights on a GPU, and the pieces of layers made of them, against what the codes stand for."""

from __future__ import annotations

import pytest
import torch

from rwkv_batch.model.quant.formats import Format
from test.gpu.quant_errors import kernel_errors, layer_errors, limit_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("format_", Format)
def test_kernels_compute_what_the_codes_stand_for(format_: Format) -> None:
    errors = kernel_errors(format_)
    assert {name: error for name, error in errors.items() if not error <= limit_of(name)} == {}


@pytest.mark.parametrize("format_", Format)
def test_the_pieces_of_a_layer_compute_what_the_codes_stand_for(format_: Format) -> None:
    errors = layer_errors(format_, "0.1b")
    assert {name: error for name, error in errors.items() if not error <= limit_of(f"{format_} {name}")} == {}
