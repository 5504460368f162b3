"""Constrained rows on a GPU: masks in every sampler, while graphs decode unconstrained rows. (-m gpu)"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
import torch

from demo.files import ensure_model
from rwkv_batch.engine import Engine
from rwkv_batch.request import GenerateRequest
from sampling.grammar.constraint import Constraint, Form, RequiredText
from sampling.grammar.masks import Masks
from sampling.grammar.required_text import RequiredTextMatcher, RequiredTexts
from sampling.naive import apply_masks
from sampling.params import SamplingParams
from test.engine.test_constraints import PERSON, choice, mixed_rows, regex, schema
from test.gpu.test_gpu_sampling import GPU, VOCAB, made, mixed, random_logits
from test.harness import TOKENIZER, call, make_request, run, started_engine, turn

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
ON_GPU: dict[str, Any] = {"devices": ("cuda:0",), "max_running": 256, "prefill_tokens_per_step": 4096}
needs_flashinfer = pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="no flashinfer")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with started_engine(ensure_model(), **ON_GPU) as started:
        yield started


def random_masks(rows: int, seed: int) -> torch.Tensor:
    """Return masks that allow few tokens, half, nearly all, one, or all."""
    rng = torch.Generator().manual_seed(seed)
    allowed = torch.rand(rows, VOCAB, generator=rng) < torch.tensor([1e-3, 0.5, 0.999, 0.0, 2.0])[
        torch.arange(rows) % 5
    ].unsqueeze(1)
    allowed[:, 17] = True
    weights = torch.ones(32, dtype=torch.int64) << torch.arange(32)
    words = (allowed.view(rows, -1, 32) * weights).sum(dim=2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).to(GPU)


@pytest.mark.parametrize("name", ["rapid", pytest.param("flashinfer", marks=needs_flashinfer)])
@pytest.mark.parametrize("rows", [1, 60, 300])
def test_masked_samples_equal_the_definition(name: str, rows: int) -> None:
    params = mixed(rows)
    sampler, naive = made(name, params), made("naive", params)
    req_slots, different = list(range(rows)), 0
    for step in range(4):
        logits, masks = random_logits(rows, step), random_masks(rows, step)
        expected = naive.sample(logits.clone(), req_slots, masks).token_ids
        tokens = sampler.sample(logits.clone(), req_slots, masks).token_ids
        words = masks.gather(1, (tokens // 32).unsqueeze(1)).squeeze(1)
        assert ((words >> (tokens % 32).int()) & 1).bool().all(), "a forbidden token was sampled"
        different += int((tokens != expected).sum())
        assert different <= 1
        if different:
            break


def test_masked_logits_are_minus_infinity_and_the_others_stay() -> None:
    rapid = made("rapid", mixed(12))
    logits, masks = random_logits(12, 1), random_masks(12, 2)
    expected = logits.clone()
    apply_masks(expected, masks)
    rapid.apply_masks(logits, masks)  # type: ignore[attr-defined]
    assert torch.equal(logits, expected)


def test_masks_of_required_texts_come_from_the_table() -> None:
    texts = RequiredTexts(TOKENIZER, VOCAB)
    rows = [RequiredText(markers=(name,), partners=(-1,), leads="{") for name in ("{a}", "{b}", "{a}")]
    matchers = [RequiredTextMatcher(texts, row, 64) for row in rows]
    kept = Masks(VOCAB, GPU, 1)
    for text in (b" x{", b"a"):
        found, errors = kept.fill(matchers)
        assert errors == [None] * 3
        assert (found.cpu().numpy() == np.stack([matcher.mask() for matcher in matchers])).all()
        for token in TOKENIZER.encode_bytes(text):
            assert not matchers[0].advance(token)


def test_rows_give_the_same_alone_and_in_a_batch(engine: Engine) -> None:
    together = run(engine, *mixed_rows()).all_texts
    alone = [run(engine, row).all_texts[0] for row in mixed_rows()]
    assert together == alone
    jsonschema_rs.validate(PERSON, json.loads(together[0]))
    assert call(engine, "status")["decode_graphs"] == "used"


def constrained_batch(constrained: bool) -> list[GenerateRequest]:
    """Return unconstrained rows with constrained ones between them."""
    rows = []
    for i in range(60):
        free = SamplingParams(seed=i, top_k=40)
        rows.append(make_request(f"English: sentence {i}\n\nChinese:", max_tokens=24, sampling=free, ignore_eos=True))
        if constrained:
            rows.append(make_request(f"A person {i}:", max_tokens=90, sampling=free, constraint=schema(PERSON)))
    return rows


def test_rows_without_a_constraint_do_not_change(engine: Engine) -> None:
    """Two in a hundred may differ: the row count chooses the GEMM kernels, and near-ties fall either way."""
    free = run(engine, *constrained_batch(constrained=False)).all_texts
    mixed_texts = run(engine, *constrained_batch(constrained=True)).all_texts
    same = sum(a == b for a, b in zip(mixed_texts[::2], free, strict=True))
    assert same >= 0.9 * len(free)
    for text in mixed_texts[1::2]:
        if text.endswith(b"}"):
            jsonschema_rs.validate(PERSON, json.loads(text))


@pytest.mark.parametrize("fields", [{"overlap": False}, {"samplers": ("naive",)}, {"samplers": ("flashinfer",)}])
def test_loops_and_samplers_agree(engine: Engine, fields: dict[str, Any]) -> None:
    rows = [row for row in mixed_rows() if row.constraint is not None]
    expected = run(engine, *rows).all_texts
    with started_engine(ensure_model(), **ON_GPU, **fields) as other:
        assert run(other, *rows).all_texts == expected


def test_two_stages_and_sessions(tmp_path: Path) -> None:
    rows = [row for row in mixed_rows() if row.constraint is not None]
    devices = ("cuda:0", "cuda:0") if torch.cuda.device_count() < 2 else ("cuda:0", "cuda:1")
    with (
        started_engine(ensure_model(), **ON_GPU) as one,
        started_engine(ensure_model(), **{**ON_GPU, "devices": devices}) as two,
    ):
        assert run(one, *rows).all_texts == run(two, *rows).all_texts
        for engine in (one, two):
            assert run(engine, turn("s", "Yes or no?", constraint=choice("yes", "no"))).all_texts[0] in (b"yes", b"no")
            assert run(engine, turn("s", "\n\nA number:", constraint=regex("[0-9]{4}"))).all_texts[0].isdigit()


def test_log_probabilities_are_of_the_allowed_tokens(engine: Engine) -> None:
    asked = SamplingParams(temperature=0.0, top_logprobs=4)
    row = make_request("x", constraint=Constraint(form=Form.CHOICE, source='["yes"]'), sampling=asked)
    running = run(engine, row)
    entries = [entry for event in running.events for delta in event.deltas for entry in delta.logprobs or ()]
    assert b"".join(entry.token for entry in entries) == b"yes"
    assert all(entry.logprob > -50 for entry in entries)


def test_jump_forward_text_is_read_at_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal to sampling one by one except on near-ties: the token count chooses the GEMM kernels."""
    how = SamplingParams(seed=4, top_k=20, presence_penalty=0.5, frequency_penalty=0.2, penalty_decay=0.95)
    rows = [make_request(f"A person {i}:", constraint=schema(PERSON), sampling=how, max_tokens=90) for i in range(24)]
    before = engine.jobs.jump_forward.num_tokens
    at_once = run(engine, *rows)
    taken = engine.jobs.jump_forward.num_tokens - before
    assert taken > 24 * 4
    monkeypatch.setattr(engine.jobs.jump_forward, "max_rows", -1)
    one_by_one = run(engine, *rows)
    assert engine.jobs.jump_forward.num_tokens == before + taken
    assert sum(a == b for a, b in zip(at_once.all_texts, one_by_one.all_texts, strict=True)) >= 18
    for text in at_once.all_texts:
        if text.endswith(b"}"):
            jsonschema_rs.validate(PERSON, json.loads(text))
