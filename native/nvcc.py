"""Finds NVIDIA's compiler, or installs it with pip.

Installs it only on a machine with a GPU. Does not load torch. `make serve` first runs `python -m native.nvcc`, which is
silent if there is nothing to do.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
REQUIREMENTS = ROOT / "requirements-nvcc.txt"
PACKAGES_FOR = 13
"""CUDA major version in requirements-nvcc.txt; earlier ones have no nvcc package."""
SIZE_MB = 271
"""of the packages on disk"""
PROGRAMS = ("nvcc", "ptxas", "cudafe++", "fatbinary", "nvlink", "bin2c")


@functools.cache
def find() -> str | None:
    """Returns nvcc's path, None if there is none.

    Looks at $CUDA_HOME, $CUDA_PATH, pip, the PATH and /usr/local/cuda.

    pip's precedes the PATH because its version matches the installed torch.
    """
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    places = [str(Path(home) / "bin" / "nvcc") for home in homes if home]
    package = _from_pip()
    for place in [*places, *([str(package)] if package else []), "nvcc", "/usr/local/cuda/bin/nvcc"]:
        found = shutil.which(place)
        if found:
            return found
    return None


def libraries_of(nvcc: str) -> list[Path]:
    """Returns CUDA runtime folders to link that this nvcc would not search."""
    folder = Path(nvcc).resolve().parents[1] / "lib"
    return [folder] if (folder / "libcudart_static.a").exists() else []


def torch_cuda() -> str | None:
    """Returns the CUDA version of the installed torch ("13.0") from its files. None without torch or CUDA."""
    spec = importlib.util.find_spec("torch")
    folders = spec.submodule_search_locations if spec else None
    file = Path(folders[0]) / "version.py" if folders else None
    if file is None or not file.exists():
        return None
    found = re.search(r"^cuda\b[^=]*=\s*'([\d.]+)'", file.read_text(), re.MULTILINE)
    return found.group(1) if found else None


def has_gpu() -> bool:
    """Whether an NVIDIA driver shows a GPU (Linux or WSL)."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/usr/lib/wsl/lib/libcuda.so.1").exists()


def not_installable_reason() -> str | None:
    """Returns why pip has no matching compiler; None if it has one."""
    version = torch_cuda()
    if version is None:
        return "the installed torch is built without CUDA"
    if int(version.partition(".")[0]) != PACKAGES_FOR:
        return (
            f"the installed torch is built for CUDA {version}, pip has an nvcc for CUDA {PACKAGES_FOR} only: "
            f"install NVIDIA's CUDA toolkit {version}, or a torch for CUDA {PACKAGES_FOR}"
        )
    return None


def main() -> int:
    """Installs the compiler on a machine with a GPU but no nvcc. Never prevents the service from starting."""
    if not has_gpu() or find() is not None:
        return 0
    reason = not_installable_reason()
    if reason is not None:
        _print(f"no nvcc for the kernels of this machine's card: {reason}")
        return 0
    _print(f"no nvcc on this machine: installing NVIDIA's compiler from pip, {SIZE_MB} MB, once")
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "-q", "-r", str(REQUIREMENTS)]
    if subprocess.run(command, check=False).returncode != 0:
        _print("that failed (above); the service starts without its kernels. Again: make install-nvcc")
    return 0


def _from_pip() -> Path | None:
    """Returns nvcc of the package `nvidia-cuda-nvcc`.

    The package must be complete and of torch's CUDA major version.
    """
    spec = importlib.util.find_spec("nvidia")
    version = torch_cuda()
    majors = [version.partition(".")[0]] if version else [str(PACKAGES_FOR)]
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for major in majors:
            home = Path(folder) / f"cu{major}"
            if (home / "bin" / "nvcc").exists() and (home / "nvvm" / "bin" / "cicc").exists():
                _make_runnable([*(home / "bin" / name for name in PROGRAMS), home / "nvvm" / "bin" / "cicc"])
                return home / "bin" / "nvcc"
    return None


def _make_runnable(programs: list[Path]) -> None:
    """Restores execute permission, which some installers drop."""
    for program in programs:
        if program.exists() and not os.access(program, os.X_OK):
            try:
                program.chmod(program.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
            except OSError:
                return  # another user's files: `find` goes on to the next place


def _print(text: str) -> None:
    sys.stderr.write(f"rwkv-batch: {text}\n")


if __name__ == "__main__":
    sys.exit(main())
