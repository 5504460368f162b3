"""Compiles every .cu of a source tree for given architectures. Needs no GPU."""

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
from native.priority import cores

CHECKED_ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
FLAGS = tuple(flag for flag in CUDA_FLAGS if flag != "-lineinfo")
"""Without line information, which takes a tenth of the compile time and changes no instruction."""
VIRTUAL_ARCHS = (80, 100)
"""Virtual architectures that every source is compiled for.

The front end gives the same result for all architectures between two of these, unless a source tests for one.
"""
ARCH_SPECIFIC_MACRO = "__CUDA_ARCH_FEAT_"
"""Tested by sources with instructions of a single architecture; these are built for sm_90a only."""


@dataclass(frozen=True)
class Compiled:
    """Result of compiling one source for one architecture."""

    source: Path
    arch: str
    ok: bool
    output: str
    """Output of nvcc and ptxas: registers, shared memory and spills of each kernel, or the errors."""


def cuda_sources(root: Path) -> list[Path]:
    """Return every .cu below `root`, without hidden folders and build/."""
    inside = ((path, path.relative_to(root).parts) for path in root.rglob("*.cu"))
    found = (path for path, parts in inside if parts[0] != "build" and not any(part.startswith(".") for part in parts))
    return sorted(found)


def unavailable_reason() -> str | None:
    """Return why nothing can be compiled here; None if it can."""
    return None if machine.nvcc() else "no nvcc on this machine"


def compile_source(source: Path, archs: Iterable[str] = CHECKED_ARCHS) -> dict[str, Compiled]:
    with ThreadPoolExecutor(cores()) as pool:
        return results_of(begin(source, archs, pool))


def begin(source: Path, archs: Iterable[str], pool: ThreadPoolExecutor) -> list[Future[list[Compiled]]]:
    """Submit one source to a pool, one nvcc run per virtual architecture; `results_of` collects the results."""
    jobs: dict[str, list[str]] = {}
    for arch in archs:
        jobs.setdefault(virtual_arch(arch, source), []).append(arch)
    return [pool.submit(_run, source, *job) for job in jobs.items()]


def results_of(runs: Iterable[Future[list[Compiled]]]) -> dict[str, Compiled]:
    """Wait for the runs and return the results by architecture."""
    return {result.arch: result for run in runs for result in run.result()}


def is_arch_specific(source: Path) -> bool:
    """Whether a source or its headers use instructions of a single architecture."""
    return ARCH_SPECIFIC_MACRO in with_headers(source)


def virtual_arch(arch: str, source: Path) -> str:
    """Return the lowest virtual architecture that is equivalent to `arch`.

    The source and its headers do not distinguish these architectures. The front end takes as long as the back end, and
    gives the same result for all of them.
    """
    text = with_headers(source)
    number = arch.removeprefix("sm_")
    if number.endswith("a") and ARCH_SPECIFIC_MACRO in text:
        return number
    asked = {int(condition) // 10 for condition in re.findall(r"__CUDA_ARCH__\W+(\d+)", text)}
    return str(max(n for n in {*VIRTUAL_ARCHS, *asked} if n <= int(number.removesuffix("a"))))


def _run(source: Path, front_end: str, archs: list[str]) -> list[Compiled]:
    """Run nvcc once and discard the binary."""
    with tempfile.TemporaryDirectory() as folder:
        command = [machine.nvcc() or "nvcc", *FLAGS, *INCLUDES, "-Xptxas", "-v", "-fatbin"]
        command += [f"-gencode=arch=compute_{front_end},code=[{','.join(archs)}]", str(source), "-o", f"{folder}/out"]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=900)
    output = done.stdout + done.stderr
    if done.returncode:
        return [Compiled(source, arch, False, output) for arch in archs]
    return [Compiled(source, arch, True, text) for arch, text in _by_arch(output, archs).items()]


def _by_arch(output: str, archs: list[str]) -> dict[str, str]:
    """Split the ptxas output by architecture, which it names with every kernel."""
    output_by_arch = dict.fromkeys(archs, "")
    arch = archs[0]
    for line in output.splitlines(keepends=True):
        named = re.search(r"for '(sm_\w+)'", line)
        arch = named.group(1) if named else arch
        output_by_arch[arch] += line
    return output_by_arch


def with_headers(source: Path) -> str:
    """Return the text of a source and of its included headers. Leaves out headers of other projects."""
    text = source.read_text()
    names = re.findall(r'^#include "(.+)"', text, re.MULTILINE)
    headers = [folder / name for name in names for folder in (source.parent, SHARED_HEADERS)]
    return text + "".join(with_headers(header) for header in headers if header.exists())
