"""Every sampler that runs on a CPU against the definition: masks, penalties, seeds, odd logits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from native import machine
from sampling.naive import NaiveSampler
from sampling.params import Method, SamplingParams
from sampling.registry import sampler_class
from sampling.sampler import Logprobs, Sampler, SamplerOutput
from test.conftest import rest_slow
from test.sampling_oracle import OracleRow

pytestmark = pytest.mark.usefixtures("two_threads")
CPU = torch.device("cpu")
ON_GPU = ("rapid",)
VOCABS = (50, 1003, 65536)
Make = Callable[..., Sampler]

needs_cpp = pytest.mark.skipif(
    machine.cpp_unavailable_reason() is not None, reason=str(machine.cpp_unavailable_reason())
)


needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


class FromCpu:
    """A sampler of another device, for CPU tensors."""

    def __init__(self, inner: Sampler, device: torch.device) -> None:
        self.name, self.admit, self._inner, self._device = inner.name, inner.admit, inner, device
        self.append_tokens = inner.append_tokens

    def sample(self, logits: Tensor, req_slots: list[int], masks: Tensor | None = None) -> SamplerOutput:
        allowed = None if masks is None else masks.to(self._device)
        sampled = self._inner.sample(logits.to(self._device), req_slots, allowed)
        given = sampled.logprobs
        logprobs = Logprobs(given.chosen.cpu(), given.top_ids.cpu(), given.top.cpu()) if given else None
        return SamplerOutput(sampled.token_ids.cpu(), logprobs)


@pytest.fixture(
    params=[
        pytest.param("naive", marks=pytest.mark.slow),
        pytest.param("cpu", marks=needs_cpp),
        *(pytest.param(n, marks=needs_gpu) for n in ON_GPU),
    ]
)
def make(request: pytest.FixtureRequest) -> Make:
    """Create a sampler with one request slot per parameters."""

    def make_sampler(vocab: int, rows: list[SamplingParams], penalty_exempt: tuple[int, ...] = ()) -> Sampler:
        device = torch.device("cuda") if request.param in ON_GPU else CPU
        made = sampler_class(request.param)(len(rows), vocab, device, list(penalty_exempt))
        sampler: Sampler = FromCpu(made, device) if request.param in ON_GPU else made  # type: ignore[assignment]
        for req_slot, params in enumerate(rows):
            sampler.admit(req_slot, params)
        return sampler

    return make_sampler


def kinds_of_logits(vocab: int) -> dict[str, Tensor]:
    """Rows with different problems."""
    generator = torch.Generator().manual_seed(vocab)
    random = torch.randn(vocab, generator=generator) * 3
    holes = random.clone()
    holes[torch.rand(vocab, generator=generator) < 0.7] = -math.inf
    return {
        "random": random,
        "tied": (random / 2).round() * 2,
        "holes": holes,
        "flat": torch.full((vocab,), 1.5),
        "peaked": torch.where(torch.arange(vocab) == vocab // 3, 60.0, random),
    }


def check_samples(sampler: Sampler, oracles: list[OracleRow], logits: Tensor, steps: int) -> int:
    """Compare `steps` tokens of every row with the oracle; return how many were beyond doubt."""
    sure = 0
    for _ in range(steps):
        tokens = sampler.sample(logits.clone(), list(range(len(oracles)))).token_ids.tolist()
        for oracle, row, token in zip(oracles, logits.numpy(), tokens, strict=True):
            expected = oracle.sample(row)
            assert token == expected.token or expected.is_ambiguous
            sure += not expected.is_ambiguous
            oracle.count(token)
    return sure


@pytest.mark.parametrize("vocab", VOCABS)
def test_every_token_equals_the_definition(make: Make, vocab: int) -> None:
    """One batch has all mixes of top_k, top_p and kinds of logits."""
    top_ks = (0, 2, 50, 600, vocab - 1, vocab, 10**9)
    cuts = list(itertools.product(top_ks if vocab < 65536 else (0, 50, 20000), (1.0, 0.9, 0.6, 1e-6)))
    kinds = list(kinds_of_logits(vocab).values())
    rows = [SamplingParams(top_k=k, top_p=p, seed=i * 2**40 + 7) for i, (k, p) in enumerate(cuts)]
    params = [p for p in rows for _ in kinds]
    logits = torch.stack(kinds * len(rows))
    sure = check_samples(make(vocab, params), [OracleRow(p) for p in params], logits, 1 if vocab == 65536 else 8)
    assert sure > 0.9 * len(params)


def test_exactly_the_kept_tokens_are_sampled(make: Make) -> None:
    """At a high temperature, every kept token occurs."""
    logits = (torch.randn(64, generator=torch.Generator().manual_seed(1)) * 2).round()
    for top_k, top_p in [(10, 1.0), (0, 0.5), (10, 0.1), (1, 1.0), (0, 0.0), (64, 1.0), (7, 0.9)]:
        params = [SamplingParams(top_k=top_k, top_p=top_p, temperature=5.0, seed=s) for s in range(1200)]
        sampled = make(64, params).sample(logits.repeat(len(params), 1), list(range(len(params)))).token_ids
        kept = OracleRow(params[0]).sample(logits.numpy()).kept
        assert sorted(set(sampled.tolist())) == np.flatnonzero(kept).tolist()


def test_exactly_top_k_of_tied_tokens_stay(make: Make) -> None:
    params = [SamplingParams(top_k=5, seed=s) for s in range(400)]
    sampled = make(1003, params).sample(torch.zeros(400, 1003), list(range(400))).token_ids
    assert set(sampled.tolist()) == set(range(5))


def test_top_p_of_one_keeps_everything(make: Make) -> None:
    """A cumulative sum below 1.0 must not make this row greedy."""
    params = [SamplingParams(top_p=1.0, seed=s) for s in range(300)]
    sampled = make(1003, params).sample(torch.zeros(300, 1003), list(range(300))).token_ids
    assert len(set(sampled.tolist())) > 200


@pytest.mark.parametrize("vocab", [12, 1003])
@pytest.mark.parametrize("cut", [(0, 1.0), (8, 1.0), (0, 0.8), (6, 0.9)])
def test_distribution(make: Make, vocab: int, cut: tuple[int, float]) -> None:
    """Chi-square of 6000 samples against the renormalised softmax; the bound is about the 1e-6 quantile."""
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 1.5
    rows, steps = 500, 12
    params = [SamplingParams(top_k=cut[0], top_p=cut[1], temperature=0.8, seed=s) for s in range(rows)]
    sampler = make(vocab, params)
    counts = np.zeros(vocab)
    for _ in range(steps):
        tokens = sampler.sample(logits.repeat(rows, 1), list(range(rows))).token_ids
        counts += np.bincount(tokens.numpy(), minlength=vocab)
    kept = OracleRow(params[0]).sample(logits.numpy()).kept
    expected = np.where(kept, np.exp(logits.double().numpy() / 0.8), 0)
    expected *= rows * steps / expected.sum()
    assert counts[~kept].sum() == 0
    common = expected >= 5
    cells = np.append(counts[common], counts[~common].sum()), np.append(expected[common], expected[~common].sum())
    sampled, due = (cell[cells[1] > 0] for cell in cells)
    degrees = len(due) - 1
    assert ((sampled - due) ** 2 / due).sum() < degrees + 4.8 * math.sqrt(2 * degrees) + 15


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_penalties_step_by_step(make: Make, temperature: float) -> None:
    """Counts decay, exempt tokens pay presence only, bias and bans come first; 60 steps against a dict."""
    vocab, penalty_exempt = 200, (3, 4, 5)
    params = [
        SamplingParams(
            temperature=temperature,
            top_k=0 if req_slot % 2 else 40,
            presence_penalty=presence,
            frequency_penalty=frequency,
            penalty_decay=decay,
            logit_bias={3: 4.0, 4: 3.0, req_slot: 2.0, 190: -math.inf} if req_slot % 3 else {},
            seed=req_slot,
        )
        for req_slot, (presence, frequency, decay) in enumerate(
            itertools.product((0.0, 2.0, -0.5), (0.0, 0.2, 1.0), (1.0, 0.9, 0.0))
        )
    ]
    sampler = make(vocab, params, penalty_exempt)
    oracles = [OracleRow(p, frozenset(penalty_exempt)) for p in params]
    logits = torch.randn(len(params), vocab, generator=torch.Generator().manual_seed(5)) * 2
    logits[:, 190] = 50
    assert check_samples(sampler, oracles, logits, 60) > 50 * len(params)


def test_a_new_row_forgets_the_previous_one(make: Make) -> None:
    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(6))
    params = SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, logit_bias={7: 2.0}, seed=9)
    sampler = make(100, [params])
    first = [sampler.sample(logits.clone(), [0]).token_ids.item() for _ in range(20)]
    sampler.admit(0, SamplingParams(presence_penalty=5.0, seed=1))
    assert [sampler.sample(logits.clone(), [0]).token_ids.item() for _ in range(10)] != first[:10]
    sampler.admit(0, params)
    assert [sampler.sample(logits.clone(), [0]).token_ids.item() for _ in range(20)] == first


def test_a_new_rows_counts_start_at_zero(make: Make) -> None:
    """Regardless of the counts of the slot's previous row."""
    sampler = make(10, [SamplingParams(temperature=0.0, frequency_penalty=0.001)])
    favourite = torch.zeros(1, 10)
    favourite[0, 7] = 5.0
    assert [sampler.sample(favourite.clone(), [0]).token_ids.item() for _ in range(30)] == [7] * 30
    sampler.admit(0, SamplingParams(temperature=0.0, frequency_penalty=1.0))
    rivals = torch.zeros(1, 10)
    rivals[0, 3], rivals[0, 4] = 10.0, 5.5
    assert [sampler.sample(rivals.clone(), [0]).token_ids.item() for _ in range(6)] == [3, 3, 3, 3, 3, 4]


