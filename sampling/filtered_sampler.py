"""The definition's filters before a sampler that has none of its own."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from native.tensors import on_device
from sampling.filters import FilterState, Group, apply_filters, masses
from sampling.naive import apply_masks
from sampling.params import MAX_WINDOW, SamplingParams
from sampling.req_slots import ReqSlotTable
from sampling.row_context import RowContext, split
from sampling.sampler import Sampler, SamplerOutput, raw_logprobs


class FilteredSampler:
    """Applies the filters of each row, then samples with another sampler. Does not wait for the device."""

    def __init__(
        self, inner: Sampler, max_rows: int, vocab: int, device: torch.device, penalty_exempt_ids: list[int]
    ) -> None:
        """inner: has the same request slots; see Sampler for the rest"""
        self.name = inner.name
        self._inner = inner
        self._state = FilterState(
            ReqSlotTable(max_rows, vocab, device, penalty_exempt_ids),
            torch.full((max_rows, MAX_WINDOW), -1, dtype=torch.int32, device=device),
            torch.zeros(max_rows, dtype=torch.float64, device=device),
            [0] * max_rows,
        )
        self._groups: tuple[tuple[int, list[int]], list[Group]] | None = None

    def admit(self, req_slot: int, params: SamplingParams, context: RowContext) -> None:
        """Start a new row with filters in this request slot. Raises ValueError for a bad logit bias."""
        assert params.filters is not None
        steps, inner = split(params, self._state.table.vocab)
        state = self._state
        state.table.admit(req_slot, params)
        self._inner.admit(req_slot, inner)
        state.steps[req_slot], state.contexts[req_slot] = steps, context
        prompt = list(context.prompt[-MAX_WINDOW:])
        state.num_known[req_slot] = len(prompt)
        state.history[req_slot] = -1
        if prompt:
            tokens = on_device(prompt, torch.int32, state.history.device)
            state.history[req_slot, MAX_WINDOW - len(prompt) :] = tokens
        state.mu[req_slot] = 2 * params.filters.mirostat_tau

    def append_tokens(self, req_slots: list[int], runs: list[list[int]]) -> None:
        """See Sampler. Mirostat does not learn from these tokens."""
        self._state.table.append_tokens(req_slots, runs)
        self._inner.append_tokens(req_slots, runs)
        for req_slot, run in zip(req_slots, runs, strict=True):
            at = on_device([req_slot], torch.int64, self._state.history.device)
            tokens = on_device(run, torch.int32, self._state.history.device)
            self._remember(at, [req_slot], tokens.unsqueeze(0))

    def _remember(self, req_slots: Tensor, listed: list[int], tokens: Tensor) -> None:
        """Append tokens [r, n] int32 to the history."""
        history = self._state.history
        history[req_slots] = torch.cat((history[req_slots], tokens), dim=1)[:, -MAX_WINDOW:]
        for req_slot in listed:
            self._state.num_known[req_slot] = min(self._state.num_known[req_slot] + tokens.shape[1], MAX_WINDOW)

    def sample(self, logits: Tensor, req_slots: list[int], masks: Tensor | None = None) -> SamplerOutput:
        """See Sampler. Every row has filters. Overwrites fp32 logits."""
        state = self._state
        params = [state.table.params[req_slot] for req_slot in req_slots]
        logits = logits.float().contiguous()
        if masks is not None:
            apply_masks(logits, masks)
        raw = raw_logprobs(logits, params)
        groups = self._groups_of(req_slots)
        for group in groups:
            logits[group.rows] = apply_filters(logits[group.rows], group)
        measures = [masses(logits[group.rows])[::2] if "mirostat" in group.steps else None for group in groups]
        filtered = {id(group): logits[group.rows] for group, one in zip(groups, measures, strict=True) if one}
        tokens = self._inner.sample(logits, req_slots).token_ids
        for group, measure in zip(groups, measures, strict=True):
            chosen = tokens[group.rows]
            if measure is not None:
                largest, total = measure
                value = filtered[id(group)].gather(1, chosen.unsqueeze(1))
                surprise = ((value - largest).double() - total.log()).flatten() / -math.log(2)
                error = (surprise - group.column("mirostat_tau").flatten()).nan_to_num_(0.0, 0.0, 0.0)
                state.mu[group.req_slots] -= group.column("mirostat_eta").flatten() * error
            if group.penalised is not None:
                state.table.count(group.penalised, chosen)
            self._remember(group.req_slots, group.req_slot_list, chosen.int().unsqueeze(1))
            state.table.advance(group.req_slots)
        return SamplerOutput(tokens, None if raw is None else raw.gather(tokens))

    def _groups_of(self, req_slots: list[int]) -> list[Group]:
        key = (self._state.table.version, list(req_slots))
        if self._groups is None or self._groups[0] != key:
            rows: dict[tuple[str, ...], list[int]] = {}
            for row, req_slot in enumerate(req_slots):
                rows.setdefault(self._state.steps[req_slot], []).append(row)
            groups = [Group(some, [req_slots[row] for row in some], steps, self._state) for steps, some in rows.items()]
            self._groups = (key, groups)
        return self._groups[1]
