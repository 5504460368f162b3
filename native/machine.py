"""What this machine can do: compilers, GPU architectures, cores. Each question is asked once and remembered."""

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
    """Path of the C++ compiler: $CXX, else g++; None if there is none."""
    return shutil.which(os.environ.get("CXX") or "g++")


def nvcc() -> str | None:
    """Path of nvcc, see native.nvcc; None if there is none."""
    return compiler.find()


@functools.cache
def ninja() -> str | None:
    """Path of ninja: the Python package's, else the one on the PATH; None if there is none."""
    try:
        import ninja as package
    except ImportError:
        return shutil.which("ninja")
    return shutil.which(str(Path(package.BIN_DIR) / "ninja")) or shutil.which("ninja")


@functools.cache
def version_of(compiler: str) -> str:
    """What `compiler --version` prints."""
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout.strip()


@functools.cache
def cpu_features() -> str:
    """The processor's model and instruction sets, as /proc/cpuinfo names them; what -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    telling = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.split("\t")[0].strip() in telling}))


@functools.cache
def cores() -> int:
    """How many cores this process may use: its affinity, or less under a cgroup v2 quota."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return allowed
    return allowed if quota == "max" else max(1, min(allowed, int(quota) // int(period)))


def free_memory(meminfo: str = "/proc/meminfo", cgroup: str = "/sys/fs/cgroup") -> int | None:
    """Bytes that programs may still take: what the machine has, or less under a cgroup v2 limit; None: not told."""
    free: list[int] = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        line = next(one for one in Path(meminfo).read_text().splitlines() if one.startswith("MemAvailable:"))
        free.append(int(line.split()[1]) << 10)
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        limit, used = ((Path(cgroup) / name).read_text() for name in ("memory.max", "memory.current"))
        free.append(max(0, int(limit) - int(used)))
    return min(free, default=None)


@functools.cache
def gpu_archs() -> tuple[str, ...]:
    """Architectures of the visible NVIDIA GPUs, each once, as "sm_90"; empty without CUDA (or on ROCm)."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return ()
    capabilities = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    return tuple(f"sm_{major}{minor}" for major, minor in sorted(capabilities))


def why_no_cpp() -> str | None:
    """Why C++ cannot be built here; None if it can."""
    if cxx() is None:
        return "no C++ compiler (g++ is not on the PATH)"
    return None if ninja() else "no ninja (pip install ninja)"


def why_no_cuda(device: torch.device) -> str | None:
    """Why CUDA sources cannot be built for and run on `device`; None if they can."""
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
