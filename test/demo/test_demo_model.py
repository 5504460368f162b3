"""The demo's training: logits against the reference, batches, a falling loss, lines for `tune`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from demo.export import demo_shape, initial_weights, load_compact, save_compact, training_model
from demo.files import MODEL, ensure_model
from demo.packing import batch, used_ids
from demo.train import start_from, trainer_of
from demo.tune import ADAPTER_OPTIONS, ADAPTERS, SOURCES, data
from demo.vocabulary import Compact
from programs.tune import build_parser
from routes.fine_tuning.data import read_data, split
from rwkv_batch.model.weights import open_weights
from rwkv_batch.tuning.model import TrainingModel, Tunables, load_model
from rwkv_batch.tuning.trainer import Schedule

RANKS = (8, 8, 8, 8)


def _disturbed(vocab: int, layers: int, width: int, ranks: tuple[int, int, int, int] = RANKS) -> dict[str, Tensor]:
    """Return weights without zeros. Every part then affects the logits."""
    torch.manual_seed(0)
    weights = initial_weights(demo_shape(vocab, layers, width, ranks))
    return {name: (one + torch.randn_like(one) * 0.05).bfloat16().float() for name, one in weights.items()}


def _logits(model: TrainingModel, tokens: Tensor) -> Tensor:
    begins = torch.zeros(1, len(tokens), dtype=torch.bool)
    begins[0, 0] = True
    with torch.no_grad():
        return model.hidden(tokens[None], begins)[0] @ model.weights["head.weight"].T


def test_training_continues_from_a_compact_file_with_more_ids(tmp_path: Path) -> None:
    known, more = np.arange(0, 90, 3, dtype=np.int64), np.arange(0, 90, 2, dtype=np.int64)
    narrow, compact = Compact(known), Compact(np.union1d(known, more))
    weights = _disturbed(narrow.rows, 2, 64)
    save_compact(tmp_path / "m.compact", weights, known)
    wider = training_model(start_from(tmp_path / "m.compact", compact), compact, demo_shape(compact.rows, 2, 64, RANKS))
    tokens = [3, 4, 6, 1000] * 4
    model = training_model(weights, narrow, demo_shape(narrow.rows, 2, 64, RANKS))
    expected = _logits(model, torch.tensor(narrow.of_id[tokens]))[:, narrow.of_id]
    actual = _logits(wider, torch.tensor(compact.of_id[tokens]))[:, compact.of_id]
    torch.testing.assert_close(actual, expected)


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The publisher's package. It reads its variables when it is imported."""
    for name, value in (("RWKV_V7_ON", "1"), ("RWKV_JIT_ON", "1"), ("RWKV_CUDA_ON", "0")):
        monkeypatch.setitem(os.environ, name, value)
    return pytest.importorskip("rwkv.model")


def test_the_logits_are_the_references(tmp_path: Path, reference: Any) -> None:
    ids = np.arange(0, 600, 3, dtype=np.int64)
    save_compact(tmp_path / "m.compact", _disturbed(len(ids) + 1, 3, 128, (16, 16, 8, 16)), ids)
    path = ensure_model(tmp_path / "cache", tmp_path / "m.compact")
    safetensors = pytest.importorskip("safetensors.torch")
    torch.save(safetensors.load_file(str(path)), tmp_path / "m.pth")
    text = [int(i) for i in np.random.default_rng(0).integers(0, 1000, 32)]
    expected, _ = reference.RWKV(model=str(tmp_path / "m"), strategy="cpu fp32").forward(text, None, full_output=True)
    weights, compact, shape = load_compact(tmp_path / "m.compact")
    actual = _logits(training_model(weights, compact, shape), torch.tensor(compact.of_id[text]))
    assert (actual[:, compact.of_id] - expected).abs().max() < 1e-4


def test_the_publishers_code_reads_a_tuned_state_as_the_trainer_means_it(tmp_path: Path, reference: Any) -> None:
    tuned = torch.load(MODEL.parent / "tuned" / "chinese.pth", weights_only=True)
    weights = open_weights(ensure_model())
    torch.save({name: weights.tensor(name) for name in weights.tensors}, tmp_path / "m.pth")
    theirs = reference.RWKV(model=str(tmp_path / "m"), strategy="cpu fp32")
    states = [tuned[f"blocks.{i}.att.time_state"].float() for i in range(weights.shape.layers)]
    given = theirs.generate_zero_state()
    given[1::3] = [state.clone() for state in states]
    text = [int(i) for i in np.random.default_rng(0).integers(0, 1000, 32)]
    expected, _ = theirs.forward(text, given, full_output=True)
    model = load_model(weights, torch.device("cpu"), torch.float32, True, TrainingModel, {})
    model.tunables = Tunables(states)
    assert (_logits(model, torch.tensor(text)) - expected).abs().max() < 1e-3
    model.tunables = Tunables()
    assert (_logits(model, torch.tensor(text)) - expected).abs().max() > 1


def test_a_few_steps_lower_the_loss() -> None:
    compact = Compact(used_ids(1, 300))
    torch.manual_seed(0)
    shape = demo_shape(compact.rows, 2, 64, RANKS)
    trainer = trainer_of(training_model(initial_weights(shape), compact, shape), Schedule(800, 100, 0.3), 0.1)
    rows = batch(1, 0, compact, 4, 128)
    for _ in range(8):
        trainer.step(rows)
    assert trainer.losses[-1] < trainer.losses[0] - 1


def test_batches_depend_on_seed_and_index_alone() -> None:
    compact = Compact(used_ids(1, 50))
    one, other, third = batch(1, 5, compact, 2, 256), batch(1, 5, compact, 2, 256), batch(1, 6, compact, 2, 256)
    assert torch.equal(one.inputs, other.inputs) and torch.equal(one.weights, other.weights)
    assert not torch.equal(one.inputs, third.inputs)
    assert one.begins[:, [i for i in range(256) if i % 16]].sum() == 0


@pytest.mark.parametrize("name", SOURCES)
def test_the_lines_of_the_shipped_states_and_adapters_are_valid(name: str) -> None:
    lines = data(name, 20, 7)
    found = read_data("\n".join(lines).encode(), "lines.jsonl")
    assert not found.problems and len(found.examples) == 20
    assert all(set(json.loads(line)) == {"prompt", "completion"} for line in lines)


@pytest.mark.parametrize("name", ADAPTERS)
def test_no_phrase_of_a_language_is_held_out(name: str) -> None:
    given, _ = build_parser().parse(["lines.jsonl", "-o", name, *ADAPTER_OPTIONS])
    examples = read_data("\n".join(data(name, 60, 7)).encode(), "lines.jsonl").examples
    trained, held_out = split(examples, given.held_out)
    assert not held_out and trained == examples
