"""Merged adapters through the engine: known to sessions, refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rwkv_batch.errors import ErrorKind, StartupError
from state_pool.config import PoolConfig
from test.harness import make_request, run, started_engine, tiny_model, turn

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), width=128)


@pytest.fixture(scope="module")
def adapter(model: Path) -> Path:
    generator = torch.Generator().manual_seed(2)
    path = model.parent / "lora.pth"
    names = [f"blocks.{i}.{part}" for i in range(3) for part in ("att.key", "att.value", "att.output")]
    pairs = {f"{n}.{p}": torch.randn(*s, generator=generator) * 0.3 for n in names for p, s in PAIR.items()}
    torch.save(pairs, path)
    return path


PAIR = {"lora_A": (4, 128), "lora_B": (128, 4)}


def text_of(model: Path, **fields: object) -> bytes:
    with started_engine(model, **fields) as engine:
        return run(engine, make_request(PROMPT, ignore_eos=True)).texts[0]


def test_the_adapter_changes_the_text(model: Path, adapter: Path) -> None:
    texts = [text_of(model), text_of(model, adapters=(f"{adapter}:2.0",)), text_of(model, adapters=(f"{adapter}:0.0",))]
    assert texts[0] == texts[2] != texts[1]


def test_a_session_is_not_continued_under_another_adapter(model: Path, adapter: Path, tmp_path: Path) -> None:
    pool = PoolConfig(state_db=str(tmp_path / "s.db"))
    with started_engine(model, pool) as engine:
        run(engine, turn("s", "hello"))
    with started_engine(model, pool, adapters=(f"{adapter}:2.0",)) as engine:
        error = run(engine, turn("s", " again")).finishes[0].error
        assert error is not None and error.kind is ErrorKind.SESSION_UNUSABLE and "another model" in error.message
        assert engine.model_runner.status()["adapters"] == [f"{adapter}:2.0"]


@pytest.mark.parametrize(
    ("entry", "why"), [("{}", "has no scale"), ("none.pth:2", "none.pth does not exist"), ("{}x", "not exist")]
)
def test_an_unsupported_adapter_ends_the_start(model: Path, adapter: Path, entry: str, why: str) -> None:
    with pytest.raises(StartupError, match=why), started_engine(model, adapters=(entry.format(adapter),)):
        pass
