"""Slots are copied between a GPU and pinned memory. Each layer is copied piece by piece."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from native import tensors
from native.tensors import copy_pieces
from rwkv_batch.model.state import ModelShape, StateArena, StateFormat

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GPU = torch.device("cuda", 0)


def random_arena(form: StateFormat = StateFormat.FP16) -> StateArena:
    arena = StateArena(7, 5, ModelShape(5, 256, 64, 1024), GPU, form, torch.float16)
    for part in (arena.wkv, arena.shift):
        part.copy_(torch.randn(part.shape).abs().mul(50).to(part.dtype))
    return arena


def pinned_like(slot: Tensor) -> Tensor:
    return torch.empty(slot.shape, dtype=slot.dtype, pin_memory=True)


@pytest.mark.parametrize("form", [StateFormat.FP16, StateFormat.INT8])
@pytest.mark.parametrize("max_pitch", [tensors.MAX_PITCH, 0], ids=["one copy", "too far apart for one"])
def test_a_slot_is_saved_and_loaded_to_the_bit(
    max_pitch: int, form: StateFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tensors._copy_2d() is not None, "torch's own runtime has it"
    monkeypatch.setattr(tensors, "MAX_PITCH", max_pitch)
    arena = random_arena(form)
    for part in (arena.wkv, arena.shift):
        before = part.clone()
        host = pinned_like(part[3])
        copy_pieces(host, part[3])
        torch.cuda.synchronize()
        assert torch.equal(host.to(GPU), before[3])
        copy_pieces(part[5], host)
        assert torch.equal(part[5], before[3])
        others = [0, 1, 2, 3, 4, 6]
        assert torch.equal(part[others], before[others])


def test_the_states_of_a_layer_are_contiguous() -> None:
    arena = random_arena()
    assert all(arena.layer_wkv(layer).is_contiguous() for layer in range(5))
    assert arena.wkv[:, 2].data_ptr() - arena.wkv[:, 1].data_ptr() == arena.layer_wkv(1).numel() * 2


def test_a_wrong_size_is_refused() -> None:
    arena = random_arena()
    slot = arena.wkv[3]
    with pytest.raises(ValueError, match="does not fit"):
        copy_pieces(pinned_like(slot)[:4], slot)
    with pytest.raises(ValueError, match="does not fit"):
        copy_pieces(pinned_like(slot).float(), slot)
    with pytest.raises(ValueError, match="contiguous"):
        copy_pieces(pinned_like(slot).transpose(-1, -2), slot)
