"""The definition of the filters in `params.Filters`, in plain torch. It also runs before samplers without filters.

For each row of logits, after its mask, in this order:

1. Logit bias is added. NaN counts as -inf, values above 1e30 as 1e30. Before `min_tokens` tokens, stop tokens are
   banned. The last token of a bad word is banned where the others are the row's last tokens.
2. The filters of `samplers` run in their order. Each sees the distribution that the earlier ones left, and keeps at
   least the most probable token. A token that is removed gets the logit -inf.
3. The row samples by the Gumbel-max rule from what is left (`naive.py`). If top_p, top_k or both in this order come
   last, that sampler applies them with its own kernel.

Greedy rows use only the filters `penalties` and `dry`. Mirostat replaces all but `penalties`, `dry` and `temperature`.

m(token) = exp(s - max s) in fp32, and M is the sum of m in fp64. The probability of a token is m / M.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from native.tensors import on_device
from sampling import philox
from sampling.params import MAX_WINDOW, Filters
from sampling.req_slots import MAX_LOGIT, MIN_TEMPERATURE, ReqSlotTable
from sampling.row_context import RowContext, window

MAX_MATCH = 64
"""Longest repeated sequence that DRY counts."""
MIROSTAT_TOKENS = 100
"""Most probable tokens from which Mirostat 1 estimates the distribution's exponent."""
LOWEST = torch.finfo(torch.float32).min
_INFINITY = float("inf")


@dataclass
class FilterState:
    """State of the filters by request slot."""

    table: ReqSlotTable
    history: Tensor
    """[max_rows, MAX_WINDOW] int32: last tokens of prompt and answer, the newest last; -1: none"""
    mu: Tensor
    """[max_rows] fp64: Mirostat's bound of surprise"""
    num_known: list[int]
    """number of tokens in `history`"""
    steps: dict[int, tuple[str, ...]] = field(default_factory=dict)
    contexts: dict[int, RowContext] = field(default_factory=dict)


class Group:
    """Rows of a step with the same filters: one entry per row."""

    def __init__(self, rows: list[int], req_slots: list[int], steps: tuple[str, ...], state: FilterState) -> None:
        self.steps = steps
        self.req_slot_list = req_slots
        self.params = [state.table.params[req_slot] for req_slot in req_slots]
        filters = [params.filters for params in self.params]
        self.filters: list[Filters] = [one for one in filters if one is not None]
        self.state = state
        self.device = state.table.device
        self.rows = state.table.ids(rows)
        self.req_slots = state.table.ids(req_slots)
        self.biased = state.table.biased(req_slots)
        self.penalised = state.table.penalised(req_slots) if "penalties" in steps else None
        self.seeds = state.table.seeds(req_slots)
        self._columns: dict[str, Tensor] = {}
        self.bans = _Bans(self) if any(one.min_tokens or one.bad_words for one in self.filters) else None

    def column(self, name: str) -> Tensor:
        """Return a parameter of each row, [g, 1] fp64."""
        if name not in self._columns:
            sources = self.filters if name in Filters.__struct_fields__ else self.params
            values = [float(getattr(one, name)) for one in sources]
            self._columns[name] = on_device(values, torch.float64, self.device).unsqueeze(1)
        return self._columns[name]

    def windows(self, name: str) -> Tensor:
        """Return how many last tokens each window has [g, 1] int64."""
        key = f"window of {name}"
        if key not in self._columns:
            values = [window(getattr(one, name)) for one in self.filters]
            self._columns[key] = self.state.table.ids(values).unsqueeze(1)
        return self._columns[key]

    def last_tokens(self) -> Tensor:
        """Return the rows' last tokens [g, w] int64, the newest last. Missing ones are -1."""
        width = max(self.state.num_known[req_slot] for req_slot in self.req_slot_list)
        return self.state.history[self.req_slots, MAX_WINDOW - min(width, MAX_WINDOW) :].long()

    @cached_property
    def breakers(self) -> Tensor:
        """[g, V + 1] bool; the last column is for missing tokens"""
        masks = [self.state.contexts[req_slot].breakers for req_slot in self.req_slot_list]
        none = torch.zeros(self.state.table.vocab, dtype=torch.bool)
        stacked = torch.stack([none if mask is None else mask[: len(none)] for mask in masks])
        return torch.nn.functional.pad(stacked, (0, 1), value=True).to(self.device)


