"""Runs a draft model: a small model on the last stage's device that guesses the next tokens of rows with drafts.

Each row has a ring of slots, one per position. After a verify step it continues from the last position whose tokens
were accepted, so nothing is read again. A row that ends frees its ring.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import msgspec
import torch
from torch import Tensor

from rwkv_batch.config import EngineConfig
from rwkv_batch.core.drafters import CHUNK, MAX_DRAFT_TOKENS, MAX_ROWS, RING, ModelDrafter, Wanted
from rwkv_batch.errors import StartupError
from rwkv_batch.kernels.registry import choose_ops
from rwkv_batch.model.layer import Layer
from rwkv_batch.model.ops import DraftStep, MakesDraftSteps
from rwkv_batch.model.state import StateFormat
from rwkv_batch.model.step_inputs import step_inputs
from rwkv_batch.runner.graphs.capture import make_graph_stages
from rwkv_batch.runner.graphs.decode import DecodeGraphs, Greedy
from rwkv_batch.runner.graphs.guess import CHOSEN, GuessGraphs, Verified
from rwkv_batch.runner.graphs.prefill import PrefillGraphs
from rwkv_batch.runner.graphs.prefill_inputs import PrefillSize
from rwkv_batch.runner.links import DeviceGuesses, TokenCopies
from rwkv_batch.runner.model_files import load_pipeline, open_model
from rwkv_batch.runner.pipeline import Pipeline, Stage, resolve_backends
from sampling.rapid import RapidSampler
from state_pool.layout import FIRST_FREE_SLOT, ZERO_SLOT

logger = logging.getLogger(__name__)

READ_SIZES = (PrefillSize(1, 32), PrefillSize(1, CHUNK + 32), PrefillSize(8, 256), PrefillSize(MAX_ROWS, 512))
"""Of graphs that read texts."""
FEW_TOKENS = 1
"""Up to this many known tokens are read one by one with graphs: a graph that reads more takes longer."""


def fastest_dtypes(dtype: str, draft: EngineConfig, device: torch.device) -> tuple[str, ...]:
    """Return the types of a draft model's weights to try.

    dtype: of the large model's weights; draft: the draft model's configuration. Launches take most of a guess's time.
    In fp16, small models have a step of one launch; else fp8 has fewer launches than fp16. Raises StartupError.
    """
    is_quantised = dtype in ("fp8", "int8", "int4")
    if device.type != "cuda" or not is_quantised:
        return ("auto",)
    shape = open_model(draft.model_path).shape
    try:
        ops, _ = choose_ops(resolve_backends(shape.version, draft.devices, draft)["kernels"], device, shape.version)
    except ValueError as error:
        raise StartupError(str(error)) from error
    has_draft_step = isinstance(ops, MakesDraftSteps) and ops.fits_draft_step(shape, device)
    return ("auto",) if has_draft_step else ("fp8", "auto")


def _load(config: EngineConfig, device: torch.device, dtypes: Sequence[str]) -> Pipeline:
    """Load the draft model in the first type that it has kernels for. Raises StartupError.

    dtypes: empty: those of `fastest_dtypes`
    """
    own: dict[str, Any] = {"model_path": config.draft_model, "devices": (str(device),), "wkv_state": "auto"}
    own |= {"activation_bits": 8, "adapters": (), "layers": (), "resident": (), "deterministic": False}
    own["auto_fallback_fields"] = ("wkv_state", "kernels")
    draft = msgspec.structs.replace(config, **own)
    configs = [
        msgspec.structs.replace(draft, dtype=dtype) for dtype in dtypes or fastest_dtypes(config.dtype, draft, device)
    ]
    for one in configs[:-1]:
        try:
            return load_pipeline(one)[1]
        except StartupError as error:
            logger.warning("the draft model does not run in %s, so it runs in another type: %s", one.dtype, error)
    return load_pipeline(configs[-1])[1]


def make_draft_step(stage: Stage) -> DraftStep | None:
    """Return a model's step in one launch. None: it has none."""
    state, head, embedding, ops = stage.state, stage.head, stage.embedding, stage.ops
    is_fp16 = stage.precision.weights_name == "float16" and stage.precision.wkv_state is StateFormat.FP16
    if (
        not is_fp16
        or not isinstance(ops, MakesDraftSteps)
        or not ops.fits_draft_step(stage.shape, stage.precision.device)
    ):
        return None
    assert state is not None and head is not None and embedding is not None, "a draft model is on one device"
    layers = cast(Sequence[Layer], stage.layers)
    return ops.make_draft_step(layers, embedding.table, head.ln_out, head.linear, state)


