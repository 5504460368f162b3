"""Samplers by name, imported only when asked for, and the choice of one that can serve a device."""

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
"""Name -> module and class, in the default order of preference; `EngineConfig.samplers` lists the same names."""

FALLBACKS = ("cpu", "naive")
"""Need nothing but torch and a compiler, or torch alone: one of them serves where no other can."""
COMPILED_ON_FIRST_USE = ("flashinfer",)
"""Their first use on a machine takes a minute, so that an engine makes them before it serves."""


def sampler_class(name: str) -> type[Sampler]:
    """The class registered under `name`. ValueError for an unknown name, ImportError if its module cannot load."""
    if name not in SAMPLERS:
        raise ValueError(f"unknown sampler {name!r}; known: {', '.join(SAMPLERS)}")
    module, class_name = SAMPLERS[name]
    found: type[Sampler] = getattr(importlib.import_module(module), class_name)
    return found


def order(preferred: Sequence[str], asked: str = "") -> tuple[str, ...]:
    """The names to try, `preferred` before the last resorts; the one asked for goes first if it is preferred at all."""
    first = (asked,) if asked in preferred else ()
    return tuple(dict.fromkeys((*first, *preferred, *FALLBACKS)))


def choose_sampler(
    names: Sequence[str],
    device: torch.device,
    max_rows: int,
    vocab: int,
    penalty_exempt_ids: list[int],
    made: Iterable[Sampler] = (),
) -> tuple[Sampler, dict[str, str]]:
    """The first of `names` that can serve `device`, made unless it is in `made`, and why each before it could not.

    A sampler that says it can serve but fails when made (a compiler error, another version of a package: anything)
    counts as a refusal.
    RuntimeError, with all reasons, if none is left; ValueError for an unknown name.
    """
    refusals: dict[str, str] = {}
    for name in names:
        if name not in SAMPLERS:
            raise ValueError(f"unknown sampler {name!r}; known: {', '.join(SAMPLERS)}")
        same = next((sampler for sampler in made if sampler.name == name), None)
        if same is not None:
            return same, refusals
        try:
            found = sampler_class(name)
            reason = found.unavailable_reason(device)
            if reason is None:
                return found(max_rows, vocab, device, penalty_exempt_ids), refusals
        except Exception as error:  # a compiler, a driver, another version: any failure is a refusal with its reason
            log.warning("the sampler %s cannot be used", name, exc_info=True)
            reason = f"{type(error).__name__}: {error}"
        refusals[name] = reason
    raise RuntimeError("no sampler can serve: " + "; ".join(f"{name}: {why}" for name, why in refusals.items()))
