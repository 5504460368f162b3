"""GGUF files: the same model as the .pth file, every block type, splits, and refusals by name."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from demo.files import ensure_model
from demo.random_weights import random_weights
from rwkv_batch.model.export import write_model
from rwkv_batch.model.files import gguf_blocks
from rwkv_batch.model.files.gguf_writer import Entry, Value, write_gguf
from rwkv_batch.model.files.place import BLOCKS
from rwkv_batch.model.gguf_names import names_of_gguf
from rwkv_batch.model.weights import open_weights, weights_from
from test.gguf_blocks import DECODE, SCALES
from test.harness import make_request, run, started_engine
from test.model.test_model import feed, pipeline
from test.model.test_weights import check_refused

NATIVE = random_weights(layers=2, width=256, vocab=256, seed=4, ranks=(32, 64, 32, 96))
PROMPT = [3, 77, 200, 5, 9]
METADATA: dict[str, Value] = {"general.architecture": "rwkv7", "rwkv7.block_count": 2, "rwkv7.embedding_length": 256}


def random_blocks(kind: str, count: int, seed: int = 0) -> Tensor:
    """Return blocks [count, bytes] uint8 of any bits whose scales are small."""
    made = torch.randint(0, 256, (count, BLOCKS[kind][1]), generator=torch.Generator().manual_seed(seed))
    made = made.to(torch.uint8)
    for at in SCALES.get(kind, (0,)):
        scale = torch.linspace(-0.002, 0.003, count, dtype=torch.float16)
        made[:, at : at + 2] = scale.view(-1, 1).view(torch.uint8)
    return made


def as_bytes(tensor: Tensor) -> Callable[[], Iterable[bytes]]:
    return lambda: [tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()]


def entries_of(kind: str = "") -> tuple[list[Entry], dict[str, Tensor]]:
    """Return a model's tensors for GGUF, and its tensors as decoded. The matrices are in random blocks of a kind."""
    entries: list[Entry] = []
    decoded: dict[str, Tensor] = {}
    for name, tensor in names_of_gguf(NATIVE).items():
        whole = tensor.float().contiguous()
        if kind and tensor.dim() == 2 and tensor.shape[1] % BLOCKS[kind][0] == 0:
            made = random_blocks(kind, tensor.numel() // BLOCKS[kind][0], len(entries))
            entries.append(Entry(name, kind, tuple(tensor.shape), as_bytes(made)))
            whole = gguf_blocks.decode(kind, made).view(tensor.shape)
        else:
            entries.append(Entry(name, "float32", tuple(tensor.shape), as_bytes(whole)))
        decoded[name] = whole
    return entries, decoded


def written(path: Path, entries: list[Entry], metadata: dict[str, Value] | None = None) -> Path:
    with path.open("wb") as file:
        write_gguf(file, METADATA if metadata is None else metadata, entries)
    return path


@pytest.mark.parametrize("kind", BLOCKS)
def test_each_block_type_is_decoded_as_its_definition(kind: str) -> None:
    made = random_blocks(kind, 50)
    expected = torch.tensor([DECODE[kind](block.numpy().tobytes()) for block in made])
    assert torch.allclose(gguf_blocks.decode(kind, made), expected, rtol=1e-6, atol=1e-9)
    assert expected.abs().max() > 0.01


def test_q8_0_is_encoded_within_half_a_step() -> None:
    numbers = torch.randn(100, 32)
    numbers[3] = 0
    found = gguf_blocks.decode("q8_0", gguf_blocks.encode_q8_0(numbers))
    step = numbers.abs().amax(1, keepdim=True) / 127
    assert ((found - numbers).abs() <= 0.57 * step).all() and not found[3].any()


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_model_of_each_block_type(tmp_path: Path, kind: str) -> None:
    entries, decoded = entries_of(kind)
    found = open_weights(written(tmp_path / "model.gguf", entries))
    assert found.num_bytes < weights_from(NATIVE).num_bytes * 2
    plain = open_weights(
        written(tmp_path / "plain.gguf", [Entry(n, "float32", tuple(t.shape), as_bytes(t)) for n, t in decoded.items()])
    )
    logits = [feed(pipeline(weights, "naive"), PROMPT, (len(PROMPT),)) for weights in (found, plain)]
    assert torch.equal(*logits) and logits[0].isfinite().all()


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "q8_0"])
def test_what_is_written_is_read(tmp_path: Path, dtype: str) -> None:
    native = weights_from(NATIVE)
    write_model(native, tmp_path / "model.gguf", dtype)
    found = open_weights(tmp_path / "model.gguf")
    assert found.shape == native.shape
    assert set(native.tensors) - set(found.tensors) == {f"blocks.0.att.v{digit}" for digit in "012"}
    for name, tensor in found.tensors.items():
        expected = NATIVE[name].float()
        close = 0 if dtype in ("fp32", "bf16") else 1e-3 if dtype == "fp16" else expected.abs().max() / 127
        assert torch.allclose(tensor.float().reshape(expected.shape), expected, rtol=0, atol=float(close)), name
    ours, theirs = (feed(pipeline(weights, "naive"), PROMPT, (len(PROMPT),)) for weights in (found, native))
    assert torch.equal(ours, theirs) if dtype in ("fp32", "bf16") else torch.allclose(ours, theirs, atol=0.2)