@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0.0), SamplingParams(top_k=1), SamplingParams(top_p=0.0)],
    ids=["temperature", "top_k", "top_p"],
)
def test_greedy_rows_take_the_lowest_of_equal_tokens(make: Make, params: SamplingParams) -> None:
    sampler = make(64, [params])
    assert [sampler.sample(torch.ones(1, 64), [0]).token_ids.item() for _ in range(8)] == [0] * 8


def test_on_equal_scores_the_lower_id_wins(make: Make) -> None:
    """Logits too large for noise to matter."""
    rows = [SamplingParams(seed=seed, top_k=k, top_p=p) for seed in range(4) for k, p in ((5, 1.0), (0, 0.9), (0, 1.0))]
    logits = torch.randn(len(rows), 50, generator=torch.Generator().manual_seed(3))
    logits[:, [7, 30, 41]] = math.inf
    assert make(50, rows).sample(logits, list(range(len(rows)))).token_ids.tolist() == [7] * len(rows)


def test_a_token_just_below_top_p_is_kept(make: Make) -> None:
    """The first of two equal tokens has half of the mass. That is below 0.5003."""
    rows = [SamplingParams(seed=seed, top_p=0.5003) for seed in range(64)]
    logits = torch.full((64, 50), -math.inf)
    logits[:, [7, 30]] = 1.0
    assert set(make(50, rows).sample(logits, list(range(64))).token_ids.tolist()) == {7, 30}


