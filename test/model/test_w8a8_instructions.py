"""CPU products have the same bits with older CPUs' instructions, and in any batch."""

from __future__ import annotations

import pytest
import torch

from rwkv_batch.kernels.cpu import linear as cpu_linear
from test.model.older_instructions import INSTRUCTIONS
from test.model.test_model import needs_compiler
from test.model.test_w8a8_cpu import check_bits

pytestmark = [
    pytest.mark.slow,
    needs_compiler,
]


@pytest.mark.parametrize("instructions", INSTRUCTIONS, indirect=True)
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("unsigned", [False, True])
def test_bits_are_the_same_with_other_instructions(instructions: str, unsigned: bool, bits: int) -> None:
    check_bits(unsigned, bits)


@pytest.mark.parametrize("instructions", INSTRUCTIONS, indirect=True)
@pytest.mark.parametrize("inputs", [133, 768])
def test_a_row_of_a_bf16_product_has_the_same_bits_in_any_batch(instructions: str, inputs: int) -> None:
    """Many rows take another path than few."""
    generator = torch.Generator().manual_seed(inputs)
    weight = torch.randn(70, inputs, generator=generator).bfloat16().float()
    x = torch.randn(150, inputs, generator=generator)
    linear = cpu_linear.CpuLinear(weight)
    together = linear(x)
    torch.testing.assert_close(together, x @ weight.T, rtol=1e-4, atol=1e-4)
    for first in (0, 60, 140):
        assert torch.equal(linear(x[first : first + 10]), together[first : first + 10])
