"""Compiles C++ and CUDA sources into a shared library.

The library has a plain C interface, is built by ninja and cached by content. The cache key covers sources, headers,
flags, compiler versions, CPU features and GPU architectures. Processes that start together build once: the others wait
at a file lock. A finished library gets its name in one step, so no reader sees half of one.

A platform's wheel brings C++ libraries in `prebuilt/`, one for each instruction set (requirements/prebuild.py). One of
the same sources that this CPU can run is loaded, and nothing is built.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import re
import shlex
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from tqdm import tqdm

from native import instruction_sets, machine
from native.files import VARIABLE, cache_folder
from native.nvcc import libraries_of

log = logging.getLogger("native")

CPP_FLAGS = ("-std=c++17", "-O3", "-fopenmp", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
NATIVE = "-march=native"
PREBUILT = Path(__file__).with_name("prebuilt")
CUDA_FLAGS = ("-std=c++17", "-O3", "-lineinfo", "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC,-fvisibility=hidden")
SHARED_HEADERS = Path(__file__).with_name("csrc")
"""Headers for all sources."""
INCLUDES = ("-I", str(SHARED_HEADERS))


class BuildError(RuntimeError):
    """A library could not be built. The message holds the compiler's output."""


@dataclass(frozen=True)
class Library:
    """A library to build: its name, its sources (.cpp and .cu), and its options.

    It exports `extern "C" __attribute__((visibility("default")))` functions.
    """

    name: str
    sources: tuple[Path, ...]
    flags: tuple[str, ...] = ()
    """added for every source"""
    arch_specific: bool = False
    """Builds for sm_90a instead of sm_90: code that uses architecture-specific instructions."""

    @property
    def has_cuda(self) -> bool:
        return any(source.suffix == ".cu" for source in self.sources)

    @property
    def has_cpp(self) -> bool:
        return any(source.suffix != ".cu" for source in self.sources)


@functools.cache
def load(library: Library) -> ctypes.CDLL:
    """Returns the library, built if needed. Raises BuildError if it cannot be built, OSError if it cannot be loaded."""
    if (ready := prebuilt(library)) is not None:
        try:
            # It names no OpenMP library: it uses torch's, and with it torch's threads.
            ctypes.CDLL(str(_torch_gomp() or "libgomp.so.1"), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(ready))
        except OSError as error:
            log.warning("%s cannot be loaded, so %s is built here: %s", ready, library.name, error)
    return ctypes.CDLL(str(build(library)))


def prebuilt(library: Library) -> Path | None:
    """Returns the fastest library of a wheel with the same sources that this CPU can run; None if there is none."""
    if not PREBUILT.is_dir():
        return None
    files = (PREBUILT / prebuilt_name(library, one) for one in instruction_sets.supported(platform.machine()))
    return next((file for file in files if file.exists()), None)


def prebuilt_name(library: Library, instructions: instruction_sets.InstructionSet) -> str:
    """Returns the file name of a library compiled for an instruction set."""
    return f"{library.name}-{instructions.name}-{_source_digest(library).hexdigest()[:20]}.so"


def unavailable_reason(library: Library) -> str | None:
    """Returns why a C++ library can be neither loaded nor built; None if it can."""
    return None if prebuilt(library) else machine.cpp_unavailable_reason()


def build(library: Library) -> Path:
    """Returns the library's path, built if its content key is not cached. Raises BuildError with the reason."""
    _require_tools(library)
    folder = cache_folder()
    target = folder / f"{library.name}-{content_key(library)}.so"
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_suffix(".lock")):
            if not target.exists():
                _build_locked(library, target)
    except OSError as error:
        raise BuildError(f"cannot build {library.name} in {folder} (set {VARIABLE} to change it): {error}") from error
    return target


def content_key(library: Library) -> str:
    """Returns 20 hex digits that identify everything the built code depends on."""
    digest = _source_digest(library)
    parts = [torch.__version__, str(_torch_gomp())]
    if library.has_cpp:
        parts += [NATIVE, machine.version_of(_path(machine.cxx())), machine.cpu_features()]
    if library.has_cuda:
        parts += [*CUDA_FLAGS, machine.version_of(_path(machine.nvcc())), *arch_flags(library)]
    digest.update("\0".join(parts).encode())
    return digest.hexdigest()[:20]


def _source_digest(library: Library) -> hashlib._Hash:
    """Returns the digest of sources, headers and flags."""
    digest = hashlib.sha256()
    for path in [*library.sources, *_headers(library)]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update("\0".join([*library.flags, *CPP_FLAGS]).encode())
    return digest