class _Row(NamedTuple):
    """A row of a call: the known tokens to read, and the position before them."""

    drafter: ModelDrafter
    ring: int
    """the first slot of its ring"""
    position: int
    tokens: list[int]
    start: int
    """position of the first of `tokens`: `position`, or later in the text if nothing is read yet"""
    num_tokens: int
    """tokens to guess; 0: more of its text must be read first"""

    @property
    def known(self) -> list[int]:
        """Return the tokens to read before those whose next ones are guessed."""
        return self.tokens[:-1] if self.num_tokens else self.tokens

    def slot(self, read: int) -> int:
        """Return the slot of the state after `read` of its tokens and guesses."""
        if not read and not self.position:
            return ZERO_SLOT
        return self.ring + (self.start + read) % RING


def groups_to_read(rows: Sequence[_Row]) -> list[list[_Row]]:
    """Split rows so that each group's known tokens fit a graph: kernel by kernel, reading takes ten times as long."""
    groups = list[list[_Row]]()
    tokens = 0
    for row in rows:
        tokens += len(row.known)
        if not groups or not READ_SIZES[-1].holds(len(groups[-1]) + 1, tokens):
            groups.append([])
            tokens = len(row.known)
        groups[-1].append(row)
    return groups


class _Begun(NamedTuple):
    """Steps that the device runs before the host knows which guesses are accepted."""

    rows: list[Verified]
    num_steps: int


def _num_steps(counts: list[int], firsts: list[int]) -> int:
    """Return the number of steps that guess this many tokens of each row, from the step `firsts` on.

    A row that reads a token more than others guesses one less: a step for it alone would cost all rows.
    """
    return max(max(counts) + min(firsts), max(firsts) + 1)


