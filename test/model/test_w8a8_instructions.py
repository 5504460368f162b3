"""CPU products have the same bits with older CPUs' instructions, and in any batch."""

from __future__ import annotations

import ctypes
import dataclasses
import platform
from collections.abc import Iterator

import pytest
import torch

from native import build, machine
from native.instruction_sets import INSTRUCTION_SETS, InstructionSet, supported
from rwkv_batch.kernels.cpu import library as cpu_library
from rwkv_batch.kernels.cpu import linear as cpu_linear
from test.conftest import IS_LONG
from test.model.test_w8a8_cpu import check_bits

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        cpu_library.library_unavailable_reason() is not None, reason=str(cpu_library.library_unavailable_reason())
    ),
]
TESTED = ("avxvnni", "vnni", "avx512", "avx2") if IS_LONG else ("avx512", "avx2")
"""Newer CPUs have the others of a wheel in all tests. The best one of this CPU is what all other tests use."""
INSTRUCTIONS = {one.name: one for one in INSTRUCTION_SETS["x86_64"] if one.name in TESTED}
for best in supported(platform.machine())[:1]:
    INSTRUCTIONS.pop(best.name, None)
INSTRUCTIONS["sse2"] = InstructionSet("sse2", ("-march=x86-64",))


@pytest.fixture
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Build the kernels for an older CPU. The matrices then use them."""
    older_set = INSTRUCTIONS[request.param]
    if platform.machine() != "x86_64" or not older_set.features <= set(machine.cpu_features().split()):
        pytest.skip(f"this CPU has no {', '.join(sorted(older_set.features))}")
    flags = (*cpu_library.LIBRARY.flags, *older_set.flags, "-O1")  # compiles faster than -O3
    library = dataclasses.replace(cpu_library.LIBRARY, flags=flags)
    older = cpu_library.declare(ctypes.CDLL(str(build.build(library))))
    monkeypatch.setattr(cpu_linear, "library", lambda: older)
    yield request.param


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
