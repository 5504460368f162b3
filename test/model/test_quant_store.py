"""Stored quantised weights: the second start loads them if they are complete and of this model."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from demo.random_weights import write_random_model
from native.files import STALE_FILE_S
from rwkv_batch.kernels.registry import choose_ops
from rwkv_batch.model import loader
from rwkv_batch.model.quant.formats import Format, Quantised, quantise
from rwkv_batch.model.step_inputs import step_inputs
from rwkv_batch.model.weights import open_weights
from rwkv_batch.runner.pipeline import Pipeline

pytestmark = pytest.mark.slow


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Format]:
    """Record the format of every matrix that is quantised."""
    formats: list[Format] = []

    def counting(weight: Tensor, format_: Format, x_max: Tensor | None, squares: bool) -> Quantised:
        formats.append(format_)
        return quantise(weight, format_, x_max, squares)

    monkeypatch.setattr(loader, "quantise", counting)
    return formats


def logits(path: Path, dtype: str, kernels: str = "naive") -> Tensor:
    pipeline = Pipeline(open_weights(path), ("cpu",), dtype, kernels)
    pipeline.allocate_slots(3)
    return pipeline.forward(step_inputs([[3, 1, 4]], [0], [2], [0]))


@pytest.mark.parametrize("dtype", ["fp8", "int8", "int4"])
def test_the_second_start_quantises_nothing(tmp_path: Path, dtype: str, made: list[Format]) -> None:
    path = write_random_model(tmp_path / "tiny.pth", layers=2, width=128)
    first = logits(path, dtype)
    assert len(made) == 2 * 6 + 1
    made.clear()
    assert torch.equal(logits(path, dtype), first) and made == []
    folder = next(tmp_path.glob(f"tiny.{dtype}-*"))
    assert sum(file.stat().st_size for file in folder.iterdir()) < 0.6 * path.stat().st_size


def test_other_weights_and_formats_have_their_own_files(tmp_path: Path, made: list[Format]) -> None:
    path = write_random_model(tmp_path / "tiny.pth", layers=1, width=64)
    logits(path, "fp8")
    path.unlink()
    write_random_model(path, layers=1, width=64, seed=1)
    made.clear()
    logits(path, "fp8")
    logits(path, "int4")
    assert len(made) == 14 and made.count(Format.W8A8) == 1
    assert len(list(tmp_path.glob("tiny.fp8-*"))) == 2 and next(tmp_path.glob("tiny.int4-*"))


def test_weights_that_differ_between_the_samples_are_quantised_again(tmp_path: Path, made: list[Format]) -> None:
    path = write_random_model(tmp_path / "tiny.pth", layers=1, width=64)
    logits(path, "fp8")
    tensors = torch.load(path)
    head = tensors["head.weight"]
    head[: len(head) // 4, 32:] *= -1
    path.unlink()
    torch.save(tensors, path)
    made.clear()
    logits(path, "fp8")
    assert len(made) == 7


def test_damaged_files_and_those_of_other_matrices_are_replaced(tmp_path: Path, made: list[Format]) -> None:
    path = write_random_model(tmp_path / "tiny.pth", layers=1, width=64)
    whole = logits(path, "fp8")
    folder = next(tmp_path.glob("tiny.fp8-*"))
    (folder / "head.weight.safetensors").write_bytes(b"12345678")
    for part in ("att", "ffn"):  # of the same size, and of another one
        key, value = (folder / f"blocks.0.{part}.{name}.weight.safetensors" for name in ("key", "value"))
        shutil.copy(key, value)
    made.clear()
    assert torch.equal(logits(path, "fp8"), whole) and len(made) == 3
    made.clear()
    assert torch.equal(logits(path, "fp8"), whole) and made == []


@pytest.mark.parametrize("dtype", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("part", ["codes", "scales"])
def test_a_single_changed_byte_is_noticed(
    tmp_path: Path, made: list[Format], caplog: pytest.LogCaptureFixture, dtype: str, part: str
) -> None:
    path = write_random_model(tmp_path / "tiny.pth", layers=1, width=64)
    whole = logits(path, dtype)
    damaged = next(tmp_path.glob(f"tiny.{dtype}-*")) / "blocks.0.ffn.key.weight.safetensors"
    content = bytearray(damaged.read_bytes())
    header = int.from_bytes(content[:8], "little")
    content[8 + header + json.loads(content[8 : 8 + header])[part]["data_offsets"][0] + 1] ^= 0x40
    damaged.write_bytes(content)
    made.clear()
    assert torch.equal(logits(path, dtype), whole) and len(made) == 1
    assert [str(damaged) in record.getMessage() for record in caplog.records if "damaged" in record.getMessage()] == [
        True
    ]


def test_a_folder_of_shards_has_its_own(tmp_path: Path, made: list[Format]) -> None:
    folder = tmp_path / "rwkv7-0.1B"
    folder.mkdir()
    pth = torch.load(write_random_model(tmp_path / "tiny.pth", layers=1, width=64), weights_only=True)
    save_file({name: tensor.contiguous() for name, tensor in pth.items()}, folder / "model.safetensors")
    whole = logits(folder, "fp8")
    assert len(made) == 7
    made.clear()
    assert torch.equal(logits(folder, "fp8"), whole) and made == []


def test_unfinished_files_of_a_killed_process_are_removed(tmp_path: Path, made: list[Format]) -> None:
    path = write_random_model(tmp_path / "tiny.pth", layers=1, width=64)
    logits(path, "fp8")
    folder = next(tmp_path.glob("tiny.fp8-*"))
    left, being_written = folder / ".writing-left", folder / ".writing-now"
    for half in (left, being_written):
        half.write_bytes(b"half")
    long_ago = time.time() - 2 * STALE_FILE_S
    os.utime(left, (long_ago, long_ago))
    made.clear()
    logits(path, "fp8")
    assert (left.exists(), being_written.exists(), made) == (False, True, [])


def test_a_read_only_folder_is_read(tmp_path: Path, made: list[Format], monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_random_model(tmp_path / "tiny.pth", layers=1, width=64)
    whole = logits(path, "fp8")
    (next(tmp_path.glob("tiny.fp8-*")) / "blocks.0.att.key.weight.safetensors").unlink()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    made.clear()
    assert torch.equal(logits(path, "fp8"), whole) and len(made) == 1


@pytest.mark.parametrize("kernels", ["naive", "cpu"])
def test_a_read_only_folder_does_not_stop_the_model(
    tmp_path: Path, made: list[Format], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    path = write_random_model(tmp_path / "tiny.pth", layers=1, width=64)
    choose_ops(kernels, torch.device("cpu"))  # builds the library, if needed, in a folder that can be made

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    logits(path, "fp8", kernels)
    assert len(made) == 7
    assert len([r for r in caplog.records if "every start quantises again" in r.getMessage()]) == 1
