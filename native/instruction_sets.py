"""The instruction sets for which a release compiles libraries, and those that this CPU has."""

from __future__ import annotations

from dataclasses import dataclass

from native import machine

_AVX2 = frozenset("avx2 bmi1 bmi2 f16c fma abm movbe".split())
_AVX512 = _AVX2 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split())
_VNNI = _AVX512 | {"avx512_vnni"}
_VBMI2 = _VNNI | {"avx512_vbmi2"}


@dataclass(frozen=True)
class InstructionSet:
    """What the compiler may use, and what a CPU must have."""

    name: str
    """in names of files"""
    flags: tuple[str, ...]
    """of GCC"""
    features: frozenset[str] = frozenset()
    """in the words of /proc/cpuinfo"""


INSTRUCTION_SETS = {
    "x86_64": (
        InstructionSet(
            "amx",
            ("-march=x86-64-v4", "-mavx512vnni", "-mavx512vbmi2", "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
            _VBMI2 | {"amx_tile", "amx_int8", "amx_bf16"},
        ),
        InstructionSet("vbmi2", ("-march=x86-64-v4", "-mavx512vnni", "-mavx512vbmi2"), _VBMI2),
        InstructionSet("vnni", ("-march=x86-64-v4", "-mavx512vnni"), _VNNI),
        InstructionSet("avx512", ("-march=x86-64-v4",), _AVX512),
        InstructionSet("avxvnni", ("-march=x86-64-v3", "-mavxvnni"), _AVX2 | {"avx_vnni"}),
        InstructionSet("avx2", ("-march=x86-64-v3",), _AVX2),
    ),
    "aarch64": (InstructionSet("neon", ("-march=armv8-a",), frozenset({"asimd"})),),
}
"""By processor, fastest first."""


def supported(processor: str) -> list[InstructionSet]:
    """Returns the instruction sets of a processor that this CPU has, fastest first."""
    features = set(machine.cpu_features().split())
    return [one for one in INSTRUCTION_SETS.get(processor, ()) if one.features <= features]
