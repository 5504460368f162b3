"""Speculative decoding on a GPU: texts differ from plain ones no more than those of another batch size do."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from demo.evaluate import held_pairs
from demo.files import ensure_model
from rwkv_batch.core.drafters import Drafter
from rwkv_batch.core.sequence import Sequence
from rwkv_batch.engine import Engine
from rwkv_batch.request import GenerateRequest
from sampling.params import Filters, SamplingParams
from test.engine.test_constraints import PERSON, schema
from test.engine.test_speculation import Row, TestDrafter, rows_of
from test.harness import free_slots, make_request, run, started_engine, turn

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ON_GPU: dict[str, Any] = {"devices": ("cuda:0",), "max_running": 64, "prefill_tokens_per_step": 1024, "warmup": False}
MAX_DIFFERENT = 0.15
"""Share of rows with another text: near-ties that other kernels round differently."""


@pytest.fixture(scope="module")
def model() -> Path:
    return ensure_model()


def requests() -> list[GenerateRequest]:
    samples = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=3, top_p=0.5),
        SamplingParams(seed=4, top_k=20, presence_penalty=0.5),
        SamplingParams(seed=5, top_p=0.7, top_logprobs=1),
        SamplingParams(seed=6, filters=Filters(min_p=0.05, repetition_penalty=1.1)),
    ]
    rows = [
        make_request(f"English: {english}\n\nChinese:", max_tokens=40, sampling=samples[i % len(samples)])
        for i, (english, _) in enumerate(held_pairs(40, 1))
    ]
    form = schema(PERSON)
    return rows + [make_request("A person:", constraint=form, max_tokens=60, sampling=one) for one in samples]


def answers(engine: Engine, rows: list[GenerateRequest], together: int) -> list[Row]:
    groups = [rows[i : i + together] for i in range(0, len(rows), together)]
    return [one for group in groups for one in rows_of(run(engine, *group, return_token_ids=True))]


def different(some: list[Row], others: list[Row]) -> float:
    return sum(one.ids != other.ids for one, other in zip(some, others, strict=True)) / len(some)


@pytest.mark.parametrize("wkv_state", ["fp16", "int8"])
def test_texts_are_those_without_drafts(model: Path, wkv_state: str) -> None:
    rows = requests()
    off = [msgspec.structs.replace(one, speculation="off") for one in rows]
    with started_engine(model, speculate="ngram", wkv_state=wkv_state, **ON_GPU) as engine:
        slots = free_slots(engine)
        alone, batched = answers(engine, off, 1), answers(engine, off, 8)
        known = {(*row.prompt, row.sampling.seed): one.ids for row, one in zip(rows, alone, strict=True)}
        shares = {"batched": different(alone, batched)}
        for kind in ("right", "wrong", "late", "half right"):
            for together in (1, 8):
                rng = random.Random(together)

                def drafters(sequence: Sequence, kind: str = kind, rng: random.Random = rng) -> list[Drafter]:
                    request = sequence.request
                    answer = known[(*request.prompt, request.sampling.seed)]
                    return [TestDrafter(kind, answer, sequence.prompt_end, rng)]

                engine.speculation.make_drafters = drafters
                shares[f"{kind} {together}"] = different(alone, answers(engine, rows, together))
        totals = engine.speculation.totals["test"]
        print(wkv_state, shares, totals, free_slots(engine) - slots)
        assert totals.accepted > 500 and max(shares.values()) <= MAX_DIFFERENT + shares["batched"]
        assert free_slots(engine) == slots


def test_a_session_continues_after_drafts(model: Path) -> None:
    """The stored state is of the answer alone, whatever was drafted."""
    turns = [
        "\n\nUser: Hello\n\nAssistant:",
        "\n\nUser: Where is the station?\n\nAssistant:",
        "\n\nUser: Bye\n\nAssistant:",
    ]
    truth: dict[int, list[int]] = {}

    def drafters(sequence: Sequence) -> list[Drafter]:
        known = truth.get(sequence.prompt_tokens, [1, 2, 3])
        return [TestDrafter("late", known, sequence.prompt_end, random.Random(1))]

    texts: dict[str, list[bytes]] = {"off": [], "ngram": []}
    for speculate, said in texts.items():
        with started_engine(model, speculate=speculate, **ON_GPU) as engine:
            engine.speculation.make_drafters = drafters
            for one in turns:
                job = run(engine, turn("s", one, max_tokens=24, stop_strings=[b"\n\n"]), return_token_ids=True)
                said.append(job.all_texts[0])
                truth.setdefault(job.finishes[0].prompt_tokens, rows_of(job)[0].ids)
    same = [one == other for one, other in zip(*texts.values(), strict=True)]
    assert same[0] and sum(same) >= 2, texts


def test_the_model_as_its_own_draft_is_mostly_right(model: Path) -> None:
    """Greedy rows of several lengths: a wrong state after rejected guesses would make the next ones wrong."""
    greedy = SamplingParams(temperature=0.0)
    texts = [english for english, _ in held_pairs(12, 1)]
    rows = [make_request(f"English: {text}\n\nChinese:", max_tokens=48, sampling=greedy) for text in texts]
    off = [msgspec.structs.replace(one, speculation="off") for one in rows]
    with started_engine(model, speculate="model", draft_model=str(model), **ON_GPU) as engine:
        assert engine.model_runner.draft_model is not None and engine.model_runner.draft_model._graphs is not None
        alone = answers(engine, off, 1)
        for together in (1, 5, 12):
            before = engine.speculation.totals["model"]
            share = different(alone, answers(engine, rows, together))
            after = engine.speculation.totals["model"]
            print(together, share, after)
            assert share <= MAX_DIFFERENT and after.accepted - before.accepted > 100
