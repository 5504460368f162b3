"""Expected log-probabilities: the log-softmax of all logits of a text, by a separate forward."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from rwkv_batch.model.step_inputs import step_inputs
from rwkv_batch.model.weights import open_weights
from rwkv_batch.runner.pipeline import Pipeline


class LogprobOracle:
    """A model on the CPU in fp32, by plain torch; each text in one forward."""

    def __init__(self, model: Path) -> None:
        self._pipeline = Pipeline(open_weights(model), ("cpu",), "fp32", "naive")
        self._pipeline.allocate_slots(3)

    @torch.inference_mode()
    def logprobs(self, ids: list[int]) -> Tensor:
        """Return [T, V] fp64: log-probabilities of the next token, after each of `ids`."""
        inputs = step_inputs([ids], [0], [2], [0])
        inputs.logit_tokens = torch.arange(len(ids))
        return self._pipeline.forward(inputs).double().log_softmax(dim=1)

    def token_logprobs(self, ids: list[int], start: int = 1) -> list[float]:
        rows = self.logprobs(ids)
        return [float(rows[i - 1, ids[i]]) for i in range(start, len(ids))]
