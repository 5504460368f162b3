"""Products of small weights on a GPU against what the codes stand for, on poisoned memory; a model beside fp16."""

from __future__ import annotations

import pytest
import torch

from bench.gpu_check import GPU, kernel_errors, limit_of, model_errors
from bench.gpu_model import VOCAB, random_stage
from rwkv_batch.model.quant.formats import Format

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("format_", Format)
def test_kernels_compute_what_the_codes_stand_for(format_: Format) -> None:
    errors = kernel_errors(format_)
    assert {name: error for name, error in errors.items() if not error <= limit_of(name)} == {}


@pytest.mark.parametrize("format_", Format)
def test_a_model_stays_near_the_same_in_fp16(format_: Format) -> None:
    small, whole = (random_stage("0.1b", GPU, torch.float32, dtype=dtype) for dtype in (format_, "fp16"))
    for rows in (1, 8, 15, 16, 64, 320):
        found = model_errors(small, whole, rows, VOCAB)
        assert found["relative_error"] < {Format.FP8: 0.15, Format.INT8: 0.05, Format.INT4: 0.4}[format_], found