def mixed_params() -> list[SamplingParams]:
    """One row of every kind."""
    return [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=2**64 - 1),
        SamplingParams(top_k=50, top_p=0.6, presence_penalty=2.0, frequency_penalty=0.2, penalty_decay=0.996, seed=4),
        SamplingParams(top_p=0.95, temperature=2.0, seed=5),
        SamplingParams(method=Method.NOISE, noise=3.0, seed=6),
        SamplingParams(top_k=3000, seed=7, logit_bias={1: -math.inf, 2: 3.0}),
        SamplingParams(top_k=50, top_p=0.6, seed=8, top_logprobs=2),
    ]


def test_a_row_samples_the_same_in_any_batch(make: Make) -> None:
    params = mixed_params()
    vocab, order = 4099, list(reversed(range(len(params))))
    logits = torch.randn(12, len(params), vocab, generator=torch.Generator().manual_seed(7)) * 3
    together, shuffled = make(vocab, params), make(vocab, params)
    alone = [make(vocab, params) for _ in params]
    for step in logits:
        tokens = together.sample(step.clone(), list(range(len(params)))).token_ids
        assert torch.equal(tokens[order], shuffled.sample(step[order].clone(), order).token_ids)
        for req_slot, sampler in enumerate(alone):
            assert (
                sampler.sample(step[req_slot : req_slot + 1].clone(), [req_slot]).token_ids.item()
                == tokens[req_slot].item()
            )


