"""--deterministic on a GPU: a row's bits depend on its own tokens only."""

from __future__ import annotations

import pytest
import torch

from bench.tools.gpu_model import random_stage
from rwkv_batch.kernels.cuda.hopper_gemm import has_hopper_gemm
from rwkv_batch.model.state import StateFormat
from test.batch_invariance import count_differences

GPU = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not has_hopper_gemm(GPU), reason="needs a GPU of sm_90"),
]
VOCAB = 65536


FORMATS = [("7.2b", form) for form in StateFormat] + [("0.1b", StateFormat.FP16), ("2.9b", StateFormat.FP16)]


@pytest.mark.parametrize("dtype", ["int8", "fp16"])
@pytest.mark.parametrize(("size", "wkv_state"), FORMATS)
def test_steps_give_the_same_bits_under_any_load(size: str, dtype: str, wkv_state: StateFormat) -> None:
    """Steps of up to 600 rows and 2,400 tokens."""
    stage = random_stage(size, GPU, wkv_state, dtype=dtype, layers=2, deterministic=True)
    counted = count_differences(stage, 16, 600, VOCAB)
    assert not counted["differ"], counted
