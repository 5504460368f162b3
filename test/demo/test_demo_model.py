"""The training model: WKV against the recurrence, logits against the reference, a falling loss."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from demo.export import load_compact, save_compact
from demo.files import ensure_model
from demo.model import Rwkv7, Shape
from demo.packing import batch, used_ids
from demo.train import loss_of, optimizer_of, start_from
from demo.tune import save, tune
from demo.vocabulary import Compact
from demo.wkv import wkv_chunked


def wkv_loop(
    r: Tensor, decay: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute y and the last state, token by token; return both.

    S <- S*w + (S a) b^T + v k^T, y = S r.
    """
    ys = []
    for t in range(r.shape[1]):
        removed = (state @ a[:, t, :, :, None]) * b[:, t, :, None, :]
        state = state * decay[:, t, :, None, :].exp() + removed + v[:, t, :, :, None] * k[:, t, :, None, :]
        ys.append((state @ r[:, t, :, :, None]).squeeze(-1))
    return torch.stack(ys, 1), state


def _disturbed(shape: Shape, seed: int = 0) -> Rwkv7:
    """Return a model with no zero weights. Every part then affects the logits."""
    torch.manual_seed(seed)
    model = Rwkv7(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
            parameter.copy_(parameter.bfloat16().float())
    return model


def test_the_chunked_wkv_is_the_recurrence_in_value_and_gradient() -> None:
    torch.manual_seed(1)
    size = (2, 48, 2, 64)
    r, k, v = (torch.randn(size) for _ in range(3))
    kk, a = torch.nn.functional.normalize(torch.randn(size), dim=-1), torch.rand(size)
    decay = -0.6065 * torch.rand(size).sqrt()
    inputs = [x.requires_grad_() for x in (r, decay, k, v, -kk, kk * a)]
    keep = torch.ones(2, 3, dtype=torch.bool)
    keep[:, 0] = False
    y, _ = wkv_loop(*inputs, torch.zeros(2, 2, 64, 64))
    z = wkv_chunked(*inputs, keep)
    torch.testing.assert_close(y, z, rtol=1e-4, atol=1e-4)
    weight = torch.randn_like(y)
    for one, other in zip(
        torch.autograd.grad((y * weight).sum(), inputs), torch.autograd.grad((z * weight).sum(), inputs), strict=True
    ):
        assert (one - other).norm() < 1e-5 * one.norm()


def test_the_chunked_wkv_begins_documents_with_a_given_state() -> None:
    torch.manual_seed(2)
    size = (1, 48, 2, 64)
    r, k, v = (torch.randn(size) for _ in range(3))
    kk, a = torch.nn.functional.normalize(torch.randn(size), dim=-1), torch.rand(size)
    decay = -0.6065 * torch.rand(size).sqrt()
    first = torch.randn(2, 64, 64)
    keep = torch.tensor([[False, False, True]])
    y = wkv_chunked(r, decay, k, v, -kk, kk * a, keep, first)
    for part in (slice(0, 16), slice(16, 48)):
        inputs = [x[:, part] for x in (r, decay, k, v, -kk, kk * a)]
        torch.testing.assert_close(y[:, part], wkv_loop(*inputs, first[None])[0], rtol=1e-4, atol=1e-4)


def test_training_continues_from_a_compact_file_with_more_ids(tmp_path: Path) -> None:
    known, more = np.arange(0, 90, 3, dtype=np.int64), np.arange(0, 90, 2, dtype=np.int64)
    model = _disturbed(Shape(len(known) + 1, 2, 64, (8, 8, 8, 8)))
    save_compact(tmp_path / "m.compact", model, known)
    compact = Compact(np.union1d(known, more))
    wider = Rwkv7(Shape(compact.rows, 2, 64, (8, 8, 8, 8)))
    start_from(tmp_path / "m.compact", wider, compact)
    narrow, begins = Compact(known), torch.zeros(1, 16, dtype=torch.bool)
    begins[0, 0] = True
    tokens = [3, 4, 6, 1000] * 4
    with torch.no_grad():
        expected = model(torch.tensor(narrow.of_id[tokens])[None], begins)[0][:, narrow.of_id]
        actual = wider(torch.tensor(compact.of_id[tokens])[None], begins)[0][:, compact.of_id]
    torch.testing.assert_close(actual, expected)


def test_a_state_and_an_adapter_learn_and_leave_the_model_alone(tmp_path: Path) -> None:
    compact = Compact(used_ids(1, 300))
    for name in ("json", "french"):
        torch.manual_seed(0)
        model = _disturbed(Shape(compact.rows, 2, 64, (8, 8, 8, 8)))
        before = {key: value.clone() for key, value in model.state_dict().items()}
        args = Namespace(seed=1, rows=2, time=128, workers=0, steps=3, minutes=60.0)
        path = save(name, tune(name, model, compact, args), tmp_path)
        after = {
            key.replace("parametrizations.weight.original", "weight"): value
            for key, value in model.state_dict().items()
        }
        assert all(torch.equal(value, after[key]) for key, value in before.items())
        tensors = torch.load(path, weights_only=True) if path.suffix == ".pth" else load_file(path)
        assert all(value.abs().sum() > 0 for value in tensors.values())
        if name == "json":
            assert {tuple(value.shape) for value in tensors.values()} == {(1, 64, 64)}
        else:
            low = tensors["blocks.1.ffn.key.lora_B"].float() @ tensors["blocks.1.ffn.key.lora_A"].float()
            assert low.shape == before["blocks.1.ffn.key.weight"].shape


def test_packed_documents_do_not_see_each_other() -> None:
    model = _disturbed(Shape(64, 2, 64, (8, 8, 8, 8)))
    tokens = torch.randint(64, (1, 48))
    begins = torch.zeros(1, 48, dtype=torch.bool)
    begins[0, 0] = begins[0, 16] = True
    alone = torch.zeros(1, 32, dtype=torch.bool)
    alone[0, 0] = True
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, begins)[:, 16:], model(tokens[:, 16:], alone), rtol=1e-4, atol=1e-4)


