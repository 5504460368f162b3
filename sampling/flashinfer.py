"""FlashInfer's top-k and top-p filters with this project's random numbers.

Needs the optional package `flashinfer-python` (written for 0.6.6). FlashInfer's own sampling function takes one seed
per batch, so a row's token would depend on the batch. It also keeps all tokens that tie at the cut. Here FlashInfer
only filters. Ties are then cut by token id, and `rapid` samples by the Gumbel-max rule of (seed, step, token).
"""

from __future__ import annotations

import importlib.util
import logging
import time
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from native.tensors import on_device
from sampling.naive import Plan, make_plan
from sampling.params import Method, SamplingParams
from sampling.rapid import RapidSampler
from sampling.req_slots import MAX_LOGIT, ReqSlotTable, inverse_temperature
from sampling.sampler import SamplerOutput, raw_logprobs

log = logging.getLogger(__name__)


@dataclass(slots=True)
class TruncationLimits:
    """Truncation parameters of a step: one entry per row, on the device."""

    scale: Tensor
    """1 / T fp32; 1 for greedy rows"""
    top_k: Tensor
    """int32; V if off, 1 for greedy rows"""
    top_p: Tensor
    """fp32; 1 if off"""


class FlashInferSampler:
    name = "flashinfer"

    @staticmethod
    def unavailable_reason(device: torch.device) -> str | None:
        """Return why it cannot run, None if it can. Requires `rapid`'s device and the package."""
        if device.type != "cuda":
            return f"needs a CUDA device, this is {device}"
        if importlib.util.find_spec("flashinfer") is None:
            return "the package flashinfer-python is not installed"
        return RapidSampler.unavailable_reason(device)

    def __init__(self, max_rows: int, vocab: int, device: torch.device, penalty_exempt_ids: list[int]) -> None:
        """See Sampler. Raises RuntimeError with `unavailable_reason`."""
        reason = self.unavailable_reason(device)
        if reason is not None:
            raise RuntimeError(reason)
        self._filters: ModuleType = importlib.import_module("flashinfer.sampling")
        self._build_filters(vocab, device)
        self.table = ReqSlotTable(max_rows, vocab, device, penalty_exempt_ids)
        self._gumbel_sampler = RapidSampler(max_rows, vocab, device, penalty_exempt_ids=[])
        self._cached_plan: tuple[tuple[int, list[int]], Plan, TruncationLimits] | None = None

    def _build_filters(self, vocab: int, device: torch.device) -> None:
        """Compile FlashInfer's kernels. FlashInfer compiles them at their first call."""
        log.info("loading FlashInfer's filters; the first start on a machine compiles them in one to two minutes")
        started = time.perf_counter()
        even = torch.full((1, vocab), 1 / vocab, device=device)
        self._filters.top_k_renorm_probs(even, torch.ones(1, dtype=torch.int32, device=device))
        self._filters.top_p_renorm_probs(even, torch.ones(1, device=device))
        log.info("FlashInfer's filters are ready after %.1f s", time.perf_counter() - started)

    def admit(self, req_slot: int, params: SamplingParams) -> None:
        """Start a new row in this request slot. Raises ValueError for a bad logit bias."""
        self.table.admit(req_slot, params)
        noisy = params.method is Method.NOISE and not params.is_greedy
        method = Method.NOISE if noisy else Method.STANDARD
        self._gumbel_sampler.admit(req_slot, SamplingParams(method=method, noise=params.noise, seed=params.seed))

    def append_tokens(self, req_slots: list[int], runs: list[list[int]]) -> None:
        self.table.append_tokens(req_slots, runs)
        self._gumbel_sampler.append_tokens(req_slots, runs)

    def sample(self, logits: Tensor, req_slots: list[int], masks: Tensor | None = None) -> SamplerOutput:
        """Sample and count one token per row of logits [R, V]. Overwrites fp32 logits. masks: see Sampler."""
        logits = logits.float().contiguous()
        if masks is not None:
            self._gumbel_sampler.apply_masks(logits, masks)
        plan, limits = self._plan_of(req_slots)
        raw = raw_logprobs(logits, plan.params)
        if plan.biased is not None:
            self.table.add_bias(logits, plan.biased)
        if plan.penalised is not None:
            self.table.subtract_penalties(logits, plan.penalised)
        infinity = float("inf")
        logits.nan_to_num_(nan=-infinity, posinf=MAX_LOGIT, neginf=-infinity).clamp_(max=MAX_LOGIT)
        scaled = self._truncate(logits.mul_(limits.scale.unsqueeze(1)), limits)
        tokens = torch.empty(len(req_slots), dtype=torch.int64, device=logits.device)
        self._gumbel_sampler.sample_on_device(scaled, plan.req_slots.int(), tokens)
        if plan.penalised is not None:
            self.table.count(plan.penalised, tokens)
        return SamplerOutput(tokens, None if raw is None else raw.gather(tokens))

    def _plan_of(self, req_slots: list[int]) -> tuple[Plan, TruncationLimits]:
        key = (self.table.version, list(req_slots))
        if self._cached_plan is None or self._cached_plan[0] != key:
            self._cached_plan = (key, make_plan(self.table, req_slots), make_truncation_limits(self.table, req_slots))
        return self._cached_plan[1:]

    def _truncate(self, scaled: Tensor, limits: TruncationLimits) -> Tensor:
        """Set scaled [R, V] to -inf for the tokens that are cut."""
        probs = torch.softmax(scaled, dim=1)
        kept = self._filters.top_k_renorm_probs(probs, limits.top_k) > 0
        kept &= self._filters.top_p_renorm_probs(probs, limits.top_p) > 0
        return scaled.masked_fill_(~truncate_ties(scaled, probs, kept, limits), -float("inf"))


