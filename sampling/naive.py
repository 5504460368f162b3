"""The definition of sampling, in plain torch. The other samplers are tested against it.

For each row of logits, in this order:

0. Tokens that the row's mask forbids get the logit -inf.
1. Logit bias is added. Then `presence_penalty + count * frequency_penalty` is subtracted for each token seen so far
   (not for `Method.NOISE`). NaN then counts as -inf, and values above 1e30 count as 1e30.
2. Tokens are ranked by this logit, largest first. Equal logits are ranked by id.
3. s = logit * (1/T) in fp32; m(token) = exp(s - max s); M = sum of m over all V tokens.
4. A token is kept if its rank is below top_k and the mass ranked above it is below top_p * M.
5. The result is the kept token with the largest s + gumbel(seed, step, token), the lower id on a tie.

Greedy rows (temperature 0, top_k 1 or top_p 0) take the token of rank 0. `Method.NOISE` takes the largest
s + noise * u(seed, step, token) over all tokens. A row whose logits are all -inf or NaN takes token 0.

Masses are summed in fp64, and no row's arithmetic involves another row. So a row's token does not depend on the
batch. On CUDA this sampler waits for the device. On a CPU it is the fallback if nothing can be compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from native.tensors import on_device
from sampling import philox
from sampling.params import Method, SamplingParams
from sampling.req_slots import MAX_LOGIT, Biased, Penalised, ReqSlotTable, inverse_temperature
from sampling.sampler import SamplerOutput, raw_logprobs

MAX_CANDIDATES = 1024
"""Largest number of candidates from a partial selection; rows that need more are sorted completely."""
ROWS_AT_ONCE = 4
"""Rows per pass over whole vocabularies; keeps temporaries in the cache."""


TENSORS = ("rows", "req_slots", "seeds", "scale", "top_k", "top_p", "noise")


@dataclass(slots=True)
class Group:
    """Rows of a step with the same kind of sampling: one entry per row."""

    rows: Tensor
    """int64"""
    req_slots: Tensor
    """int64"""
    seeds: Tensor
    """int64"""
    scale: Tensor
    """1 / T, fp32"""
    top_k: Tensor
    """int64; V if off"""
    top_p: Tensor
    """fp64; inf if off"""
    noise: Tensor
    """fp32"""
    num_candidates: int = 0
    """to select first"""

    def __getitem__(self, part: slice | Tensor) -> Group:
        picked = {name: getattr(self, name)[part] for name in TENSORS}
        return Group(num_candidates=self.num_candidates, **picked)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(slots=True)
class Plan:
    """The groups of a list of request slots; reused until the list or a slot changes."""

    req_slots: Tensor
    params: list[SamplingParams]
    groups: dict[str, Group]
    """By kind: cut_small and cut_large (top_k or top_p is on), open (both are off), noise. Greedy rows are in none."""
    biased: Biased | None
    penalised: Penalised | None


def apply_masks(logits: Tensor, masks: Tensor) -> None:
    """Set masked logits [R, V] to -inf in place. A token is masked where its bit of masks [R, V/32] int32 is 0."""
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    for row, words in zip(logits, masks, strict=True):
        allowed = ((words.unsqueeze(1) >> bits) & 1).view(-1)[: logits.shape[1]].bool()
        row.masked_fill_(~allowed, -float("inf"))


class NaiveSampler:
    """Sampler in plain torch. One thread uses it."""

    name = "naive"

    @staticmethod
    def unavailable_reason(device: torch.device) -> str | None:
        return None

    def __init__(self, max_rows: int, vocab: int, device: torch.device, penalty_exempt_ids: list[int]) -> None:
        self.table = ReqSlotTable(max_rows, vocab, device, penalty_exempt_ids)
        self._scratch = Scratch(vocab, device)
        self._plan: Plan | None = None
        self._plan_for: tuple[int, list[int]] = (-1, [])

    def admit(self, req_slot: int, params: SamplingParams) -> None:
        """Start a new row in this request slot. Raises ValueError for a bad logit bias."""
        self.table.admit(req_slot, params)

    def append_tokens(self, req_slots: list[int], runs: list[list[int]]) -> None:
        self.table.append_tokens(req_slots, runs)

    def sample(self, logits: Tensor, req_slots: list[int], masks: Tensor | None = None) -> SamplerOutput:
        """Sample and count one token per row of logits [R, V].

        Overwrites logits that are fp32 and contiguous. masks: see Sampler. Raises ValueError for logits of another
        shape.
        """
        if logits.shape != (len(req_slots), self.table.vocab):
            raise ValueError(
                f"logits {tuple(logits.shape)} do not fit {len(req_slots)} request slots of {self.table.vocab} tokens"
            )
        logits = logits.float().contiguous()
        if masks is not None:
            apply_masks(logits, masks)
        plan = self._plan_of(req_slots)
        raw = raw_logprobs(logits, plan.params)
        self._adjust(logits, plan)
        tokens = self._sample(logits, plan)
        if plan.penalised is not None:
            self.table.count(plan.penalised, tokens)
        self.table.advance(plan.req_slots)
        return SamplerOutput(tokens, None if raw is None else raw.gather(tokens))

    def _plan_of(self, req_slots: list[int]) -> Plan:
        key = (self.table.version, list(req_slots))
        if self._plan is None or key != self._plan_for:
            self._plan, self._plan_for = make_plan(self.table, req_slots), key
        return self._plan

    def _adjust(self, logits: Tensor, plan: Plan) -> None:
        """Apply bias and penalties, then replace NaN and infinities, in place."""
        if plan.biased is not None:
            self.table.add_bias(logits, plan.biased)
        if plan.penalised is not None:
            self.table.subtract_penalties(logits, plan.penalised)
        non_finite = (~(logits.amax(dim=1) <= MAX_LOGIT)).nonzero().flatten()
        if len(non_finite):
            infinity = float("inf")
            logits[non_finite] = (
                logits[non_finite].nan_to_num_(nan=-infinity, posinf=MAX_LOGIT, neginf=-infinity).clamp_(max=MAX_LOGIT)
            )

    def _sample(self, logits: Tensor, plan: Plan) -> Tensor:
        """Return the tokens [R] int64: the largest logit for greedy rows, else the group's result."""
        largest, tokens = logits.max(dim=1)
        for kind, group in plan.groups.items():
            steps = self.table.steps[group.req_slots]
            if kind in ("open", "noise"):
                sampled = sample_full(logits, group, steps, is_noise=kind == "noise")
            else:
                sampled = sample_truncated(logits, largest, group, steps, self._scratch)
            tokens[group.rows] = sampled
        return tokens.masked_fill_(largest == -float("inf"), 0)


