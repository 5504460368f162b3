"""Adapters, tuned states, experts, mixtures and grammars in one GPU batch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
import torch

from demo.files import MODEL, ensure_model
from rwkv_batch.engine import Engine
from rwkv_batch.model.weights import open_weights
from rwkv_batch.request import GenerateRequest
from state_pool.config import PoolConfig
from test.adapter_files import random_experts, random_lora, write_adapter
from test.engine.test_constraints import PERSON, choice, schema
from test.harness import call, make_request, run, started_engine, turn
from test.pool_integrity import integrity_faults

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
TUNED = MODEL.parent / "tuned"
FIELDS: dict[str, Any] = {"devices": ("cuda:0",), "max_running": 64, "prefill_tokens_per_step": 1024}
STATES = tuple(f"{name}={TUNED / name}.pth" for name in ("chinese", "json"))
PROMPT = "English: I have {} books.\n\n{}:"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("users")
    model = ensure_model()
    shape = open_weights(model).shape
    write_adapter(folder / "experts.pth", random_experts(1, shape.layers, shape.width, scale=0.03))
    write_adapter(folder / "huge.pth", random_lora(2, shape.layers, shape.width, scale=300.0))
    adapters = [f"{name}={TUNED / name}.safetensors:1" for name in ("french", "spanish")]
    adapters += [f"{name}={folder / name}.pth:1" for name in ("experts", "huge")]
    pool = PoolConfig(state_db=str(folder / "s.db"), l1_sessions=4, l2_sessions=4)
    with started_engine(model, pool, states=STATES, served_adapters=tuple(adapters), **FIELDS) as started:
        yield started
        assert integrity_faults(started.model_runner.pool) == []


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("French", {"adapter": "french"}),
    ("Spanish", {"adapter": "spanish"}),
    ("Chinese", {}),
    ("Chinese", {"state": "chinese"}),
    ("French", {"adapter": "french", "state": "json"}),
    ("Chinese", {"mixture": [("chinese", 2.0), ("json", 1.0)]}),
    ("Spanish", {"adapter": "spanish", "mixture": [("json", 2.0), ("", -1.0)]}),
    ("Chinese", {"adapter": "experts"}),
    ("French", {"adapter": "french", "constraint": schema(PERSON)}),
    ("Spanish", {"mixture": [("json", 1.0), ("", 1.0)], "constraint": choice("libros", "libras")}),
]


def rows(count: int) -> list[GenerateRequest]:
    """Return greedy rows of every kind; an object of PERSON takes more tokens than the other texts."""
    made = []
    for i in range(count):
        language, kind = KINDS[i % len(KINDS)]
        length = 90 if kind.get("constraint") else 20
        made.append(make_request(PROMPT.format(i, language), max_tokens=length, stop_ids=[261], **kind))
    return made


def same(one: list[bytes], other: list[bytes]) -> float:
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)


def test_every_kind_gives_the_same_text_in_a_batch_and_alone(engine: Engine) -> None:
    """Nearly all: the row count chooses the GEMM kernels, and near-ties fall either way."""
    together = run(engine, *rows(40)).all_texts
    assert same(together, [run(engine, row).all_texts[0] for row in rows(40)]) >= 0.9
    assert call(engine, "status")["decode_graphs"] == "used"
    for text in together[8 :: len(KINDS)]:
        jsonschema_rs.validate(PERSON, json.loads(text))
    assert set(together[9 :: len(KINDS)]) <= {b"libros", b"libras"}


def test_the_gpu_gives_the_text_of_a_cpu(engine: Engine) -> None:
    """With the demo's files only: random experts have near-ties."""
    asked = [row for row in rows(40) if row.adapter != "experts"]
    served = tuple(f"{name}={TUNED / name}.safetensors:1" for name in ("french", "spanish"))
    with started_engine(ensure_model(), states=STATES, served_adapters=served, max_running=64) as cpu:
        assert same(run(engine, *asked).all_texts, run(cpu, *asked).all_texts) >= 0.85


def test_an_adapter_that_overflows_harms_no_other_row(engine: Engine) -> None:
    """Its own rows become infinite in fp16; other rows in the same tiles and steps do not change."""
    others = [row for row in rows(40) if not row.mixture]
    alone = run(engine, *others).all_texts
    bad = [make_request(PROMPT.format(i, "French"), adapter="huge", max_tokens=30, ignore_eos=True) for i in range(20)]
    both = [row for pair in zip(others[:20], bad, strict=True) for row in pair] + others[20:]
    texts = run(engine, *both).all_texts
    assert same([*texts[:40:2], *texts[40:]], alone) >= 0.9


def test_sessions_with_adapters_continue_after_leaving_the_gpu(engine: Engine) -> None:
    """Twelve dialogues over four slots: most turns read a state from the host or the disk."""

    def said(name: str) -> list[bytes]:
        first = [turn(f"{name}{i}", PROMPT.format(i, "French"), adapter="french", max_tokens=8) for i in range(12)]
        texts = [run(engine, row).all_texts[0] for row in first]
        more = [turn(f"{name}{i}", "\n\nEnglish: cat\n\nFrench:", max_tokens=4) for i in range(12)]
        return texts + [run(engine, row).all_texts[0] for row in more]

    assert same(said("a"), said("b")) == 1.0
