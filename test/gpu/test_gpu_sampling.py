"""GPU samplers: `rapid` in every launch shape, in a graph, on fp16; FlashInfer's filters. (-m gpu)"""

from __future__ import annotations

import importlib.util
import math

import msgspec
import pytest
import torch

from sampling.params import Method, SamplingParams
from sampling.registry import sampler_class
from sampling.sampler import Sampler
from test.sampling_oracle import OracleRow

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
GPU = torch.device("cuda")
VOCAB = 65536


def mixed(rows: int) -> list[SamplingParams]:
    """Return rows of every sampling kind, each with its own seed."""
    sorts = [
        SamplingParams(top_k=50, top_p=0.6, presence_penalty=2.0, frequency_penalty=0.2, penalty_decay=0.996),
        SamplingParams(temperature=0.0, presence_penalty=0.5),
        SamplingParams(temperature=0.7),
        SamplingParams(top_p=0.9, temperature=2.0),
        SamplingParams(top_k=400, logit_bias={5: 3.0, 9: -math.inf}),
        SamplingParams(top_p=0.3),
        SamplingParams(method=Method.NOISE, noise=2.0),
        SamplingParams(top_k=5000, top_p=0.99, temperature=3.0, frequency_penalty=1.0),
        SamplingParams(top_k=1, logit_bias={7: 2.0}),
    ]
    return [
        msgspec.structs.replace(sorts[req_slot % len(sorts)], seed=req_slot * 2**35 + 3) for req_slot in range(rows)
    ]


def made(name: str, params: list[SamplingParams], vocab: int = VOCAB) -> Sampler:
    sampler = sampler_class(name)(len(params), vocab, GPU, [11, 12])
    for req_slot, row in enumerate(params):
        sampler.admit(req_slot, row)
    return sampler


def random_logits(rows: int, seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, device=GPU, generator=torch.Generator(GPU).manual_seed(seed)) * 3


@pytest.mark.parametrize("rows", [1, 100, 200, 300])
def test_rapid_equals_naive_in_every_launch_shape(rows: int) -> None:
    params = mixed(rows)
    rapid, naive = made("rapid", params), made("naive", params)
    req_slots, different = list(range(rows)), 0
    for step in range(6):
        logits = random_logits(rows, step)
        tokens = rapid.sample(logits, req_slots).token_ids
        expected = naive.sample(logits.clone(), req_slots).token_ids
        different += int((tokens != expected).sum())
        assert different <= 1
        if different:
            return  # rounding decided once; from here on the rows' penalties differ


@pytest.mark.parametrize("kind", ["flat", "tied", "holes", "outlier"])
def test_rapid_on_rows_that_defeat_the_short_list(kind: str) -> None:
    base = torch.randn(VOCAB, device=GPU, generator=torch.Generator(GPU).manual_seed(4)) * 3
    row = {
        "flat": torch.zeros_like(base),
        "tied": (base / 4).round() * 4,
        "holes": base.masked_fill(torch.arange(VOCAB, device=GPU) % 3000 != 7, -math.inf),
        "outlier": torch.where(torch.arange(VOCAB, device=GPU) < 3, 1e25, base),
    }[kind]
    cuts = [(50, 1.0), (0, 0.6), (700, 0.9), (30000, 1.0), (0, 1e-4), (2, 0.5), (40000, 0.7)]
    params = [SamplingParams(top_k=k, top_p=p, seed=s) for s in range(4) for k, p in cuts]
    tokens = made("rapid", params).sample(row.repeat(len(params), 1), list(range(len(params)))).token_ids.tolist()
    samples = [OracleRow(p).sample(row.cpu().numpy()) for p in params]
    assert all(token == sample.token or sample.is_ambiguous for token, sample in zip(tokens, samples, strict=True))


@pytest.mark.parametrize("rows", [8, 30, 64, 300])
def test_a_row_with_little_truncation_samples_the_same_alone_and_in_a_batch(rows: int) -> None:
    """With few rows 8, 4 or 2 CTAs share the second pass; with many, one CTA runs it."""
    cuts = [(0, 0.5), (0, 0.9), (0, 0.999), (40000, 0.9), (3000, 0.97), (0, 0.05)]
    params = [
        SamplingParams(temperature=1.5, top_k=k, top_p=p, presence_penalty=seed % 2, logit_bias={7: 5.0}, seed=seed)
        for seed, (k, p) in ((seed, cuts[seed % len(cuts)]) for seed in range(rows))
    ]
    together = made("rapid", params)
    alone = [made("rapid", [row]) for row in params[: 2 * len(cuts)]]
    for step in range(4):
        logits = random_logits(rows, step)
        tokens = together.sample(logits, list(range(rows))).token_ids.tolist()
        assert tokens[: len(alone)] == [
            int(one.sample(logits[i : i + 1], [0]).token_ids) for i, one in enumerate(alone)
        ]


