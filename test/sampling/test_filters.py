"""The filters: the definition against numpy, the CPU kernel against the definition, draws by chi-squared."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from native import machine
from sampling.cpu import CpuSampler
from sampling.filtered_sampler import FilteredSampler
from sampling.filters import Group, apply_filters
from sampling.naive import NaiveSampler
from sampling.params import DEFAULT_ORDER, MAX_WINDOW, Filters, SamplingParams
from sampling.row_context import BreakerMasks, RowContext
from test.conftest import rest_slow

pytestmark = [
    pytest.mark.usefixtures("two_threads"),
    pytest.mark.skipif(machine.cpp_unavailable_reason() is not None, reason=str(machine.cpp_unavailable_reason())),
]
CPU = torch.device("cpu")
Floats = npt.NDArray[np.float64]
ALL = {
    "top_k": 50,
    "top_p": 0.95,
    "presence_penalty": 1.0,
    "frequency_penalty": 0.2,
    "penalty_decay": 0.99,
    "temperature": 0.9,
}
EVERY = Filters(
    min_p=0.02,
    typical_p=0.95,
    top_n_sigma=3.0,
    xtc_probability=0.3,
    repetition_penalty=1.1,
    dry_multiplier=0.8,
    dynatemp_range=0.2,
    bad_words=((5, 6), (1, 2, 3)),
    min_tokens=3,
)
CASES: dict[str, dict[str, Any]] = {
    "min_p": {"filters": Filters(min_p=0.05)},
    "typical_p": {"filters": Filters(typical_p=0.6)},
    "epsilon": {"filters": Filters(epsilon_cutoff=0.02)},
    "eta": {"filters": Filters(eta_cutoff=0.1)},
    "top_n_sigma": {"filters": Filters(top_n_sigma=1.0)},
    "xtc": {"filters": Filters(xtc_probability=0.5, xtc_threshold=0.02)},
    "xtc after top_p": {"top_p": 0.9, "top_k": 40, "filters": Filters(xtc_probability=0.5, xtc_threshold=0.05)},
    "repetition": {"filters": Filters(repetition_penalty=1.3)},
    "window": {"presence_penalty": 1.0, "filters": Filters(repetition_penalty=1.3, repeat_last_n=16)},
    "dry": {"temperature": 0.3, "filters": Filters(dry_multiplier=0.8)},
    "dynamic temperature": {"temperature": 0.8, "filters": Filters(dynatemp_range=0.5, dynatemp_exponent=0.7)},
    "mirostat 2": {"temperature": 0.8, "filters": Filters(mirostat=2, mirostat_tau=3.0)},
    "mirostat 1": {"filters": Filters(mirostat=1, mirostat_tau=3.0)},
    "order": {
        "top_k": 30,
        "top_p": 0.8,
        "filters": Filters(samplers=("top_k", "top_p", "typ_p", "temperature", "xtc"), typical_p=0.9),
    },
    "greedy": {"temperature": 0.0, "filters": Filters(dry_multiplier=1.0, repetition_penalty=1.5)},
    "every": {**ALL, "filters": EVERY},
}
PROMPT = [i % 50 for i in range(200)]


def context(vocab: int) -> RowContext:
    breakers = torch.zeros(vocab, dtype=torch.bool)
    breakers[7 % vocab] = True
    return RowContext(prompt=PROMPT, stop_ids=[0, 9], breakers=breakers)


def make(vocab: int, rows: list[SamplingParams], is_kernel: bool) -> CpuSampler | FilteredSampler:
    """Create the kernel or the definition, with one request slot per parameters."""
    size = (len(rows), vocab, CPU, [3])
    sampler = CpuSampler(*size) if is_kernel else FilteredSampler(NaiveSampler(*size), *size)
    row_context = context(vocab)
    for req_slot, params in enumerate(rows):
        sampler.admit(req_slot, params, row_context)
    return sampler


def logits_of(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2.5


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_samples_the_tokens_of_the_definition(name: str) -> None:
    rows, vocab = 12, 1003
    params = [SamplingParams(seed=i * 2**40 + 7, **CASES[name]) for i in range(rows)]
    kernel, definition = make(vocab, params, True), make(vocab, params, False)
    slots, logits = list(range(rows)), logits_of(rows, vocab)
    for step in range(6):
        given_logits = logits + logits_of(rows, vocab, step + 1) / 5
        given_logits[0, step::2], given_logits[1, 3] = -math.inf, math.nan
        tokens = [one.sample(given_logits.clone(), slots).token_ids for one in (kernel, definition)]
        assert torch.equal(*tokens), step
        if step == 2:
            for one in (kernel, definition):
                one.append_tokens([4, 1], [[11, 12, 13], [5]])


@pytest.mark.parametrize("scale", [1e-38, 1e-25, 1e28])
def test_sigma_of_tiny_and_huge_logits(scale: float) -> None:
    """The squares of the smallest are no fp32 numbers."""
    temperature = 2.0
    rows, vocab = 40, 1003
    params = [SamplingParams(seed=i, temperature=temperature, filters=Filters(top_n_sigma=1.0)) for i in range(rows)]
    logits = (torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * (scale / 4)).expand(rows, vocab)
    kernel, definition = (make(vocab, params, is_kernel) for is_kernel in (True, False))
    tokens = [one.sample(logits.clone(), list(range(rows))).token_ids for one in (kernel, definition)]
    assert torch.equal(*tokens)


@pytest.mark.parametrize("name", ["every", "mirostat 2"])
def test_a_row_samples_the_same_alone_and_in_a_batch(name: str) -> None:
    """Rows without filters and with others are in the batch."""
    vocab = 1003
    mixed = [SamplingParams(seed=1, **CASES[name]), *(SamplingParams(seed=2, **case) for case in CASES.values())]
    mixed += [SamplingParams(seed=3, top_k=50, top_p=0.6, presence_penalty=1.0)]
    alone, batch = make(vocab, mixed[:1], True), make(vocab, mixed, True)
    for step in range(8):
        logits = logits_of(len(mixed), vocab, step)
        expected = alone.sample(logits[:1].clone(), [0]).token_ids[0]
        assert batch.sample(logits, list(range(len(mixed)))).token_ids[0] == expected


def probabilities(params: SamplingParams, logits: Tensor) -> Floats:
    """Return what the definition samples from, [V], at its first step."""
    vocab = len(logits)
    definition = make(vocab, [params], False)
    assert isinstance(definition, FilteredSampler)
    state = definition._state
    (group,) = definition._groups_of([0])
    filtered = apply_filters(logits.clone().unsqueeze(0), Group([0], [0], group.steps, state))[0]
    probs: Floats = torch.softmax(filtered.double(), dim=0).numpy()
    return probs


def chi_squared(counts: Floats, expected: Floats) -> None:
    """Check counts against probabilities: no token without probability, and a bound of about the 1e-6 quantile."""
    possible = expected > 0
    assert not counts[~possible].any()
    mean = expected[possible] * counts.sum()
    large = mean >= 5
    statistic = ((counts[possible] - mean)[large] ** 2 / mean[large]).sum()
    degrees = max(int(large.sum()) - 1, 1)
    assert statistic < degrees + 5 * math.sqrt(2 * degrees) + 15


DRAWN = (
    "min_p",
    "typical_p",
    "epsilon",
    "eta",
    "top_n_sigma",
    "xtc",
    "dynamic temperature",
    "mirostat 2",
    "mirostat 1",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", rest_slow(["order", *DRAWN], 3))
def test_a_hundred_thousand_draws_of_the_kernel_follow_the_definition(name: str) -> None:
    """Mirostat's bound stays where it is at a learning rate of 0. XTC is a mixture of two distributions."""
    rows, steps, vocab = 2000, 50, 64
    case = CASES[name]
    filters = case["filters"]
    if filters.mirostat:
        case = {**case, "filters": Filters(mirostat=filters.mirostat, mirostat_tau=2.0, mirostat_eta=0.0)}
    logits = logits_of(1, vocab, 3)[0]
    sampler = make(vocab, [SamplingParams(seed=seed, **case) for seed in range(rows)], True)
    counts = np.zeros(vocab)
    for _ in range(steps):
        tokens = sampler.sample(logits.repeat(rows, 1), list(range(rows))).token_ids
        counts += np.bincount(tokens.numpy(), minlength=vocab)
    expected = probabilities(SamplingParams(**case), logits)
    if name == "xtc":
        always, never = (
            probabilities(SamplingParams(filters=Filters(xtc_probability=one, xtc_threshold=0.02)), logits)
            for one in (1.0, 1e-9)
        )
        expected = (always + never) / 2
    assert counts.sum() == 100_000
    chi_squared(counts, expected)