class _Bans:
    """Tokens that the rows of a group may not sample yet: stops, and the ends of bad words."""

    def __init__(self, group: Group) -> None:
        stops: list[tuple[int, int]] = []
        words: list[tuple[int, tuple[int, ...]]] = []
        for i, (req_slot, filters) in enumerate(zip(group.req_slot_list, group.filters, strict=True)):
            if filters.min_tokens:
                stops += [(i, token) for token in group.state.contexts[req_slot].stop_ids]
            words += [(i, word) for word in filters.bad_words]
        width = max((len(word) for _, word in words), default=1) - 1
        starts = [token for _, word in words for token in (*[-2] * (width + 1 - len(word)), *word[:-1])]
        device = group.device
        self._stop_rows, self._stop_ids = (on_device([s[k] for s in stops], torch.int64, device) for k in (0, 1))
        self._word_rows = on_device([i for i, _ in words], torch.int64, device)
        self._word_ends = on_device([word[-1] for _, word in words], torch.int64, device)
        self._word_starts = on_device(starts, torch.int64, device).view(len(words), width)

    def apply(self, s: Tensor, group: Group) -> None:
        """Set banned logits of s [g, V] to -inf. Does not wait for the device."""
        steps = group.state.table.steps[group.req_slots]
        too_early = steps[self._stop_rows] < group.column("min_tokens").flatten()[self._stop_rows]
        width = self._word_starts.shape[1]
        tails = group.state.history[group.req_slots, MAX_WINDOW - width :].long()[self._word_rows]
        completes = ((tails == self._word_starts) | (self._word_starts == -2)).all(dim=1)
        at = torch.cat((self._stop_rows * s.shape[1] + self._stop_ids, self._word_rows * s.shape[1] + self._word_ends))
        values = torch.where(torch.cat((too_early, completes)), -_INFINITY, _INFINITY)
        s.view(-1).scatter_reduce_(0, at, values, "amin")


# The filters. Each changes s [g, V] fp32 in place, or returns another tensor. ------------------------------------


