"""Chooses a kernel backend by name, once, and remembers why the others do not serve."""

from __future__ import annotations

import importlib

import torch

from rwkv_batch.model.ops import DoesWithout, Ops

_BACKENDS = {
    "cuda": ("rwkv_batch.kernels.cuda", "CudaOps"),
    "cpu": ("rwkv_batch.kernels.cpu", "CpuOps"),
    "naive": ("rwkv_batch.kernels.naive", "NaiveOps"),
}


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
            return ops, refusals | (ops.does_without(device) if isinstance(ops, DoesWithout) else {})
        refusals[name] = reason
    raise ValueError(f"kernels {wanted!r} cannot serve {device}: {'; '.join(refusals.values()) or 'unknown name'}")
