"""The sampler for CUDA devices: one kernel launch per step (csrc/rapid.cu).

All state is on the device, by request slot. `sample_on_device` allocates nothing and never waits, so a CUDA graph can
capture it, and its tokens can feed the next step. Every call works on the current stream.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path

import torch
from torch import Tensor

from native import build, machine, tensors
from native.tensors import fields, on_device
from native.uploads import Uploads
from sampling.cpu import kind_of
from sampling.params import SamplingParams
from sampling.rapid_filters import SlotFilters
from sampling.req_slots import check_bias, inverse_temperature
from sampling.row_context import RowContext, split
from sampling.sampler import SamplerOutput, raw_logprobs

SOURCES = Path(__file__).parent / "csrc"
LIBRARY = build.Library("sampler-rapid", (SOURCES / "rapid.cu", SOURCES / "rapid_filters.cu"))
MAX_ENTRIES = 8192
"""Largest number of tokens with a bias or penalty per row; further distinct tokens are ignored."""
ENTRY_BYTES = 16
MAX_VOCAB = 2**18
MAX_CHUNKS = 2048
"""Per row: the kernel adds up a row chunk by chunk"""
MAX_SPLITS = 8
"""CTAs per row"""
AHEAD_STEP = 32
"""Slots by which the memory of `sample_ahead` grows."""


class SlotState(ctypes.Structure):
    _fields_ = (
        ("top_p", ctypes.c_double),
        *fields(ctypes.c_uint64, "seed step"),
        ("top_k", ctypes.c_int32),
        *fields(ctypes.c_float, "scale noise presence frequency decay"),
        *fields(ctypes.c_int32, "kind penalised num_entries filtered"),
    )


class Entry(ctypes.Structure):
    """`struct Entry` of csrc/rapid_row.cuh; a negative count means "not seen"."""

    _fields_ = (("token", ctypes.c_int32), *fields(ctypes.c_float, "bias count value"))


class Launch(ctypes.Structure):
    _fields_ = (
        *fields(ctypes.c_void_p, "logits req_slots tokens table entries penalty_exempt chunks best arrived"),
        *fields(ctypes.c_void_p, "filters history"),
        *fields(ctypes.c_int32, "rows vocab max_rows capacity splits chunk_batches clustered"),
    )


@dataclass(slots=True)
class Slots:
    """Device memory of request slots."""

    numbers: Tensor
    """[n] int32: 0, 1, ..."""
    table: Tensor
    """[n, 64] uint8: SlotState"""
    entries: Tensor
    """[n, capacity, 16] uint8: Entry"""
    chunks: Tensor
    best: Tensor
    arrived: Tensor

    @classmethod
    def allocate(cls, count: int, capacity: int, device: torch.device) -> Slots:
        return cls(
            torch.arange(count, dtype=torch.int32, device=device),
            torch.zeros(count, ctypes.sizeof(SlotState), dtype=torch.uint8, device=device),
            torch.zeros(count, capacity, ENTRY_BYTES, dtype=torch.uint8, device=device),
            torch.zeros(count, MAX_CHUNKS, 2, device=device),
            torch.zeros(count, MAX_SPLITS, dtype=torch.int64, device=device),
            torch.zeros(count, dtype=torch.int32, device=device),
        )


class RapidSampler:
    name = "rapid"

    @staticmethod
    def unavailable_reason(device: torch.device) -> str | None:
        """Return why it cannot run, None if it can. Requires a CUDA device and nvcc."""
        return machine.cuda_unavailable_reason(device)

    def __init__(self, max_rows: int, vocab: int, device: torch.device, penalty_exempt_ids: list[int]) -> None:
        """See Sampler. Raises RuntimeError with `unavailable_reason`."""
        reason = self.unavailable_reason(device)
        if reason is None and vocab > MAX_VOCAB:
            reason = f"the vocabulary has {vocab} tokens, at most {MAX_VOCAB} are supported"
        if reason is not None:
            raise RuntimeError(reason)
        # With an index, because memory and streams of plain "cuda" follow the current device.
        self.device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        self.max_rows, self.vocab = max_rows, vocab
        self.capacity = min(vocab, MAX_ENTRIES)
        self._params = [SamplingParams(temperature=0.0)] * max_rows
        self._slots = Slots.allocate(max_rows, self.capacity, self.device)
        self._ahead: Slots | None = None
        """copies of slots for `sample_ahead`"""
        self._filters: SlotFilters | None = None
        """made for the first row with filters"""
        self._penalty_exempt = torch.zeros(vocab, dtype=torch.uint8, device=self.device)
        self._penalty_exempt[torch.tensor(penalty_exempt_ids, dtype=torch.int64, device=self.device)] = 1
        properties = torch.cuda.get_device_properties(self.device)
        self._num_sms, self._early = properties.multi_processor_count, int(properties.major >= 9)
        self._req_slots: tuple[list[int], Tensor] | None = None
        self._numbers = torch.zeros(0, dtype=torch.int32, device=self.device)
        """of the last `append_tokens`: slots, offsets, tokens"""
        self._uploads = Uploads(self.device)
        self._prepare_library()

    def _prepare_library(self) -> None:
        library = build.load(LIBRARY)
        prepare = tensors.bind(library, "rapid_prepare", ctypes.c_int32)
        with torch.cuda.device(self.device):
            tensors.check_status(prepare(self.vocab), "rapid_prepare")
        types = (ctypes.POINTER(Launch), ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p)
        self._launch = tensors.bind(library, "rapid_sample", *types)
        pointer, number = ctypes.c_void_p, ctypes.c_int32
        self._filter = tensors.bind(library, "rapid_filter", ctypes.POINTER(Launch), ctypes.c_void_p, ctypes.c_void_p)
        self._apply_masks = tensors.bind(library, "rapid_apply_masks", pointer, pointer, number, number, pointer)
        pointers = (ctypes.POINTER(Launch), pointer, pointer, pointer, pointer, pointer, pointer)
        self._append_tokens = tensors.bind(library, "rapid_append_tokens", *pointers)

    def admit(self, req_slot: int, params: SamplingParams, context: RowContext | None = None) -> None:
        """Start a new row in this request slot. Only rows with filters use the context.

        Raises ValueError for a bad logit bias, IndexError for a slot out of range.
        """
        if not 0 <= req_slot < self.max_rows:
            raise IndexError(f"no request slot {req_slot}: they are 0 to {self.max_rows - 1}")
        check_bias(params, self.vocab)
        if len(params.logit_bias) > self.capacity:
            raise ValueError(f"logit_bias: {len(params.logit_bias)} tokens; send at most {self.capacity}")
        self._params[req_slot] = params
        entries = [Entry(token, bias, -1.0, 0.0) for token, bias in params.logit_bias.items()]
        if entries:
            self._uploads.send(self._slots.entries[req_slot, : len(entries)], (Entry * len(entries))(*entries))
        steps, last = ((), params) if params.filters is None else split(params, self.vocab)
        if params.filters is not None:
            if self._filters is None:
                self._filters = SlotFilters(self.max_rows, self.device, self._uploads)
            self._filters.admit(req_slot, params, steps, context or RowContext())
        self._uploads.send(self._slots.table[req_slot], self._packed(params, steps, last))

    def _packed(self, params: SamplingParams, steps: tuple[str, ...], last: SamplingParams) -> SlotState:
        """Return the C++ form of a row's parameters. `last`: those after its filters; without filters the same."""
        return SlotState(
            top_p=last.top_p if last.top_p < 1 else float("inf"),
            seed=params.seed & 0xFFFFFFFFFFFFFFFF,
            top_k=last.top_k if 0 < last.top_k < self.vocab else self.vocab,
            scale=inverse_temperature(last),
            noise=params.noise,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            decay=params.penalty_decay,
            kind=kind_of(last, self.vocab),
            penalised=int(params.has_penalties and (params.filters is None or "penalties" in steps)),
            num_entries=len(params.logit_bias),
            filtered=int(params.filters is not None),
        )

    def append_tokens(self, req_slots: list[int], runs: list[list[int]]) -> None:
        """Count tokens that rows got without sampling. One launch. Raises IndexError for a slot out of range."""
        if not req_slots:
            return
        if not 0 <= min(req_slots) <= max(req_slots) < self.max_rows:
            raise IndexError(f"request slots {req_slots}: they are 0 to {self.max_rows - 1}")
        numbers = self._send_numbers(req_slots, runs)
        launch = self._launch_of(self._slots, len(req_slots), req_slots=numbers)
        self._append(launch, numbers, None)

    def sample_ahead(self, logits: Tensor, req_slots: list[int], runs: list[list[int]]) -> Tensor:
        """See `SamplesAhead`. Three launches."""
        rows = len(req_slots)
        if self._ahead is None or len(self._ahead.table) < rows:
            self._ahead = Slots.allocate(-(-rows // AHEAD_STEP) * AHEAD_STEP, self.capacity, self.device)
        ahead, numbers = self._ahead, self._send_numbers(req_slots, runs)
        self._append(self._launch_of(ahead, rows, req_slots=ahead.numbers.data_ptr()), numbers, self._slots)
        tokens = torch.empty(rows, dtype=torch.int64, device=self.device)
        self._sample_slots(ahead, logits.contiguous(), ahead.numbers[:rows], tokens)
        return tokens

    def _send_numbers(self, req_slots: list[int], runs: list[list[int]]) -> int:
        """Return the device's address of the slots, the offsets of the runs and their tokens."""
        numbers = [*req_slots, *accumulate(map(len, runs), initial=0), *chain.from_iterable(runs)]
        if len(numbers) > len(self._numbers):
            self._numbers = torch.empty(2 * len(numbers), dtype=torch.int32, device=self.device)
        target = self._numbers[: len(numbers)].view(torch.uint8)
        self._uploads.send(target, (ctypes.c_int32 * len(numbers))(*numbers))
        return self._numbers.data_ptr()

    def _append(self, launch: Launch, numbers: int, source: Slots | None) -> None:
        """Count runs; numbers: of `_send_numbers`. source: copy these slots to the launch's first."""
        offsets = numbers + 4 * launch.rows
        sources: tuple[int, ...] = (0, 0, 0)
        if source is not None:
            sources = (numbers, source.table.data_ptr(), source.entries.data_ptr())
        with torch.cuda.device(self.device):
            stream = tensors.stream_pointer(self.device)
            tokens = offsets + 4 * (launch.rows + 1)
            code = self._append_tokens(ctypes.byref(launch), offsets, tokens, *sources, stream)
        tensors.check_status(code, "rapid_append_tokens")

    def _launch_of(self, slots: Slots, rows: int, **pointers: int) -> Launch:
        return Launch(
            **pointers,
            table=slots.table.data_ptr(),
            entries=slots.entries.data_ptr(),
            penalty_exempt=self._penalty_exempt.data_ptr(),
            chunks=slots.chunks.data_ptr(),
            best=slots.best.data_ptr(),
            arrived=slots.arrived.data_ptr(),
            filters=0 if self._filters is None else self._filters.table.data_ptr(),
            history=0 if self._filters is None else self._filters.history.data_ptr(),
            rows=rows,
            vocab=self.vocab,
            max_rows=len(slots.table),
            capacity=self.capacity,
        )

    def sample_on_device(self, logits: Tensor, req_slots: Tensor, out: Tensor) -> None:
        """Sample and count a token per row in one launch. A graph may capture the launch.

        logits: [R, V] fp32, contiguous, read only. out: [R] int64.
        req_slots: [R] int32, distinct. Padding rows hold max_rows or another number out of range and get token 0.
        """
        self._sample_slots(self._slots, logits, req_slots, out)

    def _sample_slots(self, slots: Slots, logits: Tensor, req_slots: Tensor, out: Tensor) -> None:
        rows = logits.shape[0]
        launch = self._launch_of(
            slots,
            rows,
            logits=tensors.pointer(logits, "logits", torch.float32, (rows, self.vocab), self.device),
            req_slots=tensors.pointer(req_slots, "req_slots", torch.int32, (rows,), self.device),
            tokens=tensors.pointer(out, "out", torch.int64, (rows,), self.device),
        )
        if rows == 0:
            return
        with torch.cuda.device(self.device):
            stream = tensors.stream_pointer(self.device)
            code = self._launch(ctypes.byref(launch), self._num_sms, self._early, stream)
        tensors.check_status(code, "rapid_sample")

    def apply_masks(self, logits: Tensor, masks: Tensor) -> None:
        """Set masked logits [R, V] fp32 to -inf. A token is masked where its bit of masks [R, V/32] int32 is 0."""
        rows = logits.shape[0]
        words = (rows, -(-self.vocab // 32))
        at = tensors.pointer(logits, "logits", torch.float32, (rows, self.vocab), self.device)
        bits = tensors.pointer(masks, "masks", torch.int32, words, self.device)
        with torch.cuda.device(self.device):
            stream = tensors.stream_pointer(self.device)
            tensors.check_status(self._apply_masks(at, bits, rows, self.vocab, stream), "rapid_apply_masks")

    def _apply_filters(self, logits: Tensor, req_slots: Tensor, may_sample: bool) -> None:
        """Filter logits [R, V] fp32 in place. req_slots: [R] int32

        may_sample: rows with few tokens left are not written. `sample_on_device` gets their tokens.
        """
        launch = self._launch_of(self._slots, len(logits), req_slots=req_slots.data_ptr())
        at = tensors.pointer(logits, "logits", torch.float32, (len(logits), self.vocab), self.device)
        with torch.cuda.device(self.device):
            stream = tensors.stream_pointer(self.device)
            tensors.check_status(self._filter(ctypes.byref(launch), at, may_sample, stream), "rapid_filter")

    def sample(self, logits: Tensor, req_slots: list[int], masks: Tensor | None = None) -> SamplerOutput:
        """Sample and count one token per row of logits [R, V]. Does not wait.

        masks: see Sampler. fp32 logits are masked and filtered in place. Raises ValueError for logits of another shape.
        """
        if logits.shape != (len(req_slots), self.vocab):
            raise ValueError(
                f"logits {tuple(logits.shape)} do not fit {len(req_slots)} request slots of {self.vocab} tokens"
            )
        logits = logits.float().contiguous()
        if masks is not None:
            self.apply_masks(logits, masks)
        if self._req_slots is None or self._req_slots[0] != req_slots:
            self._req_slots = (list(req_slots), on_device(req_slots, torch.int32, self.device))
        params = [self._params[req_slot] for req_slot in req_slots]
        raw = raw_logprobs(logits, params)
        if any(one.filters is not None for one in params):
            self._apply_filters(logits, self._req_slots[1], may_sample=True)
        tokens = torch.empty(len(req_slots), dtype=torch.int64, device=self.device)
        self.sample_on_device(logits, self._req_slots[1], tokens)
        return SamplerOutput(tokens, None if raw is None else raw.gather(tokens))
