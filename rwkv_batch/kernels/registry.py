"""Chooses a kernel backend by name and reports why others are unavailable."""

from __future__ import annotations

import importlib
import logging

import torch

from rwkv_batch.model.loader import Precision
from rwkv_batch.model.ops import Ops, ReportsMissingKernels
from rwkv_batch.model.quant.formats import Format
from rwkv_batch.model.state import RWKV7

_BACKENDS = {
    "cuda": ("rwkv_batch.kernels.cuda.ops", "CudaOps"),
    "cpu": ("rwkv_batch.kernels.cpu.ops", "CpuOps"),
    "naive": ("rwkv_batch.kernels.naive", "NaiveOps"),
}
_OLDER_BACKENDS = _BACKENDS | {"cpu": ("rwkv_batch.kernels.cpu.ops", "PackedOps")}

NO_KERNELS_WARNING = (
    "%s is served WITHOUT OUR KERNELS, at about a tenth of their speed (7.2B on an H200: 459 tokens/s for 32 clients "
    "instead of 6,234): %s. Remedy: `make install-nvcc` where a compiler is missing; `--kernels cuda` refuses to start "
    "like this, `--kernels naive` accepts it in silence"
)
_ONLY_RWKV7 = f"the cuda kernels are {RWKV7}'s; {{}} runs on plain torch"
logger = logging.getLogger(__name__)


def choose_ops(requested: str, device: torch.device, version: str = RWKV7) -> tuple[Ops, dict[str, str]]:
    """Returns the backend for a device and model version.

    The second value holds the unavailable backends (name -> reason).
    requested "auto" tries all in order of speed. Also reports missing kernels of the chosen backend.
    Raises ValueError if the named backend is unavailable.
    """
    refusals: dict[str, str] = {}
    backends = _BACKENDS if version == RWKV7 else _OLDER_BACKENDS
    for name, (module, attribute) in backends.items():
        if requested not in ("auto", name):
            continue
        try:
            backend = getattr(importlib.import_module(module), attribute)
            reason = (
                backend.unavailable_reason(device)
                if name != "cuda" or version == RWKV7
                else _ONLY_RWKV7.format(version)
            )
        except ImportError as error:
            reason = str(error)
        if reason is None:
            ops = backend()
            if device.type == "cuda" and name == "naive" and requested == "auto" and version == RWKV7:
                logger.warning(NO_KERNELS_WARNING, device, refusals["cuda"])
            return ops, refusals | (ops.missing_kernels(device) if isinstance(ops, ReportsMissingKernels) else {})
        refusals[name] = reason
    reason = "; ".join(refusals.values()) or f"they are one of auto, {', '.join(backends)}"
    raise ValueError(
        f"kernels {requested!r} cannot serve {device}: {reason}. --kernels auto (in a request "
        '"kernels": "auto") takes the fastest that can'
    )


def make_deterministic(ops: Ops, precision: Precision) -> None:
    """Give a GPU's rows bits that depend on their own tokens only.

    Raises ValueError for kernels, a GPU or weights that cannot.
    """
    if precision.storage not in (None, Format.W8A8):
        raise ValueError(f"--deterministic is for --dtype fp16 and int8, not {precision.weights_name}; omit one")
    become = getattr(ops, "become_deterministic", None)
    if become is None:
        raise ValueError(f"--deterministic is for --kernels cuda on GPUs, not {ops.name}; omit one")
    become(precision.device)
