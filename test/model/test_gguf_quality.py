"""The demo model in every type of GGUF: the same greedy text, or a small loss. An encoder of the test writes it."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from random import Random

import pytest
import torch

from bench.quality import Reader, compare, held_out_text
from bench.quality_states import Text
from demo.corpus import translation
from demo.files import ensure_model
from rwkv_batch.model.export import write_model
from rwkv_batch.model.files import gguf_blocks
from rwkv_batch.model.files.gguf_writer import Entry, write_gguf
from rwkv_batch.model.files.place import BLOCKS
from rwkv_batch.model.gguf_names import names_of_gguf
from rwkv_batch.model.weights import Weights, open_weights
from test.gguf_encode import encode
from test.harness import TOKENIZER, make_request, run, started_engine
from test.model.test_gguf import METADATA, as_bytes

pytestmark = pytest.mark.slow

MOST_KL = {
    "q8_0": 0.0001,
    "q6_k": 0.0006,
    "q5_k": 0.003,
    "q5_1": 0.003,
    "q5_0": 0.004,
    "q4_k": 0.012,
    "q4_1": 0.014,
    "q4_0": 0.012,
    "iq4_nl": 0.012,
    "iq4_xs": 0.012,
    "q3_k": 0.06,
    "q2_k": 0.25,
}
"""Nats per token between fp32 and the type: about twice the measured value."""
IS_LONG = "RWKV_LONG_TESTS" in os.environ
KINDS = tuple(MOST_KL) if IS_LONG else ("q4_k", "iq4_nl")
"""One type of each way of decoding next to q8_0 below. `test_gguf.py` compares all decoders with their definitions."""
PROMPTS = 200 if IS_LONG else 30


@pytest.fixture(scope="module")
def source() -> Weights:
    return open_weights(ensure_model())


@pytest.fixture(scope="module")
def reference(source: Weights) -> Reader:
    return Reader(source, "cpu", "fp32")


@pytest.fixture(scope="module")
def text() -> Text:
    ids = TOKENIZER.encode(held_out_text())[:512]
    return Text(ids, len(TOKENIZER.decode_bytes(ids)))


@pytest.mark.parametrize("kind", BLOCKS)
def test_an_encoded_number_is_near(kind: str) -> None:
    numbers = torch.randn(64, BLOCKS[kind][0], generator=torch.Generator().manual_seed(1))
    numbers[3] = 0
    made = encode(kind, numbers)
    assert made.shape == (64, BLOCKS[kind][1])
    error = (gguf_blocks.decode(kind, made) - numbers).square().mean().sqrt()
    assert error < {"8": 0.01, "6": 0.03, "5": 0.06, "4": 0.12, "3": 0.25, "2": 0.4}[kind.removeprefix("i")[1]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_type_loses_little(tmp_path: Path, source: Weights, reference: Reader, text: Text, kind: str) -> None:
    entries = []
    for name, tensor in names_of_gguf(dict(source.tensors)).items():
        whole = tensor.float().contiguous()
        if tensor.dim() == 2 and tensor.shape[1] % BLOCKS[kind][0] == 0:
            made = encode(kind, whole.view(-1, BLOCKS[kind][0]))
            entries.append(Entry(name, kind, tuple(tensor.shape), as_bytes(made)))
        else:
            entries.append(Entry(name, "float32", tuple(tensor.shape), as_bytes(whole)))
    metadata = {**METADATA, "rwkv7.block_count": 6}
    with (tmp_path / "model.gguf").open("wb") as file:
        write_gguf(file, metadata, entries)
    found = Reader(open_weights(tmp_path / "model.gguf"), "cpu", "fp32")
    figures = compare(found, reference, text)
    assert 0 < figures["kl"] < MOST_KL[kind]


@functools.cache
def held_out_prompts() -> list[str]:
    dice = Random("formats")
    pairs = [translation.fresh_pair(dice, held=True) for _ in range(PROMPTS)]
    return [
        translation.prompt(pair.zh if number % 2 else pair.en, english=number % 2 == 0)
        for number, pair in enumerate(pairs)
    ]


def greedy_texts(path: Path) -> list[str]:
    with started_engine(path) as engine:
        rows = [make_request(prompt, max_tokens=24) for prompt in held_out_prompts()]
        return run(engine, *rows).all_texts


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return greedy_texts(Path(ensure_model()))


@pytest.mark.parametrize(("name", "dtype", "share"), [("a.gguf", "fp16", 1.0), ("a.gguf", "q8_0", 0.94)])
def test_the_greedy_text_of_held_out_prompts(
    tmp_path: Path, source: Weights, texts: list[str], name: str, dtype: str, share: float
) -> None:
    write_model(source, tmp_path / name, dtype)
    found = greedy_texts(tmp_path / name)
    same = sum(one == other for one, other in zip(texts, found, strict=True))
    assert len(set(texts)) > PROMPTS // 2 and same >= share * PROMPTS


@pytest.mark.parametrize(
    ("name", "dtype"), [("a.gguf", "fp32"), ("a.gguf", "bf16"), ("a.pth", "bf16"), ("a.safetensors", "fp32")]
)
def test_a_written_model_has_the_same_numbers(tmp_path: Path, source: Weights, name: str, dtype: str) -> None:
    """Its matrices are bf16, so these types keep every bit."""
    write_model(source, tmp_path / name, dtype)
    found = open_weights(tmp_path / name)
    assert found.tensors.keys() == source.tensors.keys()
    for key, tensor in source.tensors.items():  # GGUF has vectors of one dimension
        assert torch.equal(found.tensors[key].float().flatten(), tensor.float().flatten()), key