class DraftSteps:
    """Implements `DraftModel`. Engine thread."""

    @classmethod
    def load(cls, config: EngineConfig, device: torch.device) -> DraftSteps | None:
        """Load the configured draft model on a device; None: none is used. Raises StartupError."""
        if config.speculate == "model" and not config.draft_model:
            raise StartupError(
                "--speculate model needs a small model that guesses tokens; give its file: --draft-model FILE"
            )
        return cls(config, device) if config.uses_draft_model else None

    def __init__(self, config: EngineConfig, device: torch.device, dtypes: Sequence[str] = ()) -> None:
        """Load the model. dtypes: types of its weights to try, default `fastest_dtypes`. Raises StartupError."""
        self._pipeline = _load(config, device, dtypes)
        slots = FIRST_FREE_SLOT + MAX_ROWS * RING
        try:
            self._pipeline.allocate_slots(slots)
            draft_step = make_draft_step(self._pipeline.stages[0])
        except (RuntimeError, MemoryError) as error:
            size = f"{slots} slots of {self._pipeline.slot_bytes >> 10} KiB for the draft model do not fit ({error})"
            raise StartupError(f"Out of memory: {size}. Take a smaller --draft-model.") from error
        self._rings: weakref.WeakKeyDictionary[ModelDrafter, int] = weakref.WeakKeyDictionary()
        self._free = list(range(FIRST_FREE_SLOT, slots, RING))
        self._begun: _Begun | None = None
        self._copies = TokenCopies(device, MAX_ROWS * (MAX_DRAFT_TOKENS + FEW_TOKENS))
        self._graphs: GuessGraphs | None = None
        self._reading: PrefillGraphs | None = None
        if device.type == "cuda" and DecodeGraphs.unavailable_reason(self._pipeline.stages, Greedy()) is None:
            stages = make_graph_stages(self._pipeline.stages, READ_SIZES[-1].tokens, depth=2)
            vocab = self._pipeline.weights.shape.vocab
            sampler = RapidSampler(MAX_ROWS, vocab, device, [])
            self._graphs = GuessGraphs(stages[0], MAX_ROWS, MAX_DRAFT_TOKENS + FEW_TOKENS, sampler, draft_step)
            self._reading = PrefillGraphs(stages, self._graphs.logits, sizes=READ_SIZES)
            self._reading.warm_up()
            self._graphs.warm_up()

    @torch.inference_mode()
    def guess(self, wanted: list[Wanted]) -> DeviceGuesses | None:
        """See `DraftModel`."""
        started, begun, self._begun = time.monotonic(), self._begun, None
        if begun is not None and self._graphs is not None and (firsts := self._first_guesses(begun, wanted)):
            for drafter, _, length, _ in wanted:
                drafter.num_read = length
            counts = [one.num_tokens for one in wanted]
            num_steps = max(_num_steps(counts, firsts), begun.num_steps)
            chosen = self._graphs.replay(len(wanted), num_steps - begun.num_steps)
            return self._guesses([one.drafter for one in wanted], counts, firsts, chosen[:num_steps], started)
        rows = [row for one in wanted if (row := self._row(one)) is not None]
        if self._graphs is not None:
            return self._run_graphs(self._graphs, rows, started)
        tokens = self._run(rows) if rows else None
        if tokens is None:
            return None
        count = tokens.shape[1]
        result = DeviceGuesses(tokens.view(-1), count, started)
        for i, row in enumerate([row for row in rows if row.num_tokens]):
            row.drafter.expect(row.num_tokens, result, range(i * count, (i + 1) * count))
        return result

    def guess_ahead(
        self, rows: Sequence[tuple[ModelDrafter, int, list[int]]], num_steps: int, last: Tensor, after: Tensor
    ) -> None:
        """See `GuessesAhead`. `guess` continues these steps. The rows of one step only can be begun."""
        if self._graphs is None or self._begun is not None or any(one not in self._rings for one, _, _ in rows):
            return
        verified = [
            Verified(self._rings[drafter], drafter.num_read, len(drafter.guesses), req_slot, tokens)
            for drafter, req_slot, tokens in rows
        ]
        self._graphs.fill_ahead(verified, last, after, RING, num_steps + 1)
        self._graphs.replay(len(rows), num_steps)
        self._begun = _Begun(verified, num_steps)

    def _first_guesses(self, begun: _Begun, wanted: Sequence[Wanted]) -> list[int]:
        """Return which step guesses first for each row. []: the begun steps are for other rows, or too few.

        If the model has not read a row's last accepted guess, the first step reads it.
        """
        if len(begun.rows) != len(wanted):
            return []
        firsts = list[int]()
        for (ring, position, num_guesses, _, tokens), (drafter, _, length, num_tokens) in zip(
            begun.rows, wanted, strict=True
        ):
            num_accepted = length - position - 1
            is_same = (self._rings.get(drafter), drafter.num_read) == (ring, position)
            if not is_same or not 0 <= num_accepted <= len(tokens) or num_tokens > begun.num_steps:
                return []
            firsts.append(int(num_accepted == num_guesses))
        return firsts

    def graph_s(self, num_rows: int) -> float:
        """See `DraftModel`."""
        return 0.0 if self._graphs is None else self._graphs.seconds(num_rows)

    def _row(self, wanted: Wanted) -> _Row | None:
        """Return a row's plan. None: it needs none, or all rings are in use."""
        drafter = wanted.drafter
        if drafter.num_read == wanted.length:  # its guesses are not verified yet
            return None
        if drafter not in self._rings:
            if not self._free:
                return None
            ring = self._rings[drafter] = self._free.pop()
            weakref.finalize(drafter, self._free.append, ring)
        position, tokens = drafter.next_read(wanted.ids, wanted.length)
        is_done = drafter.num_read == wanted.length
        start = drafter.num_read - len(tokens)
        return _Row(drafter, self._rings[drafter], position, tokens, start, wanted.num_tokens if is_done else 0)

    def _run(self, rows: list[_Row]) -> Tensor | None:
        """Return the guesses [B, k] int64 of the rows whose text is read; None: there are none."""
        guessing = [i for i, row in enumerate(rows) if row.num_tokens]
        chosen = self._step(rows, [row.tokens for row in rows], [0] * len(rows), guessing)
        rows = [rows[i] for i in guessing]
        guesses = [[token] for token in chosen]
        for number in range(1, max((row.num_tokens for row in rows), default=0)):
            read = [len(row.tokens) + number - 1 for row in rows]
            chosen = self._step(rows, [[one[-1]] for one in guesses], read, list(range(len(rows))))
            for one, token in zip(guesses, chosen, strict=True):
                one.append(token)
        return torch.tensor(guesses, dtype=torch.int64) if guesses else None

    def _step(self, rows: list[_Row], tokens: list[list[int]], read: list[int], guessing: list[int]) -> list[int]:
        """Read tokens kernel by kernel. Returns the likeliest next ones of the rows `guessing`.

        read: tokens and guesses that each row has read before
        """
        reads = [row.slot(count) for row, count in zip(rows, read, strict=True)]
        writes = [row.slot(count + len(ids)) for row, count, ids in zip(rows, read, tokens, strict=True)]
        inputs = step_inputs(tokens, reads, writes, guessing)
        if not guessing:
            size = None if self._reading is None else self._reading.size_for(inputs)
            if self._reading is not None and size is not None:
                self._reading.run(inputs, size)
            else:
                self._pipeline.run_layers(inputs)
            return []
        chosen: list[int] = self._pipeline.forward(inputs).argmax(-1).tolist()
        return chosen

    def _run_graphs(self, graphs: GuessGraphs, rows: list[_Row], started: float) -> DeviceGuesses | None:
        """Guess with graphs, without waiting between them."""
        # All but the last token, of rows that have many to read, or only read.
        reading = [row for row in rows if len(row.known) > (FEW_TOKENS if row.num_tokens else 0)]
        for part in groups_to_read(reading):
            self._step(part, [row.known for row in part], [0] * len(part), [])
        guessing = [row for row in rows if row.num_tokens]
        if not guessing:
            return None
        read = [len(row.known) if len(row.known) > FEW_TOKENS else 0 for row in guessing]
        firsts = [len(row.tokens) - 1 - count for row, count in zip(guessing, read, strict=True)]
        counts = [row.num_tokens for row in guessing]
        num_steps = _num_steps(counts, firsts)
        tokens = graphs.run([self._table_line(guessing, read, number) for number in range(num_steps)])
        return self._guesses([row.drafter for row in guessing], counts, firsts, tokens[:num_steps], started)

    def _guesses(
        self, drafters: list[ModelDrafter], counts: list[int], firsts: list[int], tokens: Tensor, started: float
    ) -> DeviceGuesses:
        """Return the chosen tokens [steps, R] int64 of launched steps: up to `counts` of each row, from `firsts` on."""
        num_steps, pitch = tokens.shape
        own = tokens.clone().view(-1)  # the next run overwrites the graphs'
        result = DeviceGuesses(own, num_steps, started, self._copies)
        for i, (drafter, count, first) in enumerate(zip(drafters, counts, firsts, strict=True)):
            drafter.expect(min(count, num_steps - first), result, range(first * pitch + i, len(own), pitch))
        return result

    @staticmethod
    def _table_line(rows: list[_Row], read: list[int], number: int) -> tuple[list[int], list[int], list[int]]:
        """Return the slots and tokens of a step: see `GuessGraphs.run`. read: tokens that each row has read before"""
        counts = [count + number for count in read]
        return (
            [row.slot(count) for row, count in zip(rows, counts, strict=True)],
            [row.slot(count + 1) for row, count in zip(rows, counts, strict=True)],
            [row.tokens[count] if count < len(row.tokens) else CHOSEN for row, count in zip(rows, counts, strict=True)],
        )