@pytest.mark.slow
def test_the_greedy_text_is_that_of_the_source(tmp_path: Path) -> None:
    source = ensure_model()
    write_model(open_weights(source), tmp_path / "demo.gguf", "fp16")
    prompts = ["User: What is your name?\n\nAssistant:", "English: Good morning\n\nFrench:", "Once upon a time"]
    texts = []
    for path in (source, tmp_path / "demo.gguf"):
        with started_engine(path) as engine:
            texts.append(run(engine, *map(make_request, prompts)).all_texts)
    assert texts[0] == texts[1] and texts[0][0]


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_blocks_are_quantised_for_a_dtype(tmp_path: Path, dtype: str) -> None:
    write_model(weights_from(NATIVE), tmp_path / "model.gguf", "q8_0")
    found = open_weights(tmp_path / "model.gguf")
    logits = feed(pipeline(found, "naive", dtype=dtype), PROMPT, (len(PROMPT),))
    assert torch.allclose(logits, feed(pipeline(found, "naive"), PROMPT, (len(PROMPT),)), atol=0.5)


def test_separate_token_shift_weights(tmp_path: Path) -> None:
    entries: list[Entry] = []
    for entry in entries_of()[0]:
        if "lerp_fused" in entry.name:
            number = entry.name.split(".")[1]
            for letter in "rwkvag":
                mix = NATIVE[f"blocks.{number}.att.x_{letter}"].float()
                entries.append(Entry(f"blk.{number}.time_mix_lerp_{letter}.weight", "float32", (256,), as_bytes(mix)))
        else:
            entries.append(entry)
    found = open_weights(written(tmp_path / "older.gguf", entries))
    assert torch.equal(found.tensors["blocks.1.att.x_g"], NATIVE["blocks.1.att.x_g"].float().view(-1))


def split(folder: Path, entries: list[Entry]) -> list[Path]:
    """Write two files as llama.cpp's gguf-split does."""
    paths = [folder / f"model-{number:05}-of-00002.gguf" for number in (1, 2)]
    numbers: list[dict[str, Value]] = [{"split.no": number, "split.count": 2} for number in (0, 1)]
    written(paths[0], entries[:9], METADATA | numbers[0])
    written(paths[1], entries[9:], numbers[1])
    return paths


def test_a_split_model(tmp_path: Path) -> None:
    entries, _ = entries_of("q4_0")
    whole = open_weights(written(tmp_path / "whole.gguf", entries))
    paths = split(tmp_path, entries)
    assert [open_weights(path).fingerprint for path in paths] == [whole.fingerprint] * 2
    other = paths[1].rename(tmp_path / "other.gguf")
    check_refused(other, r"other\.gguf is one of 2 files .* NAME-00001-of-00002\.gguf")
    check_refused(paths[0], r"model-00002-of-00002\.gguf does not exist")


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ({"general.architecture": "arwkv7"}, "'arwkv7'; give a GGUF file of 'rwkv7'"),
        ({"general.architecture": "rwkv6"}, "is not RWKV-7: its general.architecture is 'rwkv6'"),
        ({"general.architecture": "llama"}, "'llama'"),
        ({}, "has no general.architecture"),
        (METADATA | {"general.type": "adapter"}, "is not a model: its general.type is 'adapter'"),
        (METADATA | {"tokenizer.ggml.model": "gpt2"}, "World vocabulary: its tokenizer.ggml.model is 'gpt2'"),
        (METADATA | {"tokenizer.ggml.tokens": ["a", "b"]}, "tokenizer.ggml.tokens 2, its tensors 256"),
        (METADATA | {"rwkv7.block_count": 3}, "rwkv7.block_count 3, its tensors 2"),
        (METADATA | {"rwkv7.embedding_length": 128}, "embedding_length 128, its tensors 256"),
        (METADATA | {"rwkv7.wkv.head_size": 128}, "head_size 128, its tensors 64"),
        (METADATA | {"general.alignment": 3}, "its alignment is 3"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, metadata: dict[str, Value], why: str) -> None:
    path = written(tmp_path / "model.gguf", entries_of()[0], metadata)
    message = check_refused(path, why)
    assert str(path) in message and "\n" not in message


def test_a_truncated_file_says_how_many_bytes_are_missing(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", entries_of()[0])
    data = path.read_bytes()
    for keep, why in ((len(data) - 1000, "1000 of"), (100, "its header needs"), (4, "its header needs")):
        path.write_bytes(data[:keep])
        check_refused(path, f"truncated: {why}")


@pytest.mark.parametrize(
    ("at", "data", "why"),
    [
        (4, struct.pack("<I", 1), "not GGUF of version 2 or 3"),
        (4, struct.pack(">I", 3), "not little-endian"),
        (-12, struct.pack("<I", 16), "'w' is IQ2_XXS.; allowed are F32, F16, BF16, Q4_0"),
        (-12, struct.pack("<I", 99), "'w' is type 99"),
        (-12, struct.pack("<I", 2), "rows that are not whole blocks of 32"),
        (-8, struct.pack("<Q", 8), "is not aligned to 32 bytes"),
        (-8, struct.pack("<Q", 1 << 40), "truncated: .* bytes are missing"),
    ],
)
def test_odd_headers_are_refused(tmp_path: Path, at: int, data: bytes, why: str) -> None:
    path = written(tmp_path / "model.gguf", [Entry("w", "float32", (2,), lambda: [b"\0" * 8])])
    content = bytearray(path.read_bytes())
    entry_end = content.rindex(struct.pack("<QIQ", 2, 0, 0)) + 20
    at = at if at >= 0 else entry_end + at
    content[at : at + len(data)] = data
    path.write_bytes(content)
    check_refused(path, why)
