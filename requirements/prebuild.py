"""Compiles the C++ libraries that a platform's wheel brings. `make release` runs it.

Argument: a folder. Below it, each processor for which a compiler is here gets one with its wheel's tag as name.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from native import build
from native.instruction_sets import INSTRUCTION_SETS, InstructionSet
from rwkv_batch.kernels.cpu.library import LIBRARY as KERNELS
from rwkv_batch.kernels.cpu.training import LIBRARY as TRAINING
from sampling.cpu import LIBRARY as SAMPLER

LIMITS = {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13)}
"""What manylinux_2_34 allows: Debian 12, Ubuntu 22.04, RHEL 9, Amazon Linux 2023 and later."""
TAG = "manylinux_2_34"
SAMPLER_SETS = ("avx512", "avx2", "neon")
"""It has no use for others."""


def main(into: Path) -> int:
    """Compile for all processors that can be compiled for."""
    shutil.rmtree(into, ignore_errors=True)
    for processor, instruction_sets in INSTRUCTION_SETS.items():
        if (cxx := compiler(processor)) is None:
            sys.stderr.write(f"no wheel for {processor}: it needs {processor}-linux-gnu-g++\n")
            continue
        folder = into / f"{TAG}_{processor}"
        folder.mkdir(parents=True)
        for one in instruction_sets:
            compile_library(KERNELS, one, cxx, folder)
            compile_library(TRAINING, one, cxx, folder)
            if one.name in SAMPLER_SETS:
                compile_library(SAMPLER, one, cxx, folder)
    return 0


def compiler(processor: str) -> str | None:
    """Returns the compiler for a processor; None if there is none."""
    return shutil.which("g++" if processor == platform.machine() else f"{processor}-linux-gnu-g++")


def compile_library(library: build.Library, instructions: InstructionSet, cxx: str, folder: Path) -> Path:
    """Compiles one library. Raises RuntimeError if it needs a newer system than LIMITS."""
    target = folder / build.prebuilt_name(library, instructions)
    flags = ["-w", *build.CPP_FLAGS, *library.flags, *instructions.flags, *build.INCLUDES]
    objects = [str(target.with_suffix(f".{number}.o")) for number in range(len(library.sources))]
    for source, made in zip(library.sources, objects, strict=True):
        subprocess.run([cxx, *flags, "-c", str(source), "-o", made], check=True)
    # Without -fopenmp: the loader finds torch's OpenMP library, whose file has another name in each version.
    subprocess.run([cxx, "-shared", "-s", *objects, "-o", str(target)], check=True)
    for made in objects:
        Path(made).unlink()
    for name, version in re.findall(rb"\0(GLIBC|GLIBCXX|CXXABI)_([\d.]+)", target.read_bytes()):
        if tuple(map(int, version.split(b"."))) > LIMITS[name.decode()]:
            raise RuntimeError(f"{target.name} needs {name.decode()}_{version.decode()}, which {TAG} does not have")
    return target


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
