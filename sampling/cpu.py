"""The sampler for CPUs in C++ (csrc/sampler.cpp), by the definition in naive.py.

The rows of a step are split between threads.
"""

from __future__ import annotations

import ctypes
import weakref
from itertools import accumulate, chain
from pathlib import Path

import torch
from torch import Tensor

from native import build, tensors
from native.tensors import fields
from sampling.params import DEFAULT_ORDER, MAX_WINDOW, Filters, Method, SamplingParams
from sampling.req_slots import check_bias, inverse_temperature
from sampling.row_context import RowContext, split
from sampling.sampler import SamplerOutput, raw_logprobs

GREEDY, TRUNCATED, UNTRUNCATED, NOISE = range(4)
STEPS = {name: number for number, name in enumerate((*DEFAULT_ORDER, "mirostat"))}
LISTS = ("samplers", "dry_sequence_breakers", "bad_words")

LIBRARY = build.Library(
    "sampler-cpu",
    (Path(__file__).parent / "csrc" / "sampler.cpp",),
    # No contraction: products and sums round separately, as in the definition.
    flags=("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-maybe-uninitialized"),
)


class Parameters(ctypes.Structure):
    _fields_ = (
        ("top_p", ctypes.c_double),
        ("top_k", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        *fields(ctypes.c_float, "scale noise presence frequency decay"),
        *fields(ctypes.c_int32, "kind penalised num_bias"),
    )


FILTER_NUMBERS = (*(name for name in Filters.__struct_fields__ if name not in LISTS), "temperature", "top_p", "top_k")
FilterParameters = ctypes.c_double * len(FILTER_NUMBERS)


def kind_of(params: SamplingParams, vocab: int) -> int:
    """Return which of the four sampling kinds a row uses."""
    if params.is_greedy:
        return GREEDY
    if params.method is Method.NOISE:
        return NOISE
    return TRUNCATED if 0 < params.top_k < vocab or params.top_p < 1 else UNTRUNCATED


def packed(params: SamplingParams, last: SamplingParams, vocab: int) -> Parameters:
    """Return the C++ form of a row's parameters. `last`: those after its filters; without filters the same."""
    return Parameters(
        top_p=last.top_p,
        top_k=last.top_k if 0 < last.top_k < vocab else vocab,
        seed=params.seed & 0xFFFFFFFFFFFFFFFF,
        scale=inverse_temperature(last),
        noise=params.noise,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        decay=params.penalty_decay,
        kind=kind_of(last, vocab),
        penalised=int(params.has_penalties),
        num_bias=len(params.logit_bias),
    )


def filter_parameters(params: SamplingParams) -> ctypes.Array[ctypes.c_double]:
    """Return the C++ form of a row's filters."""
    sources = (params.filters if hasattr(params.filters, name) else params for name in FILTER_NUMBERS)
    return FilterParameters(*(getattr(one, name) for one, name in zip(sources, FILTER_NUMBERS, strict=True)))


class CpuSampler:
    name = "cpu"

    @staticmethod
    def unavailable_reason(device: torch.device) -> str | None:
        """Return why it cannot run, None if it can. Requires a C++ compiler or the library of a wheel."""
        if device.type != "cpu":
            return f"needs logits on the CPU, not on {device}"
        return build.unavailable_reason(LIBRARY)

    def __init__(self, max_rows: int, vocab: int, device: torch.device, penalty_exempt_ids: list[int]) -> None:
        """See Sampler. Raises RuntimeError with `unavailable_reason`."""
        reason = self.unavailable_reason(device)
        if reason is not None:
            raise RuntimeError(reason)
        self._params = [SamplingParams(temperature=0.0)] * max_rows
        self._vocab, self._device = vocab, torch.device("cpu")
        self._breakers: dict[int, Tensor] = {}
        """by request slot: memory that the library reads"""
        self._library = build.load(LIBRARY)
        penalty_exempt = torch.zeros(vocab, dtype=torch.uint8)
        penalty_exempt[torch.tensor(penalty_exempt_ids, dtype=torch.int64)] = 1
        create = self._library.sampler_new
        create.restype = ctypes.c_void_p
        create.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
        self._handle = ctypes.c_void_p(create(max_rows, vocab, penalty_exempt.data_ptr()))
        weakref.finalize(self, self._library.sampler_free, self._handle)

    def admit(self, req_slot: int, params: SamplingParams, context: RowContext | None = None) -> None:
        """Start a new row in this request slot. Only rows with filters use the context.

        Raises ValueError for a bad logit bias, IndexError for a slot out of range.
        """
        if not 0 <= req_slot < len(self._params):
            raise IndexError(f"no request slot {req_slot}: they are 0 to {len(self._params) - 1}")
        check_bias(params, self._vocab)
        self._params[req_slot] = params
        size = len(params.logit_bias)
        tokens = (ctypes.c_int32 * size)(*params.logit_bias)
        values = (ctypes.c_float * size)(*params.logit_bias.values())
        steps, last = ((), params) if params.filters is None else split(params, self._vocab)
        parameters = packed(params, last, self._vocab)
        self._library.sampler_admit(self._handle, ctypes.c_int64(req_slot), ctypes.byref(parameters), tokens, values)
        self._breakers.pop(req_slot, None)
        if params.filters is not None:
            self._set_filters(req_slot, params, steps, context or RowContext())

    def _set_filters(self, req_slot: int, params: SamplingParams, steps: tuple[str, ...], context: RowContext) -> None:
        filters = params.filters
        assert filters is not None
        ids = [[STEPS[name] for name in steps], context.prompt[-MAX_WINDOW:], context.stop_ids, *filters.bad_words]
        numbers = [number for one in ids for number in (len(one), *one)]
        address = None
        if context.breakers is not None:
            self._breakers[req_slot] = breakers = context.breakers.view(torch.uint8)
            address = tensors.pointer(breakers, "breakers", torch.uint8, (None,), self._device)
        self._library.sampler_set_filters(
            self._handle,
            ctypes.c_int64(req_slot),
            filter_parameters(params),
            (ctypes.c_int32 * len(numbers))(*numbers),
            ctypes.c_int64(len(numbers)),
            ctypes.c_void_p(address),
        )

    def append_tokens(self, req_slots: list[int], runs: list[list[int]]) -> None:
        """Count tokens that rows got without sampling. Raises IndexError for a slot out of range."""
        if req_slots and not 0 <= min(req_slots) <= max(req_slots) < len(self._params):
            raise IndexError(f"request slots {req_slots}: they are 0 to {len(self._params) - 1}")
        for req_slot, run in zip(req_slots, runs, strict=True):
            tokens, size = (ctypes.c_int32 * len(run))(*run), ctypes.c_int64(len(run))
            self._library.sampler_append_tokens(self._handle, ctypes.c_int64(req_slot), tokens, size)

    def sample_ahead(self, logits: Tensor, req_slots: list[int], runs: list[list[int]]) -> Tensor:
        """See `SamplesAhead`."""
        rows, numbers = len(req_slots), [*accumulate(map(len, runs), initial=0), *chain.from_iterable(runs)]
        address = tensors.pointer(logits, "logits", torch.float32, (rows, self._vocab), self._device)
        tokens = torch.empty(rows, dtype=torch.int64)
        self._library.sampler_sample_ahead(
            self._handle,
            ctypes.c_void_p(address),
            ctypes.c_int64(rows),
            (ctypes.c_int64 * rows)(*req_slots),
            (ctypes.c_int32 * len(numbers))(*numbers),
            ctypes.c_void_p(tokens.data_ptr()),
            ctypes.c_int32(torch.get_num_threads()),
        )
        return tokens

    def sample(self, logits: Tensor, req_slots: list[int], masks: Tensor | None = None) -> SamplerOutput:
        """Sample and count one token per row of logits [R, V].

        Overwrites logits that are fp32 and contiguous. masks: see Sampler.
        Raises IndexError for a slot out of range.
        """
        rows = len(req_slots)
        logits = logits.float().contiguous()
        address = tensors.pointer(logits, "logits", torch.float32, (rows, self._vocab), self._device)
        if rows and not 0 <= min(req_slots) <= max(req_slots) < len(self._params):
            raise IndexError(f"request slots {req_slots}: they are 0 to {len(self._params) - 1}")
        words = None if masks is None else self._words(rows, masks)
        params = [self._params[req_slot] for req_slot in req_slots]
        if words is not None and any(one.top_logprobs is not None for one in params):
            self._apply_masks(address, rows, words)
        raw = raw_logprobs(logits, params)
        tokens = torch.empty(rows, dtype=torch.int64)
        self._library.sampler_sample(
            self._handle,
            ctypes.c_void_p(address),
            ctypes.c_void_p(words),
            ctypes.c_int64(rows),
            (ctypes.c_int64 * rows)(*req_slots),
            ctypes.c_void_p(tokens.data_ptr()),
            ctypes.c_int32(torch.get_num_threads()),
        )
        return SamplerOutput(tokens, None if raw is None else raw.gather(tokens))

    def _words(self, rows: int, masks: Tensor) -> int:
        """Return the address of masks [rows, V/32] int32."""
        return tensors.pointer(masks, "masks", torch.int32, (rows, -(-self._vocab // 32)), self._device)

    def _apply_masks(self, logits: int, rows: int, words: int) -> None:
        """Set logits to -inf where the mask bit is 0. Both arguments are addresses."""
        self._library.sampler_apply_masks(
            ctypes.c_void_p(logits),
            ctypes.c_void_p(words),
            ctypes.c_int64(rows),
            ctypes.c_int64(self._vocab),
            ctypes.c_int32(torch.get_num_threads()),
        )
