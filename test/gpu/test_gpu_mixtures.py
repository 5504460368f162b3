"""Mixtures of tuned states and scored prompts on a GPU.

Compares them with a CPU in fp32. Some rows are in graphs. (-m gpu)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from demo.files import ensure_model
from rwkv_batch.engine import Engine
from rwkv_batch.request import GenerateRequest, PromptLogprobs, TokenLogprob
from sampling.params import SamplingParams
from test.harness import TOKENIZER, RunningJob, call, make_request, run, started_engine, submit
from test.logprob_oracle import LogprobOracle
from test.pool_integrity import integrity_faults
from test.state_files import random_state, write_state

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
ON_GPU: dict[str, Any] = {"devices": ("cuda:0",), "max_running": 128, "prefill_tokens_per_step": 4096}
NAMES = ("pirate", "poet")
MIXES: list[list[tuple[str, float]]] = [
    [("pirate", 1.0), ("poet", 1.0)],
    [("poet", 3.0), ("", 1.0)],
    [("", 0.5), ("pirate", 0.25), ("poet", 2.0)],
]
TEXTS = ["The weather in Paris", "English: I like cats.\n\nChinese:", "User: 你好\n\nAssistant:"]
LONG = TOKENIZER.encode("one two three, a long text over many chunks. " * 40)
FP16 = 0.03
"""Largest difference of a log-probability in fp16 from fp32."""


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("states")
    for seed, name in enumerate(NAMES):
        write_state(folder / f"{name}.pth", random_state(seed, layers=6, width=256, scale=0.1))
    return tuple(f"{name}={folder / name}.pth" for name in NAMES)


@pytest.fixture(scope="module")
def engine(states: tuple[str, ...]) -> Iterator[Engine]:
    with started_engine(ensure_model(), states=states, **ON_GPU) as started:
        yield started


@pytest.fixture(scope="module")
def oracle() -> LogprobOracle:
    return LogprobOracle(Path(ensure_model()))


def sampled(running: RunningJob) -> list[TokenLogprob]:
    return [entry for events in running.events for delta in events.deltas for entry in delta.logprobs or ()]


def scored(running: RunningJob, row: int) -> list[TokenLogprob]:
    deltas = [delta for events in running.events for delta in events.deltas if delta.row == row]
    return [entry for delta in deltas for entry in delta.prompt_logprobs or ()]


@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_mixed_logits_are_those_of_the_cpu(
    engine: Engine, states: tuple[str, ...], mix: list[tuple[str, float]]
) -> None:
    rows = [
        make_request(text, mixture=mix, max_tokens=1, sampling=SamplingParams(temperature=0, top_logprobs=5))
        for text in TEXTS
    ]
    with started_engine(ensure_model(), states=states, kernels="naive") as plain:
        wanted = [dict(sampled(run(plain, row))[0].top) for row in rows]
    for row, expected in zip(rows, wanted, strict=True):
        found = dict(sampled(run(engine, row))[0].top)
        shared = found.keys() & expected.keys()
        assert len(shared) >= 4
        assert all(abs(found[token] - expected[token]) < FP16 for token in shared)


def mixed_batch() -> list[GenerateRequest]:
    """Return mixtures among plain rows and rows with tuned states. They decode in graphs."""
    rows: list[GenerateRequest] = []
    for i in range(60):
        kind: dict[str, Any] = {"mixture": MIXES[i % 3]} if i % 3 == 0 else {"state": (*NAMES, "")[i % 3]}
        how = SamplingParams(seed=i, top_k=40) if i % 2 else SamplingParams(temperature=0.0)
        rows.append(
            make_request(
                f"row {i} " + "and more " * (i % 7), max_tokens=8 + i % 9, sampling=how, ignore_eos=True, **kind
            )
        )
    return rows


def test_mixtures_answer_in_a_batch_as_alone(engine: Engine) -> None:
    """Nearly all: the row count chooses the GEMM kernels, and near-ties fall either way."""
    together = run(engine, *mixed_batch())
    alone = [run(engine, row).texts[0] for row in mixed_batch()]
    assert sum(a == b for a, b in zip(together.all_texts, alone, strict=True)) >= 0.9 * len(alone)
    assert [end.completion_tokens for _, end in sorted(together.finishes.items())] == [8 + i % 9 for i in range(60)]
    assert call(engine, "status")["decode_graphs"] == "used"
    assert integrity_faults(engine.model_runner.pool) == []


def test_one_state_mixed_with_itself_is_that_state(engine: Engine) -> None:
    how = {"max_tokens": 16, "ignore_eos": True}
    for text in TEXTS:
        alone = run(engine, make_request(text, state="poet", **how)).texts
        assert run(engine, make_request(text, mixture=[("poet", 1.0), ("pirate", 0.0)], **how)).texts == alone


def test_scores_are_those_of_the_cpu(engine: Engine, oracle: LogprobOracle) -> None:
    prompts = [*(TOKENIZER.encode(text) for text in TEXTS), LONG]
    others = submit(engine, *[make_request(f"others {i}", max_tokens=120, ignore_eos=True) for i in range(40)])
    wanted, all_errors = PromptLogprobs(top=3), []
    ran = run(engine, *[make_request(ids, max_tokens=0, prompt_logprobs=wanted) for ids in prompts])
    for row, ids in enumerate(prompts):
        expected, entries = oracle.token_logprobs(ids), scored(ran, row)
        assert [entry.token for entry in entries] == [TOKENIZER.byte_table[i] for i in ids[1:]]
        errors = [abs(entry.logprob - value) for entry, value in zip(entries, expected, strict=True)]
        assert max(errors) < 10 * FP16
        all_errors += errors
        assert all(entry.top[0][1] >= entry.logprob - 1e-5 for entry in entries)
    assert sum(all_errors) / len(all_errors) < FP16
    assert len(others.wait().finishes) == 40


def test_candidates_share_their_prompt(engine: Engine, oracle: LogprobOracle) -> None:
    prompt = TOKENIZER.encode(TEXTS[0])
    candidates = [TOKENIZER.encode(text) for text in (" is fine.", " x", "猫", "\n\nUser")]
    wanted = PromptLogprobs(start=len(prompt), top=1)
    ran = run(engine, make_request(prompt, candidates=candidates, max_tokens=0, prompt_logprobs=wanted))
    for row, candidate in enumerate(candidates):
        expected = oracle.token_logprobs(prompt + candidate, len(prompt))
        found = [entry.logprob for entry in scored(ran, row)]
        assert found == pytest.approx(expected, abs=5 * FP16)
