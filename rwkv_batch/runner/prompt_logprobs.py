"""Log-probabilities of prompts' own tokens, told while they are read. Engine thread.

The head takes what a step has read a few rows at a time, so that there are never logits of a whole prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from native.transfer import on_device
from rwkv_batch.core.scheduler import ScheduledRow
from rwkv_batch.core.sequence import Sequence
from rwkv_batch.request import TokenLogprob
from rwkv_batch.runner.host_copy import HostCopy
from rwkv_batch.runner.stage import Stage
from rwkv_batch.tokenizer import Tokenizer
from sampling.logprobs import target_logprobs

HEAD_ROWS = 256
"""Rows of logits and of log-probabilities that there are at a time, 64 MiB each for 65,536 tokens, however long the
prompts and however many."""
RowScores = tuple[Sequence, list[TokenLogprob]]
"""A row, and its prompt's next tokens."""


@dataclass(slots=True)
class InFlightScores:
    """What a step tells of its prompts, on its way to the host."""

    rows: list[tuple[Sequence, range]]
    """which positions of which prompt, in order"""
    copy: HostCopy
    """of all of them: log-probabilities [S] fp32, likeliest tokens [S, k] int64 and theirs [S, k] fp32"""


class PromptScorer:
    """The head of the last stage over tokens that are read."""

    def __init__(self, stage: Stage, tokenizer: Tokenizer) -> None:
        self._stage = stage
        self._byte_table = tokenizer.byte_table

    def launch(self, x: Tensor, rows: list[ScheduledRow]) -> InFlightScores:
        """Score a step's prompts: x [T, C] as the last layer left it, for `rows` in their order. Does not wait.

        Call it before the rows are told that the step was launched.
        """
        scored: list[tuple[Sequence, range]] = []
        tokens: list[int] = []
        targets: list[int] = []
        begin = 0
        for row in rows:
            positions, sequence = row.scored, row.sequence
            if positions:
                scored.append((sequence, positions))
                first = begin + positions.start - 1 - sequence.num_computed_tokens
                tokens += range(first, first + len(positions))
                targets += sequence.request.prompt[positions.start : positions.stop]
            begin += row.num_tokens
        return InFlightScores(scored, self._score(x, tokens, targets, max(_top(sequence) for sequence, _ in scored)))

    def _score(self, x: Tensor, tokens: list[int], targets: list[int], count: int) -> HostCopy:
        """The log-probability of each of `targets` behind its token of x, and the `count` largest there."""
        at, after = (on_device(ids, torch.int64, x.device) for ids in (tokens, targets))
        parts = [
            target_logprobs(self._stage.logits_of(x, some_tokens), some_targets, count)
            for some_tokens, some_targets in zip(at.split(HEAD_ROWS), after.split(HEAD_ROWS), strict=True)
        ]
        return HostCopy(
            torch.cat([part.chosen for part in parts]),
            torch.cat([part.top_ids for part in parts]),
            torch.cat([part.top for part in parts]),
        )

    def read(self, scored: InFlightScores) -> list[RowScores]:
        """The log-probabilities by row. Waits for the step to end."""
        table = self._byte_table
        chosen, ids, top = (tensor.tolist() for tensor in scored.copy.read())
        returned: list[RowScores] = []
        at = 0
        for sequence, positions in scored.rows:
            count = _top(sequence)
            entries = []
            for token in sequence.request.prompt[positions.start : positions.stop]:
                alternatives = [(table[i], value) for i, value in zip(ids[at][:count], top[at][:count], strict=True)]
                entries.append(TokenLogprob(table[token], chosen[at], alternatives))
                at += 1
            returned.append((sequence, entries))
        return returned


def _top(sequence: Sequence) -> int:
    """How many of the likeliest tokens the row wants to know."""
    wanted = sequence.request.prompt_logprobs
    return 0 if wanted is None else wanted.top