def make_plan(table: ReqSlotTable, req_slots: list[int]) -> Plan:
    """Group the rows of a step by kind of sampling."""
    kinds: dict[str, list[int]] = {}
    for row, req_slot in enumerate(req_slots):
        kind = _kind(table.params[req_slot], table.vocab)
        if kind is not None:
            kinds.setdefault(kind, []).append(row)
    groups = {kind: _group(table, req_slots, rows) for kind, rows in kinds.items()}
    return Plan(
        table.ids(req_slots),
        [table.params[req_slot] for req_slot in req_slots],
        groups,
        table.biased(req_slots),
        table.penalised(req_slots),
    )


def _kind(params: SamplingParams, vocab: int) -> str | None:
    if params.is_greedy:
        return None
    if params.method is Method.NOISE:
        return "noise"
    if 0 < params.top_k <= MAX_CANDIDATES and params.top_k < vocab:
        return "cut_small"
    return "cut_large" if 0 < params.top_k < vocab or params.top_p < 1 else "open"


def _group(table: ReqSlotTable, req_slots: list[int], rows: list[int]) -> Group:
    listed = [req_slots[row] for row in rows]
    params = [table.params[req_slot] for req_slot in listed]
    top_k = [p.top_k if 0 < p.top_k < table.vocab else table.vocab for p in params]
    top_p = [p.top_p if p.top_p < 1 else float("inf") for p in params]
    return Group(
        rows=table.ids(rows),
        req_slots=table.ids(listed),
        seeds=table.seeds(listed),
        scale=on_device([inverse_temperature(p) for p in params], torch.float32, table.device),
        top_k=table.ids(top_k),
        top_p=on_device(top_p, torch.float64, table.device),
        noise=on_device([p.noise for p in params], torch.float32, table.device),
        num_candidates=min(max(top_k), MAX_CANDIDATES) + 1,
    )


def _chunks(entries: Tensor) -> Iterator[Tensor]:
    return (entries[start : start + ROWS_AT_ONCE] for start in range(0, len(entries), ROWS_AT_ONCE))


