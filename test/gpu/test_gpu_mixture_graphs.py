"""Tuned-state mixtures on a GPU, in graphs and with other rows. Also older versions of the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from demo.files import ensure_model
from rwkv_batch.engine import Engine
from rwkv_batch.model.step_inputs import step_inputs
from rwkv_batch.model.weights import weights_from
from rwkv_batch.request import GenerateRequest
from rwkv_batch.runner.graphs.decode import DecodeGraphs
from rwkv_batch.runner.pipeline import Pipeline
from state_pool.config import PoolConfig
from test.harness import make_request, run, started_engine, turn
from test.model.random_older_weights import random_older_weights
from test.pool_integrity import integrity_faults

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TUNED = Path(__file__).resolve().parents[2] / "demo" / "tuned"
STATES = (f"json={TUNED / 'json.pth'}", f"chinese={TUNED / 'chinese.pth'}")
MIXES: list[list[tuple[str, float]]] = [
    [("json", 1.0), ("", 1.0)],
    [("chinese", 3.0), ("json", 1.0)],
    [("", 0.5), ("chinese", 0.25), ("json", 2.0), ("json", 1.0)],
    [("chinese", 2.0), ("", -1.0)],
]
PROMPT = "English: The river ran past a small town {}.\n\nChinese:"


@pytest.fixture(scope="module")
def model() -> Path:
    return ensure_model()


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    pool = PoolConfig(state_db=str(tmp_path_factory.mktemp("db") / "s.db"), l1_sessions=4, l2_sessions=4)
    fields: dict[str, Any] = {"devices": ("cuda:0",), "max_running": 96, "prefill_tokens_per_step": 4096}
    with started_engine(model, pool, states=STATES, **fields) as engine:
        yield engine
        assert integrity_faults(engine.model_runner.pool) == []


def rows(count: int) -> list[GenerateRequest]:
    """Return greedy mixtures, rows with tuned states and plain rows."""
    kinds: list[dict[str, Any]] = [*({"mixture": mix} for mix in MIXES), {"state": "json"}, {}]
    return [
        make_request(PROMPT.format(i), max_tokens=24, stop_ids=[261], **kinds[i % len(kinds)]) for i in range(count)
    ]


def same(one: list[bytes], other: list[bytes]) -> float:
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)


def test_mixtures_give_the_text_of_a_cpu_and_of_one_row(
    model: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed: list[int] = []
    run_logits = DecodeGraphs.run_logits

    def spied(graphs: DecodeGraphs, req_slots: list[int], *slots: list[int]) -> torch.Tensor:
        replayed.append(len(req_slots))
        return run_logits(graphs, req_slots, *slots)

    monkeypatch.setattr(DecodeGraphs, "run_logits", spied)
    together = run(engine, *rows(48)).all_texts
    assert max(replayed) > 48 - 10, "members are rows of a graph"
    assert same(together, [run(engine, row).all_texts[0] for row in rows(48)]) >= 0.95
    with started_engine(model, states=STATES, max_running=96) as cpu:
        assert same(together, run(cpu, *rows(48)).all_texts) >= 0.95


def test_more_members_than_a_graph_holds(engine: Engine) -> None:
    wide = [("json", 1.0), ("chinese", 1.0)] * 8
    many = [make_request(PROMPT.format(i), max_tokens=12, mixture=wide) for i in range(12)] + rows(12)
    together = run(engine, *many).all_texts
    assert same(together, [run(engine, row).all_texts[0] for row in many]) >= 0.9


def test_sessions_among_mixtures_continue_after_leaving_the_gpu(engine: Engine) -> None:
    first = [run(engine, turn(f"s{i}", PROMPT.format(i), state="json", max_tokens=8)).texts[0] for i in range(8)]
    run(engine, *rows(24))
    again = [run(engine, turn(f"s{i}", "\n\nEnglish: Hello.\n\nChinese:", max_tokens=8)).texts[0] for i in range(8)]
    other = [run(engine, turn(f"t{i}", PROMPT.format(i), state="json", max_tokens=8)).texts[0] for i in range(8)]
    assert same(first, other) == 1.0
    expected = [run(engine, turn(f"t{i}", "\n\nEnglish: Hello.\n\nChinese:", max_tokens=8)).texts[0] for i in range(8)]
    assert same(again, expected) >= 0.85


@pytest.mark.parametrize("version", ["4", "5.0", "5.1", "5.2", "6"])
@pytest.mark.parametrize("dtype", ["fp32", "auto"])
def test_older_versions_compute_the_same_as_on_a_cpu(version: str, dtype: str) -> None:
    weights = weights_from(random_older_weights(version, 3, 256, heads=4))
    prompts = [[5, 9, 300, 2], [7], [8, 11, 12] * 20]
    found = []
    for device, kind in (("cpu", "fp32"), ("cuda:0", dtype)):
        model = Pipeline(weights, devices=(device,), dtype=kind)
        model.allocate_slots(8)
        model.forward(step_inputs(prompts, [0, 0, 0], [2, 3, 4], []))
        found.append(model.forward(step_inputs([[1], [2], [3, 4]], [2, 3, 4], [5, 3, 4], [0, 1, 2])).float().cpu())
    scale = found[0].abs().mean()
    assert (found[1] - found[0]).abs().mean() < (0.002 if dtype == "fp32" else 0.05) * scale