def test_the_logits_are_the_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RWKV_V7_ON", "1"), ("RWKV_JIT_ON", "1"), ("RWKV_CUDA_ON", "0")):
        monkeypatch.setitem(os.environ, name, value)
    reference = pytest.importorskip("rwkv.model")
    ids = np.arange(0, 600, 3, dtype=np.int64)
    model = _disturbed(Shape(len(ids) + 1, 3, 128, (16, 16, 8, 16)))
    save_compact(tmp_path / "m.compact", model, ids)
    path = ensure_model(tmp_path / "cache", tmp_path / "m.compact")
    safetensors = pytest.importorskip("safetensors.torch")
    torch.save(safetensors.load_file(str(path)), tmp_path / "m.pth")
    text = [int(i) for i in np.random.default_rng(0).integers(0, 1000, 40)]
    expected, _ = reference.RWKV(model=str(tmp_path / "m"), strategy="cpu fp32").forward(text, None, full_output=True)
    loaded, compact = load_compact(tmp_path / "m.compact")
    rows = torch.tensor(compact.of_id[text])
    begins = torch.zeros(1, 32, dtype=torch.bool)
    begins[0, 0] = True
    with torch.no_grad():
        whole = loaded(rows[None, :32], begins)[0]
    assert (whole[:, compact.of_id] - expected[:32]).abs().max() < 1e-4


def test_a_few_steps_lower_the_loss() -> None:
    compact = Compact(used_ids(1, 300))
    torch.manual_seed(0)
    model = Rwkv7(Shape(compact.rows, 2, 64, (8, 8, 8, 8)))
    optimizer = optimizer_of(model, 5e-3)
    rows = [torch.from_numpy(part) for part in batch(1, 0, compact, 4, 128)]
    losses = []
    for _ in range(8):
        loss = loss_of(model, compact, *rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1


def test_batches_depend_on_seed_and_index_alone() -> None:
    compact = Compact(used_ids(1, 50))
    one, other = batch(1, 5, compact, 2, 256), batch(1, 5, compact, 2, 256)
    assert all((a == b).all() for a, b in zip(one, other, strict=True))
    assert any((a != b).any() for a, b in zip(one, batch(1, 6, compact, 2, 256), strict=True))
    assert one[3][:, [i for i in range(256) if i % 16]].sum() == 0
