"""A draft model's guesses as CUDA graphs: one replay per token, and the host stages all tokens of a call at once.

A graph reads its step's slots from a table on the device, at a row that it counts up itself. It reads the token of the
table, or the one that it chose in the step before. The device fills in the table if the guesses follow a step that
verifies the last ones: it need not wait until the host knows which were accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from rwkv_batch.core.drafters import MAX_DRAFT_TOKENS
from rwkv_batch.model.ops import DraftStep, HasLateTokens
from rwkv_batch.model.step_inputs import StepInputs
from rwkv_batch.runner.graphs.capture import GraphStage, StagedArrays
from rwkv_batch.runner.graphs.decode import DeviceSampler, padded_sizes
from state_pool.layout import DUMMY_SLOT, ZERO_SLOT

CHOSEN = -1
"""Token of a step that reads the one chosen in the step before."""
READ, WRITE, TOKEN = range(3)
"""Columns of the table."""
NUM_NUMBERS = 6
"""Numbers of a row before its drafted tokens, see `HasLateTokens.fill_guess_table`."""


class Verified(NamedTuple):
    """A row whose guesses a launched step verifies."""

    ring: int
    """the first slot of its ring"""
    position: int
    """tokens before its drafted ones"""
    num_guesses: int
    """the model has read all but the last"""
    req_slot: int
    """its request slot"""
    tokens: list[int]
    """the drafted ones, the first guesses"""


class GuessGraphs:
    """Captures and replays steps over up to `max_rows` rows, of which a call takes up to `max_steps`. Engine thread."""

    def __init__(
        self,
        graph_stage: GraphStage,
        max_rows: int,
        max_steps: int,
        sampler: DeviceSampler,
        draft_step: DraftStep | None = None,
    ) -> None:
        """graph_stage: of all layers; draft_step: the same model's step of few rows in one launch, if it has one"""
        self._stage, self._sampler, self._draft_step = graph_stage, sampler, draft_step
        self._sizes, device = padded_sizes(max_rows), graph_stage.device
        self._rows = rows = self._sizes[-1]
        self._max_steps = max_steps
        lengths = {"table": max_steps * 3 * rows, "step": 1, "verified": rows * (NUM_NUMBERS + MAX_DRAFT_TOKENS)}
        self._staged = StagedArrays(lengths, [device], depth=2)
        self._numbers = torch.arange(rows + 1, device=device)
        self._req_slots = self._numbers.int()
        self._chosen = torch.zeros(rows, dtype=torch.int64, device=device)
        self._guesses = torch.zeros(max_steps, rows, dtype=torch.int64, device=device)
        assert graph_stage.stage.head is not None, "a draft model is on one device"
        vocab = graph_stage.stage.head.linear.weight.shape[0]
        self.logits = torch.empty(rows, vocab, dtype=torch.float32, device=device)
        self._captured: dict[int, torch.cuda.CUDAGraph] = {}
        self._seconds: dict[int, float] = {}

    def warm_up(self) -> None:
        """Capture every number of rows, the largest first."""
        for size in reversed(self._sizes):
            self._graph(size)

    def seconds(self, num_rows: int) -> float:
        """Return the seconds of a step. 0: it is not captured."""
        return self._seconds.get(self._size_for(num_rows), 0.0)

    @torch.inference_mode()
    def run(self, steps: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]]) -> Tensor:
        """Launch steps: read slots, write slots and tokens of each row; CHOSEN: the token that the step before chose.

        Returns the chosen tokens [max_steps, R] int64, R at least B. The next run overwrites them. Does not wait.
        """
        num_rows = len(steps[0][READ])
        size = self._size_for(num_rows)
        self._graph(size)  # a capture fills the table
        self._fill(size, steps)
        return self.replay(num_rows, len(steps))

    def fill_ahead(self, rows: Sequence[Verified], last: Tensor, after: Tensor, num_slots: int, num_steps: int) -> None:
        """Prepare up to `num_steps` steps that follow a step that verifies guesses.

        last [request slots], after [n] int64: see `HasLateTokens.fill_guess_table`
        """
        num_rows, size, staged = len(rows), self._size_for(len(rows)), self._staged.on_device[0]
        self._graph(size)  # a capture fills the table
        with self._staged.filling() as host:
            host["step"][0] = 0
            verified, first = host["verified"].reshape(self._rows, -1), 0
            for number, row in enumerate(rows):
                count = len(row.tokens)
                verified[number, : NUM_NUMBERS + count] = (*row[:4], first, count, *row.tokens)
                first += count
        table = staged["table"].view(self._max_steps, 3, self._rows)[:num_steps]
        ops = cast(HasLateTokens, self._stage.stage.ops)  # graphs need the cuda kernels
        ops.fill_guess_table(table, staged["verified"].view(self._rows, -1), num_rows, size, last, after, num_slots)

    def replay(self, num_rows: int, num_steps: int) -> Tensor:
        """Launch the next prepared steps. Returns the chosen tokens of all steps [max_steps, R] int64, see `run`."""
        graph = self._graph(self._size_for(num_rows))
        for _ in range(num_steps):
            graph.replay()
        return self._guesses

    def _size_for(self, num_rows: int) -> int:
        return next(size for size in self._sizes if size >= num_rows)

    def _fill(self, size: int, steps: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]]) -> None:
        num_rows = len(steps[0][READ]) if steps else 0
        with self._staged.filling() as host:
            table = host["table"].reshape(self._max_steps, 3, self._rows)
            table[: len(steps), :, :num_rows] = np.array(steps, dtype=np.int64).reshape(len(steps), 3, num_rows)
            unused = table[: len(steps) or None, :, num_rows:size]
            unused[:, READ], unused[:, WRITE], unused[:, TOKEN] = ZERO_SLOT, DUMMY_SLOT, 0
            host["step"][0] = 0

    def _graph(self, size: int) -> torch.cuda.CUDAGraph:
        if size not in self._captured:
            with self._stage.current():
                self._fill(size, ())
                name = f"a graph that guesses for {size} rows on {self._stage.device}"
                self._captured[size] = self._stage.recorder.record(lambda: self._step(size), name)
            self._seconds[size] = self._stage.recorder.seconds
        return self._captured[size]

    def _step(self, size: int) -> None:
        """Inside a graph: run a step, and count it."""
        staged, numbers = self._staged.on_device[0], self._numbers
        step, chosen = staged["step"], self._chosen
        table = staged["table"].view(self._max_steps, 3, self._rows)
        if self._draft_step is not None and size <= self._draft_step.max_rows:
            self._draft_step.launch(size, table, step, chosen, self._guesses)
            return
        now = table.index_select(0, step)[0]
        given = now[TOKEN, :size]
        inputs = StepInputs(
            tokens=torch.where(given < 0, chosen[:size], given),
            cu_seqlens=numbers[: size + 1],
            read_slots=now[READ, :size],
            write_slots=now[WRITE, :size],
            logit_tokens=numbers[:size],
            max_seqlen=1,
        )
        logits = self._stage.stage.logits(self._stage.forward(inputs, inputs.tokens), inputs, self.logits)
        self._sampler.sample_on_device(logits, self._req_slots[:size], chosen[:size])
        self._guesses.index_copy_(0, step, chosen.unsqueeze(0))
        step += 1
