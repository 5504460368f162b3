"""What the evaluation asks of an engine, and a slow one over the training model."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from demo import vocabulary
from demo.model import Rwkv7, State
from demo.vocabulary import Compact

STOP_IDS = frozenset((0, 261, 24281))
STOP = "\n\n"


class Talker(Protocol):
    """An engine, greedy. A stop (`\\n\\n`, token 0, a new label) is not part of an answer."""

    def complete(self, prompts: list[str], max_tokens: int) -> list[str]:
        """The answers to prompts that know nothing of each other."""
        ...

    def converse(self, sessions: list[list[str]], max_tokens: int) -> list[list[str]]:
        """The answers to each session's prompts, one after the other on one state."""
        ...


class TorchTalker:
    """A talker over the training model, token by token."""

    def __init__(self, model: Rwkv7, compact: Compact) -> None:
        self.model, self.compact = model.eval(), compact
        self.device = model.emb.weight.device

    def begun(self, batch: int) -> State:
        """The state that prompts begin with."""
        return self.model.zero_state(batch)

    def complete(self, prompts: list[str], max_tokens: int) -> list[str]:
        """See `Talker`."""
        return self._turn(prompts, self.begun(len(prompts)), max_tokens)

    def converse(self, sessions: list[list[str]], max_tokens: int) -> list[list[str]]:
        """See `Talker`; every prompt after the first begins with the blank line that ended the answer."""
        state = self.begun(len(sessions))
        answers: list[list[str]] = [[] for _ in sessions]
        for turn in range(max(len(s) for s in sessions)):
            prompts = [(STOP if turn else "") + s[turn] if turn < len(s) else "" for s in sessions]
            for index, answer in enumerate(self._turn(prompts, state, max_tokens)):
                if turn < len(sessions[index]):
                    answers[index].append(answer)
        return answers

    def _start_records(self, tokens: Tensor, active: Tensor, state: State) -> Tensor:
        before = (list(state.att), list(state.ffn), list(state.wkv))
        logits = self.model.step(tokens, state)
        for now, old in zip((state.att, state.ffn, state.wkv), before, strict=True):
            for i, was in enumerate(old):
                now[i] = torch.where(active.view(-1, *[1] * (was.dim() - 1)), now[i], was)
        return logits

    def _turn(self, prompts: list[str], state: State, max_tokens: int) -> list[str]:
        queues = [
            self.compact.of_id[np.array(vocabulary.encode(p), dtype=np.int64)].tolist() if p else [] for p in prompts
        ]
        written: list[list[int]] = [[] for _ in prompts]
        done = [not queue for queue in queues]
        at = [0] * len(prompts)
        following = [0] * len(prompts)
        while not all(done):
            tokens = [q[a] if a < len(q) else f for q, a, f in zip(queues, at, following, strict=True)]
            active = torch.tensor([not d for d in done], device=self.device)
            chosen = self._start_records(torch.tensor(tokens, device=self.device), active, state).argmax(-1).tolist()
            for i, row in enumerate(chosen):
                if done[i]:
                    continue
                at[i] += 1
                if at[i] < len(queues[i]):
                    continue
                token = int(self.compact.ids[row]) if row < self.compact.unused else 65535
                following[i] = row
                if token in STOP_IDS or len(written[i]) >= max_tokens:
                    done[i] = True
                else:
                    written[i].append(token)
                    done[i] = STOP in vocabulary.decode(written[i][-2:])
        return [vocabulary.decode(tokens).split(STOP)[0] for tokens in written]
