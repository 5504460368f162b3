"""The CPU kernels compiled for older CPUs than this one."""

from __future__ import annotations

import ctypes
import dataclasses
import platform
from collections.abc import Iterator

import pytest

from native import build, machine
from native.instruction_sets import INSTRUCTION_SETS, InstructionSet, supported
from rwkv_batch.kernels.cpu import library as cpu_library
from rwkv_batch.kernels.cpu import linear as cpu_linear
from rwkv_batch.kernels.cpu import ops as cpu_ops
from test.conftest import IS_LONG

TESTED = ("avxvnni", "vnni", "avx512", "avx2") if IS_LONG else ("avx512", "avx2")
"""Newer CPUs have the others of a wheel in all tests. The best one of this CPU is what all other tests use."""
INSTRUCTIONS = {one.name: one for one in INSTRUCTION_SETS["x86_64"] if one.name in TESTED}
for best in supported(platform.machine())[:1]:
    INSTRUCTIONS.pop(best.name, None)
INSTRUCTIONS["sse2"] = InstructionSet("sse2", ("-march=x86-64",))


def flags_of(instructions: str) -> tuple[str, ...]:
    """Return the compiler's flags for a name in INSTRUCTIONS. Skips the test if this CPU cannot run them."""
    older_set = INSTRUCTIONS[instructions]
    if platform.machine() != "x86_64" or not older_set.features <= set(machine.cpu_features().split()):
        pytest.skip(f"this CPU has no {', '.join(sorted(older_set.features))}")
    return older_set.flags


@pytest.fixture
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Build the kernels for an older CPU. Matrices and layers then use them."""
    flags = (*cpu_library.LIBRARY.flags, *flags_of(request.param), "-O1")  # compiles faster than -O3
    library = dataclasses.replace(cpu_library.LIBRARY, flags=flags)
    older = cpu_library.declare(ctypes.CDLL(str(build.build(library))))
    for module in (cpu_linear, cpu_ops):
        monkeypatch.setattr(module, "library", lambda: older)
    yield request.param
