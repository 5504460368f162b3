"""W8A8 CPU products have the same bits with older CPUs' instructions."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator

import pytest

from native import build, machine
from rwkv_batch.kernels.cpu import library as cpu_library
from rwkv_batch.kernels.cpu import linear as cpu_linear
from test.model.test_w8a8_cpu import check_bits

pytestmark = pytest.mark.skipif(
    cpu_library.library_unavailable_reason() is not None, reason=str(cpu_library.library_unavailable_reason())
)
INSTRUCTIONS = {
    # name: (compiler flags, features of the CPU that the build needs)
    "VNNI without VBMI2": (("-mno-amx-int8", "-mno-avx512vbmi2"), {"avx512_vnni"}),
    "AVX-512 without VNNI": (("-mno-amx-int8", "-mno-avx512vnni"), {"avx512bw"}),
    "AVX2": (("-mno-amx-int8", "-mno-avx512f", "-mno-avxvnni"), {"avx2"}),
    "AVX2 with VNNI": (("-mno-amx-int8", "-mno-avx512f"), {"avx_vnni"}),
    "SSE2": (("-mno-amx-int8", "-mno-avx"), set()),
}


@pytest.fixture
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Build the kernels for an older CPU. The matrices then use them."""
    flags, needed = INSTRUCTIONS[request.param]
    if not needed <= set(machine.cpu_features().split()):
        pytest.skip(f"this CPU has no {', '.join(sorted(needed))}")
    library = dataclasses.replace(cpu_library.LIBRARY, flags=(*cpu_library.LIBRARY.flags, *flags))
    older = cpu_library.declare(ctypes.CDLL(str(build.build(library))))
    monkeypatch.setattr(cpu_linear, "library", lambda: older)
    yield request.param


@pytest.mark.parametrize("instructions", INSTRUCTIONS, indirect=True)
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("unsigned", [False, True])
def test_bits_are_the_same_with_other_instructions(instructions: str, unsigned: bool, bits: int) -> None:
    check_bits(unsigned, bits)