def masses(s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return m [g, V] fp32 and M [g, 1] fp64. M is the largest value of each row, [g, 1] too."""
    largest = s.amax(dim=1, keepdim=True).clamp_(min=LOWEST)
    m = (s - largest).exp_()
    return largest, m, m.sum(dim=1, keepdim=True, dtype=torch.float64)


def _log_probs(s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log p [g, V], entropy [g, 1], m [g, V]. log p is -inf if removed; m is fp32."""
    largest, m, total = masses(s)
    log_p = (s - largest).double().sub_(total.log())
    entropy = -(m.double() / total * log_p).nan_to_num_(nan=0.0).sum(dim=1, keepdim=True)
    return log_p, entropy, m


def _keep_ranked(s: Tensor, order: Tensor, kept: Tensor) -> Tensor:
    """Keep the tokens order[i, j] where kept[i, j], and the first one."""
    kept[:, 0] = True
    return s.masked_fill_(~torch.zeros_like(kept).scatter_(1, order, kept), -_INFINITY)


def _within_mass(m: Tensor, order: Tensor, share: Tensor) -> Tensor:
    """Return the ranked tokens [g, V] within a share of mass. They have less than `share` of the mass before them."""
    ranked = m.gather(1, order).double()
    total = ranked.sum(dim=1, keepdim=True)
    return ranked.cumsum(dim=1).sub_(ranked) < share * total


def penalties(s: Tensor, group: Group) -> Tensor:
    """Apply the repetition penalty, then presence and frequency penalties: s [g, V] fp32.

    The first looks at prompt and answer, the others at the answer.
    """
    if any(one.uses_repetition for one in group.filters):
        last = group.last_tokens()
        age = torch.arange(last.shape[1], 0, -1, device=s.device)
        valid = (last >= 0) & (age <= group.windows("repeat_last_n"))
        seen = torch.zeros(len(s), s.shape[1] + 1, dtype=torch.bool, device=s.device)
        seen = seen.scatter_(1, torch.where(valid, last, s.shape[1]), True)[:, :-1]
        factor = group.column("repetition_penalty").float()
        s = torch.where(seen, torch.where(s > 0, s / factor, s * factor), s)
    if group.penalised is not None:
        group.state.table.subtract_penalties(s, group.penalised)
    return s.clamp_(max=MAX_LOGIT)


def dry(s: Tensor, group: Group) -> Tensor:
    """Subtract a penalty for tokens that would extend a repeated sequence: s [g, V] fp32.

    The penalty is base^(length - allowed length). Elsewhere in the window the row's last `length` tokens, none with a
    breaker, come before the token. The longest such sequence counts.
    """
    last = group.last_tokens()
    width, vocab = last.shape[1], s.shape[1]
    if width < 2:
        return s
    last = torch.where(last < 0, vocab, last)
    is_breaker = group.breakers.gather(1, last)
    age = torch.arange(width, 0, -1, device=s.device)
    in_window = age <= group.windows("dry_penalty_last_n")
    lengths = torch.zeros(len(s), width - 1, dtype=torch.int64, device=s.device)
    matches = torch.ones_like(lengths, dtype=torch.bool)
    for k in range(min(MAX_MATCH, width - 1)):
        # Column i compares the tokens k before place i and k before the end.
        same = (last[:, : width - 1 - k] == last[:, width - 1 - k, None]) & in_window[:, : width - 1 - k]
        matches[:, :k] = False
        matches[:, k:] &= same & ~is_breaker[:, width - 1 - k, None]
        lengths += matches
    excess = lengths - group.column("dry_allowed_length")
    penalty = (group.column("dry_multiplier") * group.column("dry_base").pow(excess)).clamp_(max=MAX_LOGIT).float()
    counts = (excess >= 0) & ~is_breaker[:, 1:]
    total = torch.zeros(len(s), vocab + 1, device=s.device)
    total.scatter_reduce_(1, torch.where(counts, last[:, 1:], vocab), penalty.masked_fill_(~counts, 0.0), "amax")
    return s.sub_(total[:, :-1])


def temperature(s: Tensor, group: Group) -> Tensor:
    """Divide s [g, V] fp32 by the temperature.

    A dynamic one follows the entropy, relative to that of equal probabilities.
    """
    value = group.column("temperature")
    if any(one.dynatemp_range > 0 for one in group.filters):
        extent = group.column("dynatemp_range")
        _, entropy, _ = _log_probs(s)
        most = (s > -_INFINITY).sum(dim=1, keepdim=True).double().log()
        share = torch.where(most > 0, entropy / most, 0.0).clamp_(0, 1).pow(group.column("dynatemp_exponent"))
        low, high = (value - extent).clamp_(min=0), value + extent
        value = torch.where(extent > 0, low + (high - low) * share, value)
    return s.mul_((1 / value.clamp(min=MIN_TEMPERATURE)).float())


def top_n_sigma(s: Tensor, group: Group) -> Tensor:
    """Keep s [g, V] near the largest logit. Within n standard deviations. s is fp32."""
    wide, alive = s.double(), s > -_INFINITY
    count = alive.sum(dim=1, keepdim=True)
    mean = wide.masked_fill(~alive, 0).sum(dim=1, keepdim=True) / count
    variance = (wide - mean).square_().masked_fill_(~alive, 0).sum(dim=1, keepdim=True) / count
    floor = wide.amax(dim=1, keepdim=True) - group.column("top_n_sigma") * variance.sqrt()
    return s.masked_fill_(wide < floor, -_INFINITY)


def typ_p(s: Tensor, group: Group) -> Tensor:
    """Keep s [g, V] with the most typical surprise.

    Up to a mass of typical_p. s is fp32.

    The surprise nearest to the entropy is the most typical one.
    """
    log_p, entropy, m = _log_probs(s)
    order = (-log_p - entropy).abs_().sort(dim=1, stable=True).indices
    return _keep_ranked(s, order, _within_mass(m, order, group.column("typical_p")))


def min_p(s: Tensor, group: Group) -> Tensor:
    """Keep s [g, V] from min_p of the largest probability on."""
    floor = group.column("min_p").log().float()
    largest = s.amax(dim=1, keepdim=True).clamp_(min=LOWEST)
    return s.masked_fill_(s - largest < floor, -_INFINITY)


def epsilon_cutoff(s: Tensor, group: Group) -> Tensor:
    """Keep s [g, V] from a probability on."""
    return _keep_from(s, group.column("epsilon_cutoff").log())


def eta_cutoff(s: Tensor, group: Group) -> Tensor:
    """Keep s [g, V] from min(eta, sqrt(eta) e^-entropy) on (Hewitt et al., 2022)."""
    floor = group.column("eta_cutoff").log()
    return _keep_from(s, torch.minimum(floor, floor / 2 - _log_probs(s)[1]))


def _keep_from(s: Tensor, floor: Tensor) -> Tensor:
    """Keep s [g, V] from a logarithm of probability on, and the largest: floor [g, 1] fp64."""
    largest, _, total = masses(s)
    return s.masked_fill_(s - largest < (floor + total.log()).clamp_(max=0).float(), -_INFINITY)


def top_p(s: Tensor, group: Group) -> Tensor:
    """Keep the most probable s [g, V], up to top_p. s is fp32."""
    order = s.sort(dim=1, descending=True, stable=True).indices
    share = torch.where(group.column("top_p") < 1, group.column("top_p"), _INFINITY)
    return _keep_ranked(s, order, _within_mass(masses(s)[1], order, share))


def top_k(s: Tensor, group: Group) -> Tensor:
    """Keep the top_k most probable tokens of s [g, V] fp32."""
    order = s.sort(dim=1, descending=True, stable=True).indices
    ranks = torch.arange(s.shape[1], device=s.device)
    return _keep_ranked(s, order, ranks < group.column("top_k"))


def xtc(s: Tensor, group: Group) -> Tensor:
    """Sometimes remove probable tokens of s [g, V] but the last.

    With a probability, only the least probable one of them stays. s is fp32.

    Probable are those of at least xtc_threshold.
    """
    steps, zero = group.state.table.steps[group.req_slots], group.req_slots.new_zeros(len(s), 1)
    chance = philox.to_uniform(philox.words_at(group.seeds, steps, zero, philox.DOMAIN_XTC))
    _, m, total = masses(s)
    above = (m.double() >= group.column("xtc_threshold") * total) & (s > -_INFINITY)
    above &= chance < group.column("xtc_probability")
    least = s.masked_fill(~above, _INFINITY).amin(dim=1, keepdim=True)
    ids = torch.arange(s.shape[1], device=s.device).expand_as(s)
    kept = ids.masked_fill(~above | (s != least), -1).amax(dim=1, keepdim=True)
    return s.masked_fill_(above & (ids != kept), -_INFINITY)


def mirostat(s: Tensor, group: Group) -> Tensor:
    """Keep s [g, V] by the bound mu of their surprise.

    Version 2 keeps those below it, version 1 as many as Zipf's law gives for it (Basu et al., 2021).
    """
    mu = group.state.mu[group.req_slots].unsqueeze(1)
    log_p, _, _ = _log_probs(s)
    best = s.argmax(dim=1, keepdim=True)
    kept = -log_p / math.log(2) <= mu
    if any(one.mirostat == 1 for one in group.filters):
        vocab = s.shape[1]
        head = log_p.topk(min(MIROSTAT_TOKENS, vocab), dim=1).values
        ranks = torch.arange(1, head.shape[1], device=s.device, dtype=torch.float64)
        t = ((ranks + 1) / ranks).log()
        b = (head[:, :-1] - head[:, 1:]).nan_to_num_(nan=0.0, posinf=0.0)
        valid = head[:, 1:] > -_INFINITY
        exponent = (t * b * valid).sum(dim=1, keepdim=True) / (t * t * valid).sum(dim=1, keepdim=True)
        excess = exponent - 1
        k = ((excess * mu.exp2()) / (1 - torch.pow(float(vocab), -excess))).pow(1 / exponent)
        k = k.nan_to_num_(nan=vocab, posinf=vocab).clamp_(1, vocab).floor_()
        order = s.sort(dim=1, descending=True, stable=True).indices
        ranked = (torch.arange(vocab, device=s.device) < k).expand_as(order)
        by_rank = torch.zeros_like(kept).scatter_(1, order, ranked)
        kept = torch.where(group.column("mirostat") == 1, by_rank, kept)
    return s.masked_fill_(~kept.scatter_(1, best, True), -_INFINITY)


FILTERS: dict[str, Callable[[Tensor, Group], Tensor]] = {
    one.__name__: one
    for one in (
        *(penalties, dry, temperature, top_n_sigma, typ_p, min_p, epsilon_cutoff, eta_cutoff),
        *(top_p, top_k, xtc, mirostat),
    )
}


def apply_filters(s: Tensor, group: Group) -> Tensor:
    """Return filtered logits [g, V] fp32. May overwrite s."""
    if group.biased is not None:
        group.state.table.add_bias(s, group.biased)
    s = s.nan_to_num_(nan=-_INFINITY, posinf=MAX_LOGIT, neginf=-_INFINITY).clamp_(max=MAX_LOGIT)
    if group.bans is not None:
        group.bans.apply(s, group)
    for name in group.steps:
        s = FILTERS[name](s, group)
    return s
