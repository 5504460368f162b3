"""The shipped file expands exactly to a standard file, and only once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from demo import files

safetensors_numpy = pytest.importorskip("safetensors")


def _small() -> tuple[dict[str, files.Bits], np.ndarray]:
    rng = np.random.default_rng(0)
    ids = np.sort(rng.choice(files.VOCAB, 50, replace=False)).astype(np.int64)
    tensors = {
        name: rng.integers(0, 65536, shape, dtype=np.uint16)
        for name, shape in (("emb.weight", (51, 8)), ("blocks.0.ln0.weight", (8,)), ("head.weight", (51, 8)))
    }
    return tensors, ids


def test_compressing_loses_nothing() -> None:
    tensors, ids = _small()
    again, again_ids = files.decompress(files.compress(tensors, ids))
    assert (again_ids == ids).all() and list(again) == list(tensors)
    assert all((again[name] == tensors[name]).all() for name in tensors)


def test_the_file_is_standard_and_expanded_once(tmp_path: Path) -> None:
    tensors, ids = _small()
    source = tmp_path / "model.compact"
    source.write_bytes(files.compress(tensors, ids))
    path = files.ensure_model(tmp_path / "cache", source)
    made = path.stat().st_mtime_ns
    assert files.ensure_model(tmp_path / "cache", source) == path and path.stat().st_mtime_ns == made
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [path.name]
    with safetensors_numpy.safe_open(str(path), framework="pt") as file:
        table = file.get_tensor("emb.weight")
        assert tuple(table.shape) == (files.VOCAB, 8) and str(table.dtype) == "torch.bfloat16"
        bits = table.view(__import__("torch").int16).numpy().view(np.uint16)
    assert (bits[ids] == tensors["emb.weight"][:-1]).all()
    others = np.setdiff1d(np.arange(files.VOCAB), ids)
    assert (bits[others] == tensors["emb.weight"][-1]).all()


def test_a_missing_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no demo model"):
        files.ensure_model(tmp_path, tmp_path / "nothing.compact")


def test_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match="compact"):
        files.decompress(b"something else entirely")


def test_expanding_needs_no_torch() -> None:
    code = "import sys, demo.files; sys.exit('torch' in sys.modules)"
    root = Path(files.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


def test_the_shipped_model_is_small_enough() -> None:
    if not files.MODEL.is_file():
        pytest.skip("no trained model in this tree")
    assert files.MODEL.stat().st_size <= 16_000_000
    tensors, ids = files.decompress(files.MODEL.read_bytes())
    layers = sum(name.endswith(".ln1.weight") for name in tensors)
    heads = tensors["blocks.0.att.r_k"].shape[0]
    assert layers >= 4 and heads >= 4 and len(ids) < files.VOCAB