def arch_flags(library: Library) -> list[str]:
    """Returns nvcc's flags for the visible GPUs."""
    suffix = "a" if library.arch_specific else ""
    numbers = [arch.removeprefix("sm_") for arch in machine.gpu_archs()]
    letters = [suffix if int(number) >= 90 else "" for number in numbers]
    return [f"-gencode=arch=compute_{n}{a},code=sm_{n}{a}" for n, a in zip(numbers, letters, strict=True)]


def _require_tools(library: Library) -> None:
    reason = machine.cpp_unavailable_reason() if library.has_cpp else None
    if library.has_cuda and reason is None:
        reason = machine.cuda_unavailable_reason(torch.device("cuda"))
    if reason is not None:
        raise BuildError(f"cannot build {library.name}: {reason}")


def _headers(library: Library) -> list[Path]:
    """Returns our headers that the sources include, directly or not."""
    found: set[Path] = set()
    given = [Path(folder) for flag, folder in pairwise(library.flags) if flag == "-I"]
    pending = list(library.sources)
    while pending:
        path = pending.pop()
        names = re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE)
        headers = [(folder / name).resolve() for name in names for folder in (path.parent, SHARED_HEADERS, *given)]
        new = {header for header in headers if header.exists()} - found
        found |= new
        pending += new
    return sorted(found, key=lambda path: (path.name, path))  # the order in the tree is the order in a wheel


def _torch_gomp() -> Path | None:
    """Returns torch's OpenMP library. Linking it by path makes torch and us share one thread pool."""
    package = Path(torch.__file__).parent
    places = [package / "lib", package.parent / "torch.libs"]
    found = sorted(file for place in places for file in place.glob("libgomp*.so*"))
    return found[0] if found else None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build_locked(library: Library, target: Path) -> None:
    work = target.with_suffix(".build")
    work.mkdir(exist_ok=True)
    (work / "build.ninja").write_text(ninja_file(library))
    log.info("building %s (files: %d; once, kept in %s)", library.name, len(library.sources), target.parent)
    start = time.monotonic()
    # Without this, ninja would copy the terminal's colour codes into the log.
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "dumb"}
    command = [_path(machine.ninja()), "-C", str(work)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        output = _show_progress(process.stdout, library)
    if process.returncode != 0:
        raise BuildError(f"cannot build {library.name}:\n{output}")
    (work / "out.so").replace(target)
    log.info("built %s in %.1f s", library.name, time.monotonic() - start)


def _show_progress(lines: Iterable[str], library: Library) -> str:
    """Shows a bar while ninja prints "[3/12] ...". Returns its lines. Only on a terminal."""
    output = []
    total = len(library.sources) + 1  # and the link
    with tqdm(total=total, desc=f"building {library.name}", unit="file", leave=False, disable=None) as bar:
        for line in lines:
            output.append(line)
            bar.update(line.startswith("["))
    return "".join(output)


def ninja_file(library: Library) -> str:
    """Returns a library's build.ninja: one object per source, one link."""
    extra = " ".join(library.flags)
    includes = [shlex.quote(word).replace("$", "$$") for word in INCLUDES]
    lines = ["ninja_required_version = 1.5"]
    if library.has_cpp:
        flags = " ".join([*CPP_FLAGS, NATIVE, *includes, extra])
        lines += ["rule cpp", f"  command = {_path(machine.cxx())} {flags} -c $in -o $out"]
    if library.has_cuda:
        flags = " ".join([*CUDA_FLAGS, *includes, *arch_flags(library), extra])
        lines += ["rule cu", f"  command = {_path(machine.nvcc())} {flags} -c $in -o $out"]
    lines += ["rule link", f"  command = {_linker(library)}"]
    objects = []
    for number, source in enumerate(library.sources):
        objects.append(f"{number}-{source.stem}.o")
        rule = "cu" if source.suffix == ".cu" else "cpp"
        lines.append(f"build {objects[-1]}: {rule} {_escaped(source.resolve())}")
    lines += [f"build out.so: link {' '.join(objects)}", "default out.so", ""]
    return "\n".join(lines)


def _linker(library: Library) -> str:
    gomp = _torch_gomp()
    if library.has_cuda:
        # cudart is linked statically (nvcc's default): it shares torch's context through the driver.
        openmp = f"-Xlinker {gomp}" if gomp else "-Xcompiler -fopenmp"
        nvcc = _path(machine.nvcc())
        places = " ".join(f"-L{folder}" for folder in libraries_of(nvcc))
        return f"{nvcc} -shared $in {places} {openmp if library.has_cpp else ''} -o $out"
    return f"{_path(machine.cxx())} -shared $in {gomp or '-fopenmp'} -o $out"


def _escaped(path: Path) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _path(tool: str | None) -> str:
    if tool is None:
        raise BuildError("a compiler that was here is gone")
    return tool
