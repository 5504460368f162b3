"""Compiles every .cu of a source tree for given architectures, without a GPU: shows that all of them still build."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from native import machine
from native.build import CUDA_FLAGS, INCLUDES, SHARED_HEADERS
from native.cores import cores

CHECKED_ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
FLAGS = tuple(flag for flag in CUDA_FLAGS if flag != "-lineinfo")
"""Which line an instruction is of takes a tenth of the time, and changes none."""
VIRTUAL_ARCHS = (80, 100)
"""Virtual architectures that every source is read for: between them the compiler's first half makes the same of all
that no source asks to be told apart."""
ARCH_SPECIFIC_MACRO = "__CUDA_ARCH_FEAT_"
"""What a source asks about that uses one architecture's own instructions: it is built for sm_90a and nothing else."""


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


def unavailable_reason() -> str | None:
    """Why nothing can be compiled here; None if it can."""
    return None if machine.nvcc() else "no nvcc on this machine"


def compile_source(source: Path, archs: Iterable[str] = CHECKED_ARCHS) -> dict[str, Compiled]:
    """One source for each architecture, as many at once as there are cores."""
    with ThreadPoolExecutor(cores()) as pool:
        return results_of(begin(source, archs, pool))


def begin(source: Path, archs: Iterable[str], pool: ThreadPoolExecutor) -> list[Future[list[Compiled]]]:
    """Have a pool run nvcc for one source, once for what it is read for; what comes of it is for `results_of`."""
    jobs: dict[str, list[str]] = {}
    for arch in archs:
        jobs.setdefault(virtual_arch(arch, source), []).append(arch)
    return [pool.submit(_run, source, *job) for job in jobs.items()]


def results_of(runs: Iterable[Future[list[Compiled]]]) -> dict[str, Compiled]:
    """What became of a source by architecture; waits for that."""
    return {result.arch: result for run in runs for result in run.result()}


def is_arch_specific(source: Path) -> bool:
    """Whether a source, or a header of it, uses one architecture's own instructions."""
    return ARCH_SPECIFIC_MACRO in _with_headers(source)


def virtual_arch(arch: str, source: Path) -> str:
    """The virtual architecture that a source is read for: the lowest that it, and its headers, cannot tell from `arch`.

    The compiler's first half takes as long as the second, and makes the same of each of them.
    """
    text = _with_headers(source)
    number = arch.removeprefix("sm_")
    if number.endswith("a") and ARCH_SPECIFIC_MACRO in text:
        return number
    asked = {int(condition) // 10 for condition in re.findall(r"__CUDA_ARCH__\W+(\d+)", text)}
    return str(max(n for n in {*VIRTUAL_ARCHS, *asked} if n <= int(number.removesuffix("a"))))


def _run(source: Path, front_end: str, archs: list[str]) -> list[Compiled]:
    """One run of nvcc; what it makes is thrown away."""
    with tempfile.TemporaryDirectory() as folder:
        command = [machine.nvcc() or "nvcc", *FLAGS, *INCLUDES, "-Xptxas", "-v", "-fatbin"]
        command += [f"-gencode=arch=compute_{front_end},code=[{','.join(archs)}]", str(source), "-o", f"{folder}/out"]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=900)
    output = done.stdout + done.stderr
    if done.returncode:
        return [Compiled(source, arch, False, output) for arch in archs]
    return [Compiled(source, arch, True, text) for arch, text in _by_arch(output, archs).items()]


def _by_arch(output: str, archs: list[str]) -> dict[str, str]:
    """What ptxas said, for each architecture: it names one with every kernel."""
    output_by_arch = dict.fromkeys(archs, "")
    arch = archs[0]
    for line in output.splitlines(keepends=True):
        named = re.search(r"for '(sm_\w+)'", line)
        arch = named.group(1) if named else arch
        output_by_arch[arch] += line
    return output_by_arch


def _with_headers(source: Path) -> str:
    """The text of a source and of all of our headers that it includes."""
    text = source.read_text()
    names = re.findall(r'^#include "(.+)"', text, re.MULTILINE)
    headers = [folder / name for name in names for folder in (source.parent, SHARED_HEADERS)]
    return text + "".join(_with_headers(header) for header in headers if header.exists())