def test_a_row_with_earlier_tokens_continues_in_a_new_slot(make: Make) -> None:
    params = [*mixed_params(), SamplingParams(presence_penalty=1.5, penalty_decay=0.9, logit_bias={3: 4.0}, seed=10)]
    vocab, exempt = 211, (3, 5)
    logits = torch.randn(90, len(params), vocab, generator=torch.Generator().manual_seed(17)) * 2
    req_slots = list(range(len(params)))
    stayed, moved = make(vocab, params, exempt), make(vocab, params, exempt)
    tokens = [stayed.sample(step.clone(), req_slots).token_ids for step in logits]
    sampled = torch.stack(tokens[:80]).T.tolist()
    moved.append_tokens(req_slots, sampled)
    for step, expected in zip(logits[80:], tokens[80:], strict=True):
        assert torch.equal(moved.sample(step.clone(), req_slots).token_ids, expected)


def _packed(bits: Tensor) -> Tensor:
    """Pack [R, V] bool to masks [R, ceil(V / 32)] int32."""
    rows, vocab = bits.shape
    padded = torch.zeros(rows, -(-vocab // 32) * 32, dtype=torch.int64)
    padded[:, :vocab] = bits
    words = (padded.view(rows, -1, 32) << torch.arange(32)).sum(dim=2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


@pytest.mark.parametrize(("first", "last"), [(0, 130), (2000, 12_000), (20_000, 20_011)])
def test_forbidden_chunks_are_never_sampled(make: Make, first: int, last: int) -> None:
    """With any logits. Those of allowed tokens are flat, so rows without truncation have many candidates."""
    noisy = SamplingParams(method=Method.NOISE, noise=1.0, seed=4)
    params, vocab = [*mixed_params(), SamplingParams(top_p=0.99, seed=3), noisy], 20_011
    sampler, naive = make(vocab, params), NaiveSampler(len(params), vocab, CPU, [])
    for req_slot, own in enumerate(params):
        naive.admit(req_slot, own)
    generator = torch.Generator().manual_seed(first)
    bits = torch.zeros(len(params), vocab, dtype=torch.bool)
    bits[:, first:last] = True
    for _ in range(2):
        logits = torch.rand(len(params), vocab, generator=generator)
        logits[~bits] += 20
        tokens = sampler.sample(logits.clone(), list(range(len(params))), _packed(bits)).token_ids
        assert bits.gather(1, tokens.unsqueeze(1)).all()
        assert torch.equal(tokens, naive.sample(logits, list(range(len(params))), _packed(bits)).token_ids)


@pytest.mark.parametrize("vocab", [50, 130, 192, 1003, 1024])
def test_forbidden_tokens_at_the_end_add_no_mass(make: Make, vocab: int) -> None:
    """With any logits: top_p counts allowed tokens only. The end is a whole chunk of the vocabulary or a part."""
    params = [SamplingParams(top_p=top_p, seed=seed) for seed in range(60) for top_p in (0.3, 0.5, 0.9)]
    sampler, naive = make(vocab, params), NaiveSampler(len(params), vocab, CPU, [])
    for req_slot, own in enumerate(params):
        naive.admit(req_slot, own)
    logits = torch.randn(len(params), vocab, generator=torch.Generator().manual_seed(vocab))
    bits = torch.zeros(len(params), vocab, dtype=torch.bool)
    bits[:, : vocab // 2] = True
    logits[~bits] += 12
    tokens = sampler.sample(logits.clone(), list(range(len(params))), _packed(bits)).token_ids
    assert torch.equal(tokens, naive.sample(logits, list(range(len(params))), _packed(bits)).token_ids)


@pytest.mark.parametrize("allowed", rest_slow([60, 1, 3, 3000, 60_000], 2))
def test_masked_tokens_equal_the_definition(make: Make, allowed: int) -> None:
    """In vocabularies of many chunks; a mask leaves tokens in few of them."""
    params, vocab = mixed_params(), 65536
    sampler, naive = make(vocab, params), NaiveSampler(len(params), vocab, CPU, [])
    for req_slot, own in enumerate(params):
        naive.admit(req_slot, own)
    generator = torch.Generator().manual_seed(allowed)
    for _ in range(4):
        logits = torch.randn(len(params), vocab, generator=generator) * 3
        bits = torch.zeros(len(params), vocab, dtype=torch.bool)
        for row in bits:
            row[torch.randperm(vocab, generator=generator)[:allowed]] = True
        masks = _packed(bits)
        tokens = sampler.sample(logits.clone(), list(range(len(params))), masks).token_ids
        assert bits.gather(1, tokens.unsqueeze(1)).all()
        assert torch.equal(tokens, naive.sample(logits, list(range(len(params))), masks).token_ids)


def test_steps_and_seeds_determine_the_token(make: Make) -> None:
    logits = torch.zeros(2, 1003)
    sampler = make(1003, [SamplingParams(seed=1), SamplingParams(seed=1)])
    tokens = torch.stack([sampler.sample(logits.clone(), [0, 1]).token_ids for _ in range(20)])
    assert torch.equal(tokens[:, 0], tokens[:, 1])
    assert len(set(tokens[:, 0].tolist())) > 15
    sampler.admit(0, SamplingParams(seed=1 + 2**32))
    assert sampler.sample(logits.clone(), [0, 1]).token_ids[0] != tokens[0, 0]


def test_nan_and_infinite_logits_affect_only_their_row(make: Make) -> None:
    vocab, params = 1003, [p for p in mixed_params() for _ in range(5)]
    clean = torch.randn(len(params), vocab, generator=torch.Generator().manual_seed(8))
    odd = clean.clone()
    odd[0::5] = math.nan
    odd[1::5, 17] = math.nan
    odd[2::5, 17] = math.inf
    odd[3::5] = -math.inf
    sampler, oracles = make(vocab, params), [OracleRow(p) for p in params]
    expected = make(vocab, params).sample(clean, list(range(len(params)))).token_ids
    tokens = sampler.sample(odd.clone(), list(range(len(params)))).token_ids
    assert torch.equal(tokens[4::5], expected[4::5])
    assert set(tokens[0::5].tolist()) | set(tokens[3::5].tolist()) == {0}
    assert set(tokens[2::5].tolist()) == {17}
    assert 17 not in tokens[1::5].tolist()
    for row in range(1, len(params), 5):
        assert tokens[row].item() == oracles[row].sample(odd[row].numpy()).token


def test_noise(make: Make) -> None:
    """argmax(logits / T + U(0, n)): exact, within reach of the largest, greedy without noise or temperature."""
    params = [SamplingParams(method=Method.NOISE, noise=2.0, temperature=0.5, seed=s, top_k=1) for s in range(300)]
    logits = torch.linspace(0, 3, 64).flip(0)
    sampler, oracles = make(64, params), [OracleRow(p) for p in params]
    assert check_samples(sampler, oracles, logits.repeat(300, 1), 2) > 500
    sampled = make(64, params).sample(logits.repeat(300, 1), list(range(300))).token_ids
    assert len(set(sampled.tolist())) > 5
    assert (logits[sampled] / 0.5 >= 3 / 0.5 - 2).all()
    greedy = [SamplingParams(method=Method.NOISE, noise=n, temperature=t) for n, t in ((0.0, 1.0), (5.0, 0.0))]
    assert make(64, greedy).sample(logits.repeat(2, 1), [0, 1]).token_ids.tolist() == [0, 0]


def test_logprobs_are_of_the_raw_distribution(make: Make) -> None:
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=3, temperature=0.1, presence_penalty=9.0, logit_bias={5: 30.0}, top_logprobs=4),
        SamplingParams(seed=3, top_logprobs=0),
    ]
    logits = torch.randn(3, 1003, generator=torch.Generator().manual_seed(9))
    sampled = make(1003, params).sample(logits.clone(), [0, 1, 2])
    expected, tokens = logits.double().log_softmax(1), sampled.token_ids
    assert sampled.logprobs is not None
    assert tokens[1] == 5
    torch.testing.assert_close(sampled.logprobs.chosen[1:].double(), expected[[1, 2], tokens[1:]], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(sampled.logprobs.top[1].double(), expected[1].topk(4).values, atol=1e-5, rtol=1e-5)
    assert sampled.logprobs.top_ids[1].tolist() == expected[1].topk(4).indices.tolist()
    assert make(1003, params[:1]).sample(logits[:1], [0]).logprobs is None


def test_bad_parameters_and_shapes_are_named(make: Make) -> None:
    sampler = make(50, [SamplingParams()])
    with pytest.raises(ValueError, match="token 50 is outside the vocabulary of 50"):
        sampler.admit(0, SamplingParams(logit_bias={50: 1.0}))
    with pytest.raises(ValueError, match="token 3 is NaN"):
        sampler.admit(0, SamplingParams(logit_bias={3: math.nan}))
    with pytest.raises(ValueError, match="logits"):
        sampler.sample(torch.zeros(2, 50), [0])
    with pytest.raises(IndexError):
        sampler.admit(1, SamplingParams())
