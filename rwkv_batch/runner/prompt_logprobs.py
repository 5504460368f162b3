"""Log-probabilities of prompt tokens, computed while the prompt is read. Engine thread.

The head runs on a few rows at a time, so a prompt's logits never exist all at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from native.tensors import on_device
from rwkv_batch.core.scheduler import ScheduledRow
from rwkv_batch.core.sequence import Sequence
from rwkv_batch.request import TokenLogprob
from rwkv_batch.runner.links import HostCopy
from rwkv_batch.runner.pipeline import Stage
from rwkv_batch.tokenizer import Tokenizer
from sampling.sampler import target_logprobs

HEAD_ROWS = 256
"""Rows of the head at a time: 64 MiB of logits and of log-probabilities each for V = 65,536."""
RowScores = tuple[Sequence, list[TokenLogprob]]
"""A row, and its next prompt tokens."""


@dataclass(slots=True)
class InFlightScores:
    """The scores of one step, being copied to the host."""

    rows: list[tuple[Sequence, range]]
    """the positions of each prompt, in order"""
    copy: HostCopy
    """of all positions: log-probabilities [S] fp32, likeliest tokens [S, k] int64 and their values [S, k] fp32"""


class PromptScorer:
    """Scores prompt tokens. Runs the last stage's head."""

    def __init__(self, stage: Stage, tokenizer: Tokenizer) -> None:
        self._stage = stage
        self._byte_table = tokenizer.byte_table

    def launch(self, x: Tensor, rows: list[ScheduledRow]) -> InFlightScores:
        """Score a step's prompts from the last layer's output for `rows`. Does not wait.

        x [T, C] is that output. Call it before the rows record the launch.
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
            begin += row.num_tokens + (0 if sequence.draft is None else len(sequence.draft.tokens))
        return InFlightScores(scored, self._score(x, tokens, targets, max(_top(sequence) for sequence, _ in scored)))

    def _score(self, x: Tensor, tokens: list[int], targets: list[int], count: int) -> HostCopy:
        """Return the log-probability of targets[i] after token tokens[i] of x. Also return the `count` largest."""
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
        """Return the log-probabilities by row. Waits for the step."""
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
    """Return how many of the likeliest tokens the row requests."""
    requested = sequence.request.prompt_logprobs
    return 0 if requested is None else requested.top
