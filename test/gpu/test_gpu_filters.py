"""The filters of `rapid` on a GPU: what they keep, their tokens, rows alone and in a batch. (-m gpu)"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import pytest
import torch
from torch import Tensor

from sampling.filtered_sampler import FilteredSampler
from sampling.filters import apply_filters
from sampling.naive import NaiveSampler
from sampling.params import SamplingParams
from sampling.rapid import RapidSampler
from sampling.row_context import RowContext
from test.sampling.test_filters import CASES, DRAWN, Floats, chi_squared, context

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
GPU = torch.device("cuda")
ROWS = 64


def made(vocab: int, rows: Sequence[SamplingParams]) -> tuple[RapidSampler, FilteredSampler]:
    """Return the kernel and the definition, with a request slot for each of the parameters."""
    size = (len(rows), vocab, GPU, [3])
    kernel, definition = RapidSampler(*size), FilteredSampler(NaiveSampler(*size), *size)
    row = context(vocab)
    for req_slot, params in enumerate(rows):
        kernel.admit(req_slot, params, row if params.filters is not None else RowContext())
        if params.filters is not None:
            definition.admit(req_slot, params, row)
    return kernel, definition


def random_logits(rows: int, vocab: int, seed: int) -> Tensor:
    return torch.randn(rows, vocab, device=GPU, generator=torch.Generator(GPU).manual_seed(seed)) * 2.5


def filtered(sampler: RapidSampler, logits: Tensor) -> Tensor:
    """Return what the kernel leaves of logits [R, V]."""
    out = logits.clone()
    sampler._apply_filters(out, torch.arange(len(out), dtype=torch.int32, device=GPU), may_sample=False)
    return out


def defined(sampler: FilteredSampler, logits: Tensor) -> Tensor:
    """Return what the definition leaves of logits [R, V]."""
    out = logits.clone()
    for group in sampler._groups_of(list(range(len(out)))):
        out[group.rows] = apply_filters(out[group.rows], group)
    return out


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["plain", "tied", "odd size"])
def test_the_kernel_keeps_what_the_definition_keeps(name: str, kind: str) -> None:
    """A token at a boundary may differ by rounding; then one of a row does, in few rows."""
    vocab = 50_277 if kind == "odd size" else 65_536
    params = [SamplingParams(seed=2**40 * i + 7, logit_bias={5: 1.0}, **CASES[name]) for i in range(ROWS)]
    kernel, definition = made(vocab, params)
    slots = list(range(ROWS))
    logits = random_logits(ROWS, vocab, 1)
    if kind == "tied":
        logits = (logits * 4).round() / 4
    logits[0, ::2], logits[1, 3], logits[2] = -math.inf, math.nan, -math.inf
    for _ in range(3):  # with tokens of the answer
        tokens = [one.sample(logits.clone(), slots).token_ids for one in (kernel, definition)]
        different = int((tokens[0] != tokens[1]).sum())
        assert different <= 1
        if different:
            return  # rounding decided once; from here on the rows' histories differ
    found, expected = filtered(kernel, logits), defined(definition, logits)
    differing = ((found == -math.inf) != (expected == -math.inf)).sum(dim=1)
    assert int((differing > 0).sum()) <= 2 and int(differing.max()) <= 1
    both = (found > -math.inf) & (expected > -math.inf)
    torch.testing.assert_close(found[both], expected[both], rtol=1e-5, atol=1e-5)


def test_a_row_has_the_same_bits_alone_and_in_any_batch() -> None:
    cases = [SamplingParams(seed=i, **case) for i, case in enumerate(CASES.values())]
    cases.append(SamplingParams(seed=9, top_k=50, presence_penalty=1.0))
    rows = [msgspec.structs.replace(cases[i % len(cases)], seed=i) for i in range(320)]
    kernel, _ = made(65_536, rows)
    logits = random_logits(320, 65_536, 5)
    together = filtered(kernel, logits)
    for row in (0, 7, 15, 16, 319):
        alone = logits[row : row + 1].clone()
        kernel._apply_filters(alone, torch.tensor([row], dtype=torch.int32, device=GPU), may_sample=False)
        assert torch.equal(alone[0], together[row])
    single, _ = made(65_536, rows[15:16])
    batch, _ = made(65_536, rows)
    for step in range(6):
        logits = random_logits(320, 65_536, step)
        expected = single.sample(logits[15:16].clone(), [0]).token_ids[0]
        assert batch.sample(logits.clone(), list(range(320))).token_ids[15] == expected


@pytest.mark.parametrize("name", DRAWN)
def test_draws_follow_the_definition(name: str) -> None:
    """10,240 draws of rows with seeds of their own."""
    vocab, rows = 1003, 1024
    logits = random_logits(1, vocab, 8)
    params = [SamplingParams(seed=i * 7919 + 1, **CASES[name]) for i in range(rows)]
    _, definition = made(vocab, params)
    masses: Floats = torch.softmax(defined(definition, logits.expand(rows, -1)).double(), dim=1).cpu().numpy()
    counts: Floats = torch.zeros(vocab, dtype=torch.float64).numpy()
    expected = masses.mean(axis=0)
    for start in range(10):
        kernel, definition = made(vocab, [msgspec.structs.replace(p, seed=p.seed + start * 2**33) for p in params])
        if "xtc" in name:
            masses = torch.softmax(defined(definition, logits.expand(rows, -1)).double(), dim=1).cpu().numpy()
            expected = expected + (masses.mean(axis=0) - expected) / (start + 1)
        tokens = kernel.sample(logits.repeat(rows, 1), list(range(rows))).token_ids
        counts += torch.bincount(tokens, minlength=vocab).cpu().numpy()
    chi_squared(counts, expected)
