"""Philox against its published vectors, the registry, and the request slots' tables."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest
import torch

from rwkv_batch.config import EngineConfig
from sampling import philox, registry
from sampling.flashinfer import FlashInferSampler
from sampling.naive import NaiveSampler, make_plan, ranked_top, truncation_mask
from sampling.params import SamplingParams
from sampling.req_slots import Penalised, ReqSlotTable
from sampling.sampler import target_logprobs
from test.sampling_oracle import philox as numpy_philox
from test.sampling_oracle import uniforms

CPU = torch.device("cpu")
ALL_ONES = 0xFFFFFFFF
# Random123, kat_vectors: philox4x32 10.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ALL_ONES,) * 4, (ALL_ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, int], answer: tuple[int, ...]) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    k0, k1 = (torch.tensor([word]) for word in key)
    assert tuple(int(word) for word in philox.philox4x32((c0, c1, c2, c3), (k0, k1))) == answer
    assert tuple(numpy_philox(np.array([counter], dtype=np.uint64), key)[0].tolist()) == answer


def test_words_at_tokens_are_those_of_the_vocabulary() -> None:
    seeds, steps = torch.tensor([5, philox.signed64(2**64 - 1)]), torch.tensor([0, 2**33 + 1])
    whole = philox.words_of_vocab(seeds, steps, 1003, philox.DOMAIN_GUMBEL)
    ids = torch.randperm(1003)[:100].repeat(2, 1)
    assert torch.equal(philox.words_at(seeds, steps, ids, philox.DOMAIN_GUMBEL), whole.gather(1, ids))
    expected = np.stack([uniforms(5, 0, 1003, 0), uniforms(2**64 - 1, 2**33 + 1, 1003, 0)])
    assert np.array_equal(philox.to_uniform(whole).double().numpy(), expected)
    assert not torch.equal(whole, philox.words_of_vocab(seeds, steps, 1003, philox.DOMAIN_NOISE))


def test_uniform_stays_inside_and_gumbel_finite() -> None:
    words = torch.tensor([0, 1, 2**31, 2**32 - 1])
    u = philox.to_uniform(words)
    assert ((u > 0) & (u < 1)).all()
    assert philox.to_gumbel(words).isfinite().all()
    assert philox.to_gumbel(words[:1]).item() == pytest.approx(22.8737, abs=1e-3)


def test_ranked_head_orders_equal_values_by_id() -> None:
    logits = torch.randint(0, 4, (6, 300), generator=torch.Generator().manual_seed(0)).float()
    values, ids = ranked_top(logits, 300)
    expected = torch.sort(logits, dim=1, descending=True, stable=True)
    assert torch.equal(values, expected.values)
    assert torch.equal(ids, expected.indices)


def test_seen_tokens_outgrow_their_table() -> None:
    table = ReqSlotTable(2, 1000, CPU, penalty_exempt_ids=[])
    row = Penalised(torch.tensor([0]), torch.tensor([1]), torch.tensor([[0.0, 0.0, 0.5]]), [1])
    for token in [*range(150), 3]:
        table.count(row, torch.tensor([token]))
    assert table.num_seen.tolist() == [0, 150]
    assert table.seen_ids[1, :150].tolist() == list(range(150))
    assert table.seen_counts[1, 148:150].tolist() == [0.25, 0.5]
    assert table.seen_counts[1, 3].item() == pytest.approx(1.0)


def test_the_first_usable_sampler_is_chosen() -> None:
    sampler, refusals = registry.choose_sampler(["rapid", "flashinfer", "naive"], CPU, 4, 100, [])
    assert sampler.name == "naive"
    assert set(refusals) == {"rapid", "flashinfer"}
    assert "CUDA" in refusals["rapid"]
    sampler.admit(0, SamplingParams(temperature=0.0))
    assert sampler.sample(torch.arange(100.0).unsqueeze(0), [0]).token_ids.tolist() == [99]


@pytest.mark.parametrize("error", [TypeError("two"), AttributeError("no"), subprocess.CalledProcessError(1, "ninja")])
def test_a_failed_constructor_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr(FlashInferSampler, "unavailable_reason", staticmethod(lambda device: None))
    monkeypatch.setattr(FlashInferSampler, "__init__", broken)
    sampler, refusals = registry.choose_sampler(["flashinfer", "naive"], CPU, 4, 100, [])
    assert sampler.name == "naive"
    assert refusals == {"flashinfer": f"{type(error).__name__}: {error}"}
    assert "flashinfer" in caplog.text and str(error) in caplog.text


def test_a_sampler_is_created_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = registry.choose_sampler(["naive"], CPU, 4, 100, [])
    monkeypatch.setattr(NaiveSampler, "__init__", lambda *_: pytest.fail("made twice"))
    again, refusals = registry.choose_sampler(["flashinfer", "naive"], CPU, 4, 100, [], created=[first])
    assert again is first and set(refusals) == {"flashinfer"}


def test_unknown_samplers_and_none_left() -> None:
    with pytest.raises(ValueError, match="unknown sampler 'fast'"):
        registry.choose_sampler(["fast"], CPU, 4, 100, [])
    with pytest.raises(RuntimeError, match="no sampler can serve: rapid: needs a CUDA device"):
        registry.choose_sampler(["rapid"], CPU, 4, 100, [])
    assert registry.order(("rapid", "flashinfer"), requested="flashinfer") == ("flashinfer", "rapid", "cpu", "naive")
    assert registry.order(("naive",), requested="flashinfer") == ("naive", "cpu")
    assert EngineConfig(model_path="").samplers == tuple(registry.SAMPLERS)


def test_masses_are_summed_in_fp64() -> None:
    """The first two of three tokens have slightly less than top_p; fp32 sums would not show it."""
    low = torch.linspace(-2.0, -0.01, 200)
    mass = low.exp().double()
    rows = [SamplingParams(top_p=top_p) for top_p in ((1 + mass) * (1 + 1e-10) / (1 + 2 * mass)).tolist()]
    table = ReqSlotTable(len(rows), 50, CPU, [])
    for req_slot, params in enumerate(rows):
        table.admit(req_slot, params)
    group = make_plan(table, list(range(len(rows)))).groups["cut_large"]
    first = torch.zeros(len(rows))
    assert truncation_mask(torch.stack([first, low, low], dim=1), first, group, 1 + 2 * mass).all()


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("count", [0, 1, 3])
def test_logprobs_of_a_row_are_the_same_in_any_batch(count: int) -> None:
    """torch splits the sum of a single row between threads. It does not split sums of several rows."""
    logits = torch.randn(64, 65536, generator=torch.Generator().manual_seed(0)) * 5
    targets = torch.arange(64) * 1000
    together = target_logprobs(logits.clone(), targets, count)
    alone = [target_logprobs(logits[i : i + 1].clone(), targets[i : i + 1], count) for i in range(64)]
    for field in ("chosen", "top_ids", "top"):
        assert torch.equal(torch.cat([getattr(part, field) for part in alone]), getattr(together, field))
