"""Chooses a kernel backend by name, once, and remembers why the others do not serve."""

from __future__ import annotations

import importlib
import logging

import torch

from rwkv_batch.model.ops import DoesWithout, Ops

_BACKENDS = {
    "cuda": ("rwkv_batch.kernels.cuda", "CudaOps"),
    "cpu": ("rwkv_batch.kernels.cpu", "CpuOps"),
    "naive": ("rwkv_batch.kernels.naive", "NaiveOps"),
}

WITHOUT_KERNELS = (
    "%s is served WITHOUT OUR KERNELS, at about a tenth of their speed (7.2B on an H200: 459 tokens/s for 32 clients "
    "instead of 6,234): %s. Remedy: `make install-nvcc` where a compiler is missing; `--kernels cuda` refuses to start "
    "like this, `--kernels naive` accepts it in silence"
)
logger = logging.getLogger(__name__)


def choose_ops(wanted: str, device: torch.device) -> tuple[Ops, dict[str, str]]:
    """The backend for a device and the refusals (name -> reason): of backends before it, and of kernels of its own.

    wanted "auto" tries all in order of speed. Raises ValueError when a backend asked for by name refuses.
    """
    refusals: dict[str, str] = {}
    for name, (module, attribute) in _BACKENDS.items():
        if wanted not in ("auto", name):
            continue
        try:
            backend = getattr(importlib.import_module(module), attribute)
            reason = backend.why_not(device)
        except ImportError as error:
            reason = str(error)
        if reason is None:
            ops = backend()
            if device.type == "cuda" and name == "naive" and wanted == "auto":
                logger.warning(WITHOUT_KERNELS, device, refusals["cuda"])
            return ops, refusals | (ops.does_without(device) if isinstance(ops, DoesWithout) else {})
        refusals[name] = reason
    raise ValueError(f"kernels {wanted!r} cannot serve {device}: {'; '.join(refusals.values()) or 'unknown name'}")
