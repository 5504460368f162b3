"""The GPU's filters, compiled for a CPU by cuda_emulation.h: they keep what the definition keeps, with its bits."""

from __future__ import annotations

import ctypes
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import sampling
from native import build, machine
from sampling.cpu import kind_of
from sampling.filtered_sampler import FilteredSampler
from sampling.filters import Group, apply_filters
from sampling.naive import NaiveSampler
from sampling.params import DEFAULT_ORDER, MAX_WINDOW, Filters, SamplingParams
from sampling.rapid import Entry, SlotState
from sampling.rapid_filters import lists_of, packed
from sampling.row_context import RowContext, split
from test.conftest import rest_slow
from test.sampling.test_filters import CASES, context

pytestmark = pytest.mark.skipif(machine.cpp_unavailable_reason() is not None, reason="needs a C++ compiler")
CPU = torch.device("cpu")
SOURCES = Path(sampling.__file__).parent / "csrc"
LIBRARY = build.Library(
    "rapid-filters-emulated",
    (Path(__file__).with_name("rapid_filters_emulated.cpp"),),
    flags=("-I", str(SOURCES), "-O1", "-ffp-contract=off", "-Wno-unused-parameter"),
)


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return build.load(LIBRARY)


def defined(logits: Tensor, params: SamplingParams, row: RowContext, seen: list[int]) -> tuple[Tensor, list[Entry]]:
    """Return what the definition leaves of logits [V], and the sampler's entries: biases and counts of `seen`."""
    sampler = FilteredSampler(NaiveSampler(1, len(logits), CPU, []), 1, len(logits), CPU, [])
    sampler.admit(0, params, row)
    state, table = sampler._state, sampler._state.table
    sampler.append_tokens([0], [seen]) if seen else None
    (group,) = sampler._groups_of([0])
    filtered = apply_filters(logits.clone().unsqueeze(0), Group([0], [0], group.steps, state))[0]
    entries = {token: [bias, -1.0] for token, bias in params.logit_bias.items()}
    for i in range(int(table.num_seen[0])):
        entries.setdefault(int(table.seen_ids[0, i]), [0.0, -1.0])[1] = float(table.seen_counts[0, i])
    return filtered, [Entry(token, bias, count, 0.0) for token, (bias, count) in entries.items()]


def emulated(
    library: ctypes.CDLL,
    logits: Tensor,
    params: SamplingParams,
    row: RowContext,
    seen: list[int],
    entries: list[Entry],
    may_sample: bool = False,
) -> tuple[Tensor, int]:
    """Return what the kernel leaves of logits [V]. If it has sampled, also the token, else -1."""
    steps, last = split(params, len(logits))
    slot = packed(params, steps, len(row.prompt))
    lists = lists_of(params, row)
    numbers = (ctypes.c_int32 * max(len(lists), 1))(*lists)
    slot.lists, slot.num_listed = ctypes.addressof(numbers), len(lists)
    breakers = None if row.breakers is None else row.breakers.view(torch.uint8)
    slot.breakers = breakers.data_ptr() if breakers is not None and "dry" in steps else None
    history = (ctypes.c_int32 * MAX_WINDOW)(*row.prompt)
    for token in seen:
        library.remember_token(ctypes.byref(slot), history, token, ctypes.c_float(-math.inf))
    penalised = params.has_penalties and "penalties" in steps
    state = SlotState(
        seed=params.seed,
        step=len(seen),
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        penalised=penalised,
        num_entries=len(entries),
        kind=kind_of(last, len(logits)),
        scale=1.0,
        top_p=last.top_p if last.top_p < 1 else math.inf,
        top_k=last.top_k or len(logits),
    )
    given = (Entry * max(len(entries), 1))(*entries)
    out = logits.clone()
    address, size = ctypes.c_void_p(out.data_ptr()), ctypes.c_int32(len(out))
    chosen = library.filter_row(address, size, ctypes.byref(state), given, ctypes.byref(slot), history, int(may_sample))
    return out, chosen


def check(
    library: ctypes.CDLL, logits: Tensor, params: SamplingParams, row: RowContext, seen: list[int], name: object
) -> None:
    expected, entries = defined(logits, params, row, seen)
    found, chosen = emulated(library, logits, params, row, seen, entries)
    assert chosen == -1
    assert torch.equal(found == -math.inf, expected == -math.inf), name
    kept = expected > -math.inf
    torch.testing.assert_close(found[kept], expected[kept], rtol=1e-6, atol=1e-6)
    partly, chosen = emulated(library, logits, params, row, seen, entries, may_sample=True)
    if chosen < 0:
        assert torch.equal(partly, found), name
        return
    sampler = NaiveSampler(1, len(logits), CPU, [])
    sampler.admit(0, split(params, len(logits))[1])
    sampler.append_tokens([0], [seen]) if seen else None
    assert int(sampler.sample(found.unsqueeze(0), [0]).token_ids[0]) == chosen, name
    assert partly[chosen] == found[chosen]  # Mirostat reads it


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("vocab", rest_slow([4096, 1003]))
def test_the_kernel_keeps_what_the_definition_keeps(library: ctypes.CDLL, name: str, vocab: int) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2.5
    if vocab == 4096:
        logits = (logits * 4).round() / 4  # many equal ones
    logits[5], logits[10:20] = math.nan, -math.inf
    params = SamplingParams(seed=3, logit_bias={5: 1.0, 30: -2.0}, **CASES[name])
    check(library, logits, params, context(vocab), [1, 2, 33, 2], name)


