"""Log-probabilities of raw logits, taken before a sampler changes the logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from native.tensors import on_device
from sampling.sampler import Logprobs


@dataclass(slots=True)
class RawLogprobs:
    """log_softmax of those rows of a step that requested log-probabilities."""

    rows: Tensor
    """[q] int64, in the step"""
    values: Tensor
    """[q, V] fp32, -inf instead of NaN"""

    def gather(self, tokens: Tensor, count: int) -> Logprobs:
        """Return the sampled tokens' values [R] and the `count` largest [R, count].

        Rows without a request have zeros.
        """
        ids = tokens.new_zeros(len(tokens), count)
        top = self.values.new_zeros(len(tokens), count)
        chosen = self.values.new_zeros(len(tokens))
        top[self.rows], ids[self.rows] = self.values.topk(count, dim=1)
        chosen[self.rows] = self.values.gather(1, tokens[self.rows].unsqueeze(1)).squeeze(1)
        return Logprobs(chosen=chosen, top_ids=ids, top=top)


def target_logprobs(logits: Tensor, targets: Tensor, count: int) -> Logprobs:
    """Return log_softmax of logits [R, V] fp32 at targets [R] int64 and at the `count` largest.

    If a target has the largest logit, its value equals the first of `top` exactly. A row's values do not depend on R:
    log_softmax sums each row by itself.
    """
    # On a GPU, topk takes several times as long as the rest of this function.
    top_ids = logits.max(dim=1, keepdim=True).indices[:, :count] if count < 2 else logits.topk(count, dim=1).indices
    values, lowest = torch.log_softmax(logits, dim=1), -float("inf")
    return Logprobs(
        chosen=values.gather(1, targets.unsqueeze(1)).nan_to_num_(nan=lowest, neginf=lowest).squeeze(1),
        top_ids=top_ids,
        top=values.gather(1, top_ids).nan_to_num_(nan=lowest, neginf=lowest),
    )


def raw_logprobs(logits: Tensor, rows: list[int]) -> RawLogprobs | None:
    """Of these rows of logits [R, V]; None for no rows."""
    if not rows:
        return None
    picked = on_device(rows, torch.int64, logits.device)
    values = torch.log_softmax(logits[picked].float(), dim=1)
    return RawLogprobs(picked, values.nan_to_num_(nan=-float("inf"), neginf=-float("inf")))