def test_rapid_does_not_change_or_need_fresh_logits() -> None:
    params = mixed(90)
    logits = random_logits(90, 1)
    kept = logits.clone()
    made("rapid", params).sample(logits, list(range(90)))
    assert torch.equal(logits, kept)


def test_fp16_logits_sample_as_their_fp32_values() -> None:
    params = mixed(90)
    half, single = made("rapid", params), made("rapid", params)
    for step in range(3):
        logits = random_logits(90, step).half()
        req_slots = list(range(90))
        assert torch.equal(half.sample(logits, req_slots).token_ids, single.sample(logits.float(), req_slots).token_ids)


def test_graph_replays_equal_eager_steps_with_padding() -> None:
    params = mixed(60)
    eager, graphed = made("rapid", params), made("rapid", params)
    logits = torch.zeros(64, VOCAB, device=GPU)
    req_slots = torch.tensor([*reversed(range(60)), 60, 60, 60, -1], dtype=torch.int32, device=GPU)
    out = torch.full((64,), -7, dtype=torch.int64, device=GPU)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graphed.sample_on_device(logits, req_slots, out)  # type: ignore[attr-defined]
    for step in range(5):
        logits.copy_(random_logits(64, step))
        graph.replay()
        expected = eager.sample(logits[:60].clone(), list(reversed(range(60)))).token_ids
        assert torch.equal(out[:60], expected)
        assert out[60:].tolist() == [0, 0, 0, 0]


def test_rapid_sample_checks_its_arguments() -> None:
    rapid = made("rapid", mixed(4))
    req_slots = torch.zeros(4, dtype=torch.int32, device=GPU)
    with pytest.raises(TypeError, match=r"out: must be torch.int64"):
        rapid.sample_on_device(random_logits(4, 0), req_slots, req_slots)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="do not fit 4 request slots"):
        rapid.sample(random_logits(4, 0, vocab=100), [0, 1, 2, 3])


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer-python is not installed")
def test_flashinfer_filters_like_the_definition() -> None:
    """Same filters, same random numbers: equal to rapid except where the mass at a cut is rounded differently."""
    params = mixed(90)
    filtered, rapid = made("flashinfer", params), made("rapid", params)
    logits = random_logits(90, 2)
    logits[45:] = (logits[45:] * 2).round() / 2
    req_slots = list(range(90))
    tokens, expected = (
        filtered.sample(logits.clone(), req_slots).token_ids,
        rapid.sample(logits.clone(), req_slots).token_ids,
    )
    assert int((tokens != expected).sum()) <= 2


@pytest.mark.parametrize(
    "name",
    [
        "rapid",
        pytest.param(
            "flashinfer",
            marks=pytest.mark.skipif(
                importlib.util.find_spec("flashinfer") is None, reason="flashinfer-python is not installed"
            ),
        ),
    ],
)
def test_a_run_without_sampling_is_counted_like_the_definition(name: str) -> None:
    """Runs of many lengths between samples of all kinds of rows. The runs have repeated and biased tokens."""
    params = mixed(60)
    sampler, naive = made(name, params), made("naive", params)
    sample = torch.Generator().manual_seed(5)
    for step in range(8):
        req_slots = [req_slot for req_slot in range(60) if (req_slot + step) % 3]
        runs = [
            torch.randint(
                0, 40 if req_slot % 2 else VOCAB, (1 + (req_slot * 7 + step) % 40,), generator=sample
            ).tolist()
            for req_slot in req_slots
        ]
        for each in (sampler, naive):
            each.append_tokens(req_slots, runs)
        logits = random_logits(60, step)
        expected = naive.sample(logits.clone(), list(range(60))).token_ids
        assert int((sampler.sample(logits.clone(), list(range(60))).token_ids != expected).sum()) <= step // 4


def test_sampling_ahead_is_sampling_after_a_run_and_counts_nothing() -> None:
    params = mixed(60)
    sampler, req_slots = made("rapid", params), list(range(60))
    first, logits = random_logits(60, 0), random_logits(60, 1)
    sampler.sample(first.clone(), req_slots)
    for count in (0, 1, 5, 0):
        runs = [[(req_slot * 31 + i) % VOCAB for i in range(count)] for req_slot in req_slots]
        naive = made("naive", params)
        naive.sample(first.clone(), req_slots)
        if count:
            naive.append_tokens(req_slots, runs)
        expected = naive.sample(logits.clone(), req_slots).token_ids
        twice = sampler.sample_ahead(torch.cat([logits, logits]), req_slots * 2, runs * 2)
        assert torch.equal(twice[:60], twice[60:]) and int((twice[:60] != expected).sum()) <= 1