class Scratch:
    """Reused temporaries: page faults of new memory would cost more than the arithmetic."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.single = torch.empty(ROWS_AT_ONCE, vocab, device=device)
        self.double = torch.empty(ROWS_AT_ONCE, vocab, dtype=torch.float64, device=device)

    def total_mass(self, logits: Tensor, largest: Tensor, group: Group) -> Tensor:
        """Return each row's sum of exp(s - max s), [r] fp64.

        The sum is over the vocabulary. The rows are those of `group` in logits [R, V]; largest [R].
        """
        single, double = self.single[: len(group)], self.double[: len(group)]
        scale = group.scale.unsqueeze(1)
        torch.index_select(logits, 0, group.rows, out=single)
        single.mul_(scale).sub_(largest[group.rows].unsqueeze(1) * scale).exp_()
        return double.copy_(single).sum(dim=1)


def sample_truncated(logits: Tensor, largest: Tensor, group: Group, steps: Tensor, scratch: Scratch) -> Tensor:
    """Sample rows with top_k or top_p. Sort a whole row only if its largest values do not decide.

    logits [R, V] fp32; largest [R] fp32: the maximum of each row; group: r of these rows; steps [r] int64.
    Returns token ids [r] int64.
    """
    rows, vocab = group.rows, logits.shape[1]
    total = torch.zeros(len(group), dtype=torch.float64, device=logits.device)
    with_top_p = (group.top_p < 1).nonzero().flatten()
    for part in _chunks(with_top_p):
        total[part] = scratch.total_mass(logits, largest, group[part])
    values, ids = ranked_top(logits if len(group) == len(logits) else logits[rows], min(group.num_candidates, vocab))
    kept = truncation_mask(values, largest[rows], group, total)
    # The selected candidates decide if the last kept value is above the smallest candidate: no tie is missing then.
    last = values.gather(1, kept.sum(dim=1, keepdim=True) - 1)
    undecided = ((last <= values[:, -1:]) & (last > -float("inf"))).flatten()
    sampled = gumbel_argmax(values, ids, kept, group, steps)
    if values.shape[1] < vocab:
        for part in _chunks(undecided.nonzero().flatten()):
            some = group[part]
            values, ids = torch.sort(logits[some.rows], dim=1, descending=True, stable=True)
            kept = truncation_mask(values, largest[some.rows], some, total[part])
            sampled[part] = gumbel_argmax(values, ids, kept, some, steps[part])
    return sampled


def ranked_top(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest of each row of logits [r, V].

    They are ranked by value, then id. Returns values [r, count] fp32 and ids [r, count] int64. Some values equal to the
    last one may be missing.
    """
    values, ids = logits.topk(count, dim=1)
    ids, by_id = ids.sort(dim=1)
    values, order = torch.sort(values.gather(1, by_id), dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)


def truncation_mask(values: Tensor, largest: Tensor, group: Group, total: Tensor) -> Tensor:
    """Return which ranked values [r, n] are within top_k and top_p: [r, n] bool.

    The kept values are a prefix of at least one.
    """
    scale = group.scale.unsqueeze(1)
    mass = ((values * scale) - largest.unsqueeze(1) * scale).exp_().double()
    before = mass.cumsum(dim=1).sub_(mass)
    kept = (before < (group.top_p * total).unsqueeze(1)) | (group.top_p >= 1).unsqueeze(1)
    kept &= torch.arange(values.shape[1], device=values.device) < group.top_k.unsqueeze(1)
    kept[:, 0] = True
    return kept


def gumbel_argmax(values: Tensor, ids: Tensor, kept: Tensor, group: Group, steps: Tensor) -> Tensor:
    """Return the kept candidate with the largest s + gumbel, [r] int64. On a tie, returns the lowest id."""
    width = int(kept.sum(dim=1).max())
    values, ids, kept = values[:, :width], ids[:, :width], kept[:, :width]
    words = philox.words_at(group.seeds, steps, ids, philox.DOMAIN_GUMBEL)
    score = (values * group.scale.unsqueeze(1)).add_(philox.to_gumbel(words)).masked_fill_(~kept, -float("inf"))
    best = score.amax(dim=1, keepdim=True)
    return ids.masked_fill(score != best, torch.iinfo(torch.int64).max).amin(dim=1)


def sample_full(logits: Tensor, group: Group, steps: Tensor, is_noise: bool) -> Tensor:
    """Sample from the whole vocabulary: logits [R, V] fp32, steps [r] int64 -> ids [r] int64.

    is_noise: return argmax(logits / T + U(0, noise))
    """
    sampled = torch.empty_like(group.rows)
    domain = philox.DOMAIN_NOISE if is_noise else philox.DOMAIN_GUMBEL
    for part in _chunks(torch.arange(len(group), device=logits.device)):
        some = group[part]
        words = philox.words_of_vocab(some.seeds, steps[part], logits.shape[1], domain)
        added = philox.to_uniform(words).mul_(some.noise.unsqueeze(1)) if is_noise else philox.to_gumbel(words)
        sampled[part] = (logits[some.rows] * some.scale.unsqueeze(1)).add_(added).max(dim=1).indices
    return sampled
