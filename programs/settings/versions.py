"""What `--version` prints: the version, the commit, torch, CUDA and the GPUs. Loads no torch."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from importlib import metadata
from pathlib import Path

from native.nvcc import torch_cuda
from rwkv_batch.version import COMMIT, __version__

_GPUS = Path("/proc/driver/nvidia/gpus")


def version_text() -> str:
    """One line per part; the first one is the name and the version."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "none"
    parts = {"commit": _commit(), "torch": torch, "CUDA": torch_cuda() or "none", "GPU": _gpus()}
    return "\n".join([f"rwkv-batch {__version__}", *(f"{name:<7}{value}" for name, value in parts.items())])


def _commit() -> str:
    """The commit of a wheel or of a clone; "+" marks a clone with changed files."""
    top = Path(__file__).resolve().parents[2]
    if COMMIT or not (top / ".git").exists():
        return COMMIT or "unknown"
    command = ["git", "-C", str(top), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def _gpus() -> str:
    """NVIDIA's GPUs as the driver lists them."""
    texts = [file.read_text("utf-8", "replace") for file in sorted(_GPUS.glob("*/information"))]
    models = Counter(found[1].strip() for text in texts if (found := re.search(r"^Model:(.*)$", text, re.MULTILINE)))
    return ", ".join(f"{count} x {model}" if count > 1 else model for model, count in models.items()) or "none"
