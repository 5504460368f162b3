"""Samplers by name, imported on demand. Also chooses one for a device."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Sequence

import torch

from sampling.sampler import Sampler

log = logging.getLogger(__name__)

SAMPLERS = {
    "rapid": ("sampling.rapid", "RapidSampler"),
    "flashinfer": ("sampling.flashinfer", "FlashInferSampler"),
    "cpu": ("sampling.cpu", "CpuSampler"),
    "naive": ("sampling.naive", "NaiveSampler"),
}
"""Name -> module and class, in the default order of preference. `EngineConfig.samplers` lists the same names."""

FALLBACKS = ("cpu", "naive")
"""tried last"""
COMPILED_ON_FIRST_USE = ("flashinfer",)
"""Samplers that compile for a minute at their first use. An engine creates them before it serves."""


def sampler_class(name: str) -> type[Sampler]:
    """Return the class of a sampler's name.

    Raises ValueError for an unknown name, ImportError if the module cannot be loaded.
    """
    if name not in SAMPLERS:
        raise ValueError(f"unknown sampler {name!r}; known: {', '.join(SAMPLERS)}")
    module, class_name = SAMPLERS[name]
    found: type[Sampler] = getattr(importlib.import_module(module), class_name)
    return found


def order(preferred: Sequence[str], requested: str = "") -> tuple[str, ...]:
    """Return the names to try. `requested` first if it is preferred, then `preferred`, then FALLBACKS."""
    first = (requested,) if requested in preferred else ()
    return tuple(dict.fromkeys((*first, *preferred, *FALLBACKS)))


def choose_sampler(
    names: Sequence[str],
    device: torch.device,
    max_rows: int,
    vocab: int,
    penalty_exempt_ids: list[int],
    created: Iterable[Sampler] = (),
) -> tuple[Sampler, dict[str, str]]:
    """Return the first of `names` that can run on `device`.

    Also returns the reason against each name before it. Takes the sampler from `created` if it is there. An exception
    in a sampler's constructor (a compiler error, a wrong package version) counts as a reason. Raises RuntimeError with
    all reasons if none is left, ValueError for an unknown name.
    """
    refusals: dict[str, str] = {}
    for name in names:
        if name not in SAMPLERS:
            raise ValueError(f"unknown sampler {name!r}; known: {', '.join(SAMPLERS)}")
        same = next((sampler for sampler in created if sampler.name == name), None)
        if same is not None:
            return same, refusals
        try:
            found = sampler_class(name)
            reason = found.unavailable_reason(device)
            if reason is None:
                return found(max_rows, vocab, device, penalty_exempt_ids), refusals
        except Exception as error:  # any failure is a reason to try the next sampler
            log.warning("sampler %s cannot be used; the next one is tried", name, exc_info=True)
            reason = f"{type(error).__name__}: {error}"
        refusals[name] = reason
    raise RuntimeError("no sampler can serve: " + "; ".join(f"{name}: {why}" for name, why in refusals.items()))
