"""Samplers by name, imported only when asked for, and the choice of one that can serve a device."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import torch

from sampling.sampler import Sampler

SAMPLERS = {
    "rapid": ("sampling.rapid", "RapidSampler"),
    "flashinfer": ("sampling.flashinfer", "FlashInferSampler"),
    "cpu": ("sampling.cpu", "CpuSampler"),
    "naive": ("sampling.naive", "NaiveSampler"),
}
"""Name -> module and class, in the default order of preference."""

DEFAULT_ORDER = tuple(SAMPLERS)


def sampler_class(name: str) -> type[Sampler]:
    """The class registered under `name`. ValueError for an unknown name, ImportError if its module cannot load."""
    if name not in SAMPLERS:
        raise ValueError(f"unknown sampler {name!r}; known: {', '.join(SAMPLERS)}")
    module, class_name = SAMPLERS[name]
    found: type[Sampler] = getattr(importlib.import_module(module), class_name)
    return found


def order_from(first: str) -> list[str]:
    """The default order with `first` moved to the front: what a route that prefers `first` falls back to."""
    if first not in SAMPLERS:
        raise ValueError(f"unknown sampler {first!r}; known: {', '.join(SAMPLERS)}")
    return [first, *(name for name in DEFAULT_ORDER if name != first)]


def choose_sampler(
    names: Sequence[str], device: torch.device, max_rows: int, vocab: int, countless_ids: list[int]
) -> tuple[Sampler, dict[str, str]]:
    """The first of `names` that can serve `device`, made, and why each one before it could not.

    A sampler that says it can serve but fails when made (a compiler error, say) counts as a refusal.
    RuntimeError, with all reasons, if none is left; ValueError for an unknown name.
    """
    refusals: dict[str, str] = {}
    for name in names:
        if name not in SAMPLERS:
            raise ValueError(f"unknown sampler {name!r}; known: {', '.join(SAMPLERS)}")
        try:
            found = sampler_class(name)
            reason = found.why_not(device)
            if reason is None:
                return found(max_rows, vocab, device, countless_ids), refusals
        except (ImportError, OSError, RuntimeError) as error:
            reason = f"{type(error).__name__}: {error}"
        refusals[name] = reason
    raise RuntimeError("no sampler can serve: " + "; ".join(f"{name}: {why}" for name, why in refusals.items()))
