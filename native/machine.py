"""The machine's compilers, GPU architectures and memory. Every answer is cached."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
from pathlib import Path

import torch

from native import nvcc as compiler

SUPPORTED_ARCHS = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
"""GPU architectures that CUDA sources are built for, Ampere to Blackwell."""


@functools.cache
def cxx() -> str | None:
    """Returns the C++ compiler's path: $CXX, else g++; None if there is none."""
    return shutil.which(os.environ.get("CXX") or "g++")


def nvcc() -> str | None:
    """Returns nvcc's path, see native.nvcc; None if there is none."""
    return compiler.find()


@functools.cache
def ninja() -> str | None:
    """Returns ninja's path: the Python package's, else on the PATH; None if there is none."""
    try:
        import ninja as package
    except ImportError:
        return shutil.which("ninja")
    return shutil.which(str(Path(package.BIN_DIR) / "ninja")) or shutil.which("ninja")


@functools.cache
def version_of(compiler: str) -> str:
    """Returns the output of `compiler --version`."""
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout.strip()


@functools.cache
def cpu_features() -> str:
    """Returns the CPU's model and instruction sets from /proc/cpuinfo. -march=native depends on them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    relevant = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.split("\t")[0].strip() in relevant}))


def free_memory(meminfo: str = "/proc/meminfo", cgroup: str = "/sys/fs/cgroup") -> int | None:
    """Returns the free memory in bytes, or less under a cgroup limit; None: unknown."""
    available = _read_numbers(Path(meminfo)).get("MemAvailable:")
    free = [] if available is None else [available << 10]
    folder = Path(cgroup)
    free += _free_in_cgroup(folder, "memory.max", "memory.current", ("inactive_file", "active_file"))
    version_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
    free += _free_in_cgroup(folder / "memory", *version_1)
    return min(free, default=None)


def _free_in_cgroup(folder: Path, limit: str, used: str, cached: tuple[str, ...]) -> list[int]:
    """Free bytes below a cgroup's limit; []: no limit.

    `cached`: names of statistics about cached files. A cgroup counts them as used, but programs can have that memory at
    once, as in MemAvailable.
    """
    try:
        limit_bytes, now = (int((folder / name).read_text()) for name in (limit, used))
    except (OSError, ValueError):  # no such cgroup; "max"
        return []
    figures = _read_numbers(folder / "memory.stat")
    return [max(0, limit_bytes - max(0, now - sum(figures.get(name, 0) for name in cached)))]


def _read_numbers(file: Path) -> dict[str, int]:
    """Reads a file of lines "name number ..."; empty if it cannot be read."""
    found = {}
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            name, number, *_ = *line.split(), "", ""
            if number.isdecimal():
                found[name] = int(number)
    return found


def first_gpu() -> tuple[str, int] | None:
    """Returns the first GPU's name and its memory in bytes; None: there is none."""
    if not torch.cuda.is_available():
        return None
    gpu = torch.cuda.get_device_properties(0)
    return gpu.name, gpu.total_memory


@functools.cache
def gpu_archs() -> tuple[str, ...]:
    """Returns the visible NVIDIA GPUs' architectures, like "sm_90"; empty without CUDA or on ROCm."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return ()
    capabilities = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    return tuple(f"sm_{major}{minor}" for major, minor in sorted(capabilities))


def cpp_unavailable_reason() -> str | None:
    """Returns why C++ cannot be built here; None if it can."""
    if cxx() is None:
        return "no C++ compiler (g++ is not on the PATH)"
    return None if ninja() else "no ninja (pip install ninja)"


def cuda_unavailable_reason(device: torch.device) -> str | None:
    """Returns why CUDA sources cannot be built for and run on `device`; None if they can."""
    if device.type != "cuda":
        return f"needs a CUDA device, this is {device}"
    if torch.version.hip is not None:
        return "built for NVIDIA GPUs, this torch is for ROCm"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    unsupported = [arch for arch in gpu_archs() if arch not in SUPPORTED_ARCHS]
    if unsupported:
        return f"GPU architecture {', '.join(unsupported)} is not among {', '.join(SUPPORTED_ARCHS)}"
    if nvcc() is None:
        return "no CUDA compiler (no nvcc from pip, on the PATH or under CUDA_HOME; `make install-nvcc` gets it)"
    return None if ninja() else "no ninja (pip install ninja)"