def make_truncation_limits(table: ReqSlotTable, req_slots: list[int]) -> TruncationLimits:
    params = [table.params[req_slot] for req_slot in req_slots]
    cut = [p.method is Method.STANDARD and not p.is_greedy for p in params]
    ranks = [p.top_k if 0 < p.top_k < table.vocab else table.vocab for p in params]
    top_k = [1 if p.is_greedy else k if c else table.vocab for p, k, c in zip(params, ranks, cut, strict=True)]
    top_p = [min(p.top_p, 1.0) if c else 1.0 for p, c in zip(params, cut, strict=True)]
    scale = [1.0 if p.is_greedy else inverse_temperature(p) for p in params]
    return TruncationLimits(
        scale=on_device(scale, torch.float32, table.device),
        top_k=on_device(top_k, torch.int32, table.device),
        top_p=on_device(top_p, torch.float32, table.device),
    )


def truncate_ties(scaled: Tensor, probs: Tensor, kept: Tensor, limits: TruncationLimits) -> Tensor:
    """Return the kept tokens [R, V] bool after cutting ties by id.

    `above` are the tokens with a larger value than the smallest kept one. The j-th tied token (from 0) remains if
    `len(above) + j < top_k` and `mass(above) + j * mass(tie) < top_p`.
    """
    smallest = scaled.masked_fill(~kept, float("inf")).amin(dim=1, keepdim=True)
    above, ties = kept & (scaled > smallest), kept & (scaled == smallest)
    mass_above = probs.masked_fill(~above, 0.0).sum(dim=1, dtype=torch.float64)
    mass_each = probs.masked_fill(~ties, 0.0).amax(dim=1).double()
    # One millionth less, so that a quotient just above a whole number counts as that number.
    within_p = ((limits.top_p.double() - mass_above) / mass_each * (1 - 1e-6)).ceil()
    within_p = torch.where(limits.top_p < 1, within_p, float("inf"))
    count = torch.minimum(within_p, limits.top_k.double() - above.sum(dim=1)).clamp_(min=1)
    return above | (ties & (ties.cumsum(dim=1) <= count.unsqueeze(1)))
