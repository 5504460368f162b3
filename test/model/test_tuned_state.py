"""State files: both formats, both orientations, and refusals."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rwkv_batch.model.state import ModelShape
from rwkv_batch.model.tensor_files import FileError
from rwkv_batch.model.tuned_state import KEY_VALUE, VALUE_KEY, read_tuned_state, write_tuned_state
from test.state_files import random_state, state_tensors, write_state

SHAPE = ModelShape(layers=3, width=128, vocab=512, ffn=512, decay_rank=8, a_rank=8, v_rank=8, gate_rank=8)
WKV = random_state(1)


def transposed(wkv: Tensor) -> Tensor:
    return wkv.transpose(-1, -2).contiguous()


def test_a_trained_pth_is_not_transposed(tmp_path: Path) -> None:
    state = read_tuned_state(write_state(tmp_path / "s.pth", WKV), SHAPE)
    assert state.orientation == VALUE_KEY and ".pth" in state.reason
    assert torch.equal(state.wkv, WKV)


@pytest.mark.parametrize("name", ["s.safetensors", "s.state", "s.st"])
def test_a_converted_file_is_transposed(tmp_path: Path, name: str) -> None:
    state = read_tuned_state(write_state(tmp_path / name, transposed(WKV).half()), SHAPE)
    assert state.orientation == KEY_VALUE and "fp16" in state.reason
    assert torch.equal(state.wkv, WKV.half().float())


def test_other_safetensors_are_not_transposed(tmp_path: Path) -> None:
    assert torch.equal(read_tuned_state(write_state(tmp_path / "s.safetensors", WKV), SHAPE).wkv, WKV)


def test_the_request_decides_then_the_file(tmp_path: Path) -> None:
    path = write_state(tmp_path / "s.safetensors", WKV.half(), {"orientation": VALUE_KEY})
    said = read_tuned_state(path, SHAPE)
    asked = read_tuned_state(path, SHAPE, KEY_VALUE)
    assert said.orientation == VALUE_KEY and "the file says" in said.reason
    assert asked.orientation == KEY_VALUE and torch.equal(asked.wkv, transposed(said.wkv))
    assert asked.digest != said.digest


def test_a_written_state_is_read_back(tmp_path: Path) -> None:
    state = read_tuned_state(write_state(tmp_path / "s.pth", WKV), SHAPE)
    write_tuned_state(tmp_path / "kept.safetensors", state, {"file": "s.pth"})
    back = read_tuned_state(tmp_path / "kept.safetensors", SHAPE)
    assert torch.equal(back.wkv, WKV) and back.digest == state.digest


def test_states_leave_no_cyclic_garbage(tmp_path: Path) -> None:
    """The engine collects garbage rarely. So cycles would stay for thousands of states."""
    state = read_tuned_state(write_state(tmp_path / "s.safetensors", WKV), SHAPE)
    write_tuned_state(tmp_path / "kept.safetensors", state, {})
    gc.collect()
    for _ in range(5):
        write_tuned_state(tmp_path / "kept.safetensors", state, {})
        read_tuned_state(tmp_path / "kept.safetensors", SHAPE)
    assert gc.collect() == 0


def test_a_dimension_of_one_before_the_heads(tmp_path: Path) -> None:
    assert torch.equal(read_tuned_state(write_state(tmp_path / "s.pth", WKV.unsqueeze(1)), SHAPE).wkv, WKV)


def one_nan() -> Tensor:
    wkv = WKV.clone()
    wkv[2, 1, 3, 4] = float("nan")
    return wkv


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "layers missing": (state_tensors(WKV[:2]), "has 2 layers .* the model has 3"),
    "another width": (state_tensors(random_state(1, width=192)), r"shape \(3, 64, 64\), expected \(2, 64, 64\)"),
    "RWKV-6": ({**state_tensors(WKV), "blocks.0.att.time_offset": torch.zeros(128)}, "RWKV-6"),
    "weights among them": (
        {**state_tensors(WKV), "emb.weight": torch.zeros(4, 4)},
        "1 tensors that are not a tuned state",
    ),
    "something else": ({"blocks.0.att.key.lora_A": torch.zeros(4, 4)}, "no 'blocks.N.att.time_state'"),
    "nothing": ({}, "it has nothing"),
    "integers": (state_tensors(WKV.to(torch.int32)), "torch.int32, expected floats"),
    "NaN": (state_tensors(one_nan()), "NaN or infinity"),
    "1e30": (state_tensors(WKV * 1e32), "at most 65504 is valid"),
    "code": ({"blocks.0.att.time_state": Path("/tmp")}, "its pickle uses 'pathlib.PosixPath'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path: Path, case: str) -> None:
    tensors, why = REFUSED[case]
    torch.save(tensors, tmp_path / "s.pth")
    with pytest.raises(FileError, match=why) as refused:
        read_tuned_state(tmp_path / "s.pth", SHAPE)
    assert "state file" in str(refused.value)


def test_a_pickle_with_code_is_never_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"blocks.0.att.time_state": Evil()}, tmp_path / "s.pth")
    with pytest.raises(FileError):
        read_tuned_state(tmp_path / "s.pth", SHAPE)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"PK\x03\x04 and more"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "s.state").write_bytes(content)
    with pytest.raises(FileError):
        read_tuned_state(tmp_path / "s.state", SHAPE)