@pytest.mark.parametrize("name", ["window", "dry"])
def test_draws_of_new_rows_follow_the_penalties_of_the_definition(name: str) -> None:
    """Each row draws once, as a penalty changes what it draws next."""
    rows, vocab, case = 8000, 64, CASES[name]
    logits = logits_of(1, vocab, 4)[0] / 2
    sampler = make(vocab, [SamplingParams(seed=seed, **case) for seed in range(rows)], True)
    tokens = sampler.sample(logits.repeat(rows, 1), list(range(rows))).token_ids
    chi_squared(
        np.bincount(tokens.numpy(), minlength=vocab).astype(float), probabilities(SamplingParams(**case), logits)
    )


# The definition against the published formulas ------------------------------------------------------------------

LOGITS = st.lists(st.floats(-8, 8, width=32), min_size=10, max_size=30)


def kept(logits: list[float], **filters: Any) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Return the probabilities before a filter, and what it keeps."""
    tensor = torch.tensor(logits, dtype=torch.float32)
    before: Floats = torch.softmax(tensor.double(), dim=0).numpy()
    return before, probabilities(SamplingParams(filters=Filters(**filters)), tensor) > 0


@settings(max_examples=60, deadline=None)
@given(LOGITS, st.floats(0.01, 1))
def test_min_p_keeps_what_is_probable_enough(logits: list[float], share: float) -> None:
    p, is_kept = kept(logits, min_p=share)
    sure = np.abs(p / p.max() - share) > 1e-5
    assert (is_kept == (p >= share * p.max()))[sure].all() and is_kept[p.argmax()]


@settings(max_examples=60, deadline=None)
@given(LOGITS, st.floats(0.05, 0.99))
def test_typical_p_keeps_the_smallest_typical_set(logits: list[float], mass: float) -> None:
    p, is_kept = kept(logits, typical_p=mass)
    distance = np.abs(-np.log(p) - -(p * np.log(p)).sum())
    assert p[is_kept].sum() >= mass - 1e-5
    assert is_kept.all() or distance[is_kept].max() <= distance[~is_kept].min() + 1e-4
    last = np.flatnonzero(is_kept)[distance[is_kept].argmax()]
    assert is_kept.sum() == 1 or p[is_kept].sum() - p[last] < mass + 1e-5


@settings(max_examples=60, deadline=None)
@given(LOGITS, st.floats(0.001, 1))
def test_cutoffs_keep_what_is_probable_enough(logits: list[float], value: float) -> None:
    p, above = kept(logits, epsilon_cutoff=value)
    floor = min(value, math.sqrt(value) * math.exp((p * np.log(p)).sum()))
    for is_kept, least in ((above, value), (kept(logits, eta_cutoff=value)[1], floor)):
        sure = np.abs(p / least - 1) > 1e-5
        assert (is_kept == ((p >= least) | (p == p.max())))[sure].all() and is_kept[p.argmax()]


@settings(max_examples=60, deadline=None)
@given(LOGITS, st.floats(0.1, 3))
def test_top_n_sigma_measures_deviations_of_logits(logits: list[float], n: float) -> None:
    values = np.array(logits, dtype=np.float32).astype(np.float64)
    floor = values.max() - n * values.std()
    _, is_kept = kept(logits, top_n_sigma=n)
    sure = np.abs(values - floor) > 1e-5
    assert (is_kept == (values >= floor))[sure].all()


@settings(max_examples=60, deadline=None)
@given(LOGITS, st.floats(0.01, 0.6))
def test_xtc_keeps_the_least_probable_of_the_probable(logits: list[float], threshold: float) -> None:
    p, is_kept = kept(logits, xtc_probability=1.0, xtc_threshold=threshold)
    above = p >= threshold
    if np.abs(p - threshold).min() > 1e-6:
        assert is_kept[~above].all() and is_kept[above].sum() == min(1, above.sum())
        assert not above.any() or p[above & is_kept] == p[above].min()


@settings(max_examples=40, deadline=None)
@given(LOGITS, st.floats(1.01, 3), st.integers(0, 6), st.integers(0, 2**32))
def test_any_mix_of_knobs_samples_the_same_in_both(logits: list[float], factor: float, last: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    order = tuple(rng.permutation(DEFAULT_ORDER)[: rng.integers(1, len(DEFAULT_ORDER) + 1)])
    filters = Filters(
        samplers=tuple(map(str, order)),
        repetition_penalty=factor,
        repeat_last_n=last - 1,
        min_p=float(rng.choice([0, 0.1])),
        typical_p=float(rng.choice([1, 0.8])),
        epsilon_cutoff=float(rng.choice([0, 0.03])),
        eta_cutoff=float(rng.choice([0, 0.1])),
        top_n_sigma=float(rng.choice([0, 1.5])),
        xtc_probability=float(rng.choice([0, 0.5])),
        dry_multiplier=float(rng.choice([0, 2])),
        dynatemp_range=float(rng.choice([0, 0.4])),
        min_tokens=int(rng.integers(0, 3)),
    )
    vocab = 64
    wide = torch.nn.functional.pad(torch.tensor(logits), (0, vocab - len(logits)), value=-3.0).unsqueeze(0)
    params = [SamplingParams(top_k=int(rng.integers(0, 9)), top_p=0.9, temperature=0.7, seed=seed, filters=filters)]
    kernel, definition = make(vocab, params, True), make(vocab, params, False)
    for _ in range(3):
        assert torch.equal(*(one.sample(wide.clone(), [0]).token_ids for one in (kernel, definition)))


@pytest.mark.parametrize("is_kernel", [True, False])
def test_repeated_sequences_are_penalised_up_to_a_breaker(is_kernel: bool) -> None:
    """The 4 is penalised by base^(3 - 2), until a breaker.

    The sequence is 1 2 3 4 … 1 2 3; the breaker 7 divides it.
    """

    def penalty(prompt: list[int]) -> float:
        """Return how far above 20 the 4 is sampled."""
        params = SamplingParams(temperature=0.0, filters=Filters(dry_multiplier=1.0, dry_base=2.0))
        sampler = make(64, [params], is_kernel)
        logits = torch.zeros(1, 64)
        logits[0, 4] = logits[0, 20] = 9.0
        while True:
            sampler.admit(0, params, RowContext(prompt, (), breakers))
            if sampler.sample(logits.clone(), [0]).token_ids[0] == 4:
                return float(logits[0, 4]) - 9.0
            logits[0, 4] += 0.5

    breakers = torch.zeros(64, dtype=torch.bool)
    breakers[7] = True
    assert penalty([1, 2, 3, 4, 30, 1, 2, 3]) == 2.0
    assert penalty([9, 2, 3, 4, 30, 1, 2, 3]) == 1.0
    assert penalty([1, 2, 7, 3, 4, 30, 1, 2, 7, 3]) == 0.0


@pytest.mark.parametrize("is_kernel", [True, False])
def test_stops_and_bad_words_are_banned_only_where_they_are(is_kernel: bool) -> None:
    filters = Filters(min_tokens=2, bad_words=((20, 21), (22, 23, 24)))
    sampler = make(64, [SamplingParams(temperature=0.0, filters=filters)], is_kernel)

    def best(*ids: int) -> int:
        logits = torch.zeros(1, 64)
        for i, token in enumerate(ids):
            logits[0, token] = 9.0 - i
        return int(sampler.sample(logits, [0]).token_ids[0])

    assert [best(9, 20), best(0, 21, 22)] == [20, 22], "the stops 9 and 0 come too early, 21 follows 20"
    assert [best(24, 23), best(23), best(24, 40), best(9)] == [24, 23, 24, 9]
    sampler.append_tokens([0], [[22, 23]])
    assert best(24, 41) == 41


@pytest.mark.parametrize("is_kernel", [True, False])
def test_mirostat_approaches_its_surprise(is_kernel: bool) -> None:
    rows, vocab = 32, 512
    filters = Filters(mirostat=2, mirostat_tau=2.0, mirostat_eta=0.3)
    sampler = make(vocab, [SamplingParams(seed=seed, filters=filters) for seed in range(rows)], is_kernel)
    logits = logits_of(1, vocab, 6)[0] / 2.5
    log_p = torch.log_softmax(logits, 0)
    surprise = []
    for _ in range(60):
        tokens = sampler.sample(logits.repeat(rows, 1), list(range(rows))).token_ids
        surprise.append(float(-log_p[tokens].mean() / math.log(2)))
    free = float(-(log_p.exp() * log_p).sum() / math.log(2))
    assert np.mean(surprise[20:]) < free - 1, "less surprising than without it"


def test_log_probabilities_and_masks_come_before_the_filters() -> None:
    vocab, params = 64, SamplingParams(top_logprobs=2, filters=Filters(min_p=0.5), logit_bias={1: -math.inf})
    logits, mask = logits_of(2, vocab), torch.full((2, 2), -1, dtype=torch.int32)
    best = int(logits[0].argmax())
    mask[0, best // 32] ^= -(2**31) if best % 32 == 31 else 1 << best % 32
    found = [make(vocab, [params] * 2, kind).sample(logits.clone(), [0, 1], mask.clone()) for kind in (True, False)]
    for sampled in found:
        assert sampled.logprobs is not None and sampled.token_ids[0] != best
        assert torch.allclose(sampled.logprobs.chosen[1], torch.log_softmax(logits[1], 0)[sampled.token_ids[1]])
        assert float(sampled.logprobs.top[1, 0]) == pytest.approx(float(torch.log_softmax(logits[1], 0).max()))
    assert torch.equal(*(sampled.token_ids for sampled in found))


def test_history_is_bounded_and_forgotten() -> None:
    vocab, params = 64, SamplingParams(temperature=0.0, filters=Filters(repetition_penalty=50.0))
    logits = torch.zeros(1, vocab)
    logits[0, 5], logits[0, 6] = 3.0, 2.0
    for is_kernel in (True, False):
        sampler = make(vocab, [params], is_kernel)
        sampler.admit(0, params, RowContext([5, *[1] * MAX_WINDOW]))
        assert sampler.sample(logits.clone(), [0]).token_ids[0] == 5, "beyond the window"
        sampler.admit(0, params, RowContext([5]))
        sampler.append_tokens([0], [[1] * (2 * MAX_WINDOW)])
        assert sampler.sample(logits.clone(), [0]).token_ids[0] == 5
        assert sampler.sample(logits.clone(), [0]).token_ids[0] == 6
        sampler.admit(0, params, RowContext())
        assert sampler.sample(logits.clone(), [0]).token_ids[0] == 5


def test_breakers_are_found_inside_tokens() -> None:
    masks = BreakerMasks([b"", b"\n", b"a:", b":\n\n", "é".encode(), b"\xc3", b"b"])
    assert masks.build(("\n", ":")).tolist() == [False, True, True, True, False, False, False]
    assert masks.build(("é",)).tolist() == [False] * 4 + [True, False, False]
    assert not masks.build(("ab", "")).any(), "a breaker over two tokens is none"
