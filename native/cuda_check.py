"""Compiles every .cu of a source tree for given architectures, without a GPU: shows that all of them still build."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from native import machine
from native.build import CUDA_FLAGS, INCLUDES

CHECKED_ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120")


@dataclass(frozen=True)
class Compiled:
    """What became of one source for one architecture."""

    source: Path
    arch: str
    ok: bool
    output: str
    """What nvcc and ptxas said: registers, shared memory and spills of each kernel, or the errors."""


def cuda_sources(root: Path) -> list[Path]:
    """Every .cu under `root` that is part of the tree: not in a hidden folder, not in build/."""
    inside = ((path, path.relative_to(root).parts) for path in root.rglob("*.cu"))
    found = (path for path, parts in inside if parts[0] != "build" and not any(part.startswith(".") for part in parts))
    return sorted(found)


def why_not() -> str | None:
    """Why nothing can be compiled here; None if it can."""
    return None if machine.nvcc() else "no nvcc on this machine"


def compile_all(root: Path, archs: Iterable[str] = CHECKED_ARCHS) -> list[Compiled]:
    """Compile each CUDA source for each architecture, as many at once as there are cores. RuntimeError without nvcc."""
    reason = why_not()
    if reason:
        raise RuntimeError(reason)
    jobs = [(source, arch) for source in cuda_sources(root) for arch in archs]
    with ThreadPoolExecutor(machine.cores()) as pool:
        return list(pool.map(lambda job: compile_one(*job), jobs))


def compile_one(source: Path, arch: str) -> Compiled:
    """Compile one source to a cubin that is thrown away; an architecture with an "a" allows its own instructions."""
    number = arch.removeprefix("sm_")
    with tempfile.TemporaryDirectory() as folder:
        command = [machine.nvcc() or "nvcc", *CUDA_FLAGS, *INCLUDES, "-Xptxas", "-v", "-cubin"]
        command += [f"-gencode=arch=compute_{number},code={arch}", str(source), "-o", f"{folder}/out.cubin"]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    return Compiled(source, arch, done.returncode == 0, done.stdout + done.stderr)