def _mix(rng: random.Random, vocab: int) -> SamplingParams:
    """Return parameters in which each filter is on or off, in any order."""

    def some(off: Any, *values: Any) -> Any:
        return rng.choice(values) if rng.random() < 0.5 else off

    steps = list(DEFAULT_ORDER)
    rng.shuffle(steps)
    filters = Filters(
        samplers=tuple(steps[: rng.choice((2, 5, 11))]),
        min_p=some(0.0, 0.01, 0.5),
        typical_p=some(1.0, 0.2, 0.9),
        epsilon_cutoff=some(0.0, 0.001),
        eta_cutoff=some(0.0, 0.01),
        top_n_sigma=some(0.0, 1.0, 3.0),
        xtc_probability=some(0.0, 0.5, 1.0),
        xtc_threshold=rng.choice((0.0, 0.01, 0.3)),
        repetition_penalty=some(1.0, 0.5, 1.3),
        repeat_last_n=rng.choice((-1, 0, 5)),
        dry_multiplier=some(0.0, 0.5),
        dry_penalty_last_n=rng.choice((-1, 7, 100)),
        dynatemp_range=some(0.0, 0.2, 1.5),
        mirostat=rng.choice((0, 0, 0, 1, 2)),
        mirostat_tau=rng.choice((0.1, 3.0)),
        min_tokens=rng.choice((0, 5)),
        bad_words=rng.choice(((), ((1, 2), (0, 1, 2)))),
    )
    return SamplingParams(
        seed=rng.getrandbits(60),
        temperature=rng.choice((1.0, 0.3, 2.0)),
        top_k=some(0, 2, 40, 700),
        top_p=some(1.0, 0.3, 0.9),
        presence_penalty=some(0.0, 1.0, -0.5),
        frequency_penalty=some(0.0, 0.2),
        logit_bias=some({}, {rng.randrange(vocab): -math.inf, rng.randrange(vocab): 2.0}),
        filters=filters,
    )


@pytest.mark.parametrize("seed", rest_slow(range(40), 8))
def test_any_mix_on_any_row_keeps_what_the_definition_keeps(library: ctypes.CDLL, seed: int) -> None:
    rng = random.Random(seed)
    vocab = rng.choice((5, 64, 1003, 5000, 9000))
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * rng.choice((0.3, 3, 30))
    kind = rng.choice(("plain", "tied", "flat", "holes", "outliers", "empty"))
    if kind == "tied":
        logits = logits.round()
    elif kind == "flat":
        logits = torch.full((vocab,), -3.5)
    elif kind == "holes":
        logits[torch.arange(vocab) % 50 != 1] = -math.inf
    elif kind == "outliers":
        logits[:3] = 1e12
    elif kind == "empty":
        logits[:] = -math.inf
    breakers = torch.zeros(vocab, dtype=torch.bool)
    breakers[3] = True
    prompt = [rng.randrange(min(rng.choice((2, 5, 50)), vocab)) for _ in range(rng.choice((0, 1, 300, 4096)))]
    row = RowContext(prompt, [0, 4], breakers)
    check(library, logits, _mix(rng, vocab), row, [1, 2, 1, 0][: rng.choice((0, 4))], (kind, vocab))


@pytest.mark.parametrize(("size", "vocab"), [(2049, 40_000), (3800, 65_536), (3801, 40_000), (100, 65_540)])
def test_rows_at_the_limit_of_shared_memory_keep_what_the_definition_keeps(
    library: ctypes.CDLL, size: int, vocab: int
) -> None:
    """At most 3,800 tokens are copied, of vocabularies up to 65,536. With more, the copy stops midway."""
    generator = torch.Generator().manual_seed(size)
    logits = torch.full((vocab,), -math.inf)
    logits[torch.randperm(vocab - 1, generator=generator)[: size - 1]] = torch.randn(size - 1, generator=generator)
    logits[-1] = 4.0
    filters = Filters(dynatemp_range=0.2, top_n_sigma=9.0, min_p=1e-6, typical_p=0.95, xtc_probability=1.0)
    check(library, logits, SamplingParams(top_p=0.9, filters=filters), RowContext(), [], size)


def test_mirostat_learns_from_the_sampled_token(library: ctypes.CDLL) -> None:
    params = SamplingParams(filters=Filters(mirostat=2, mirostat_tau=3.0, mirostat_eta=0.5))
    slot = packed(params, ("mirostat",), 0)
    assert slot.mu == 6
    slot.log_total, slot.largest = 2.0, 5.0
    history = (ctypes.c_int32 * MAX_WINDOW)()
    library.remember_token(ctypes.byref(slot), history, 7, ctypes.c_float(4.0))
    assert slot.mu == pytest.approx(6 - 0.5 * (3 / math.log(2) - 3)) and history[0] == 7 and slot.num_known == 1
    library.remember_token(ctypes.byref(slot), history, 8, ctypes.c_float(-math.inf))
    assert history[1] == 8 and math.isfinite(slot.mu)
