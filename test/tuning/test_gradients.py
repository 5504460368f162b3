"""The training model against a plain reference in fp64: losses and gradients, packed and token by token."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from demo.random_weights import random_weights
from rwkv_batch.model.state import ModelShape
from rwkv_batch.tuning import Document, cpu
from rwkv_batch.tuning.cpu import CpuTrainingModel
from rwkv_batch.tuning.model import MemoryPlan, TrainingModel, Tunables, new_tunables, share_equal_rows
from rwkv_batch.tuning.packing import pack
from rwkv_batch.tuning.trainer import Schedule, Trainer
from rwkv_batch.tuning.wkv import CHUNK, wkv_chunked

pytestmark = pytest.mark.slow

needs_compiler = pytest.mark.skipif(cpu.unavailable_reason() is not None, reason="no C++ compiler")
LAYERS, WIDTH, VOCAB, RANKS = 4, 128, 96, (16, 16, 8, 24)
_SMALL = ("output.weight", "ffn.value.weight", "att.w2", "att.a2", "att.v2", "att.g2", "w0", "a0", "r_k")
SHAPE = ModelShape(LAYERS, WIDTH, VOCAB, 4 * WIDTH, *RANKS)


def plain_logits(w: Mapping[str, Tensor], added: Tunables, ids: list[int]) -> Tensor:
    """The formulas of one document, token by token: [T, V]."""
    heads = WIDTH // 64

    def linear(x: Tensor, name: str) -> Tensor:
        weight = w[f"{name}.weight"]
        if name in added.pairs:
            a, b = added.pairs[name]
            weight = weight + b @ a
        return weight @ x

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (WIDTH,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    zero = torch.zeros(WIDTH, dtype=torch.float64)
    att, ffn = [zero] * LAYERS, [zero] * LAYERS
    states = list(added.states) or [torch.zeros(heads, 64, 64, dtype=torch.float64)] * LAYERS
    found = []
    for token in ids:
        x, v_first = norm(w["emb.weight"][token], "blocks.0.ln0"), zero
        for i in range(LAYERS):
            at = f"blocks.{i}.att"
            h = norm(x, f"blocks.{i}.ln1")
            d, att[i] = att[i] - h, h
            mixed = {letter: h + d * w[f"{at}.x_{letter}"] for letter in "rwkvag"}
            r, k, v = (
                linear(mixed[s], f"{at}.{n}") for s, n in zip("rkv", ("receptance", "key", "value"), strict=True)
            )
            low = {s: mixed[s] @ w[f"{at}.{s}1"] for s in "wag"}
            decay = (-math.exp(-0.5) * (w[f"{at}.w0"] + low["w"].tanh() @ w[f"{at}.w2"]).sigmoid()).exp()
            a, g = (w[f"{at}.a0"] + low["a"] @ w[f"{at}.a2"]).sigmoid(), low["g"].sigmoid() @ w[f"{at}.g2"]
            kk = F.normalize((k * w[f"{at}.k_k"]).view(heads, 64), dim=-1, eps=1e-12)
            k = k * (1 + (a - 1) * w[f"{at}.k_a"])
            if i == 0:
                v_first = v
            else:
                gate = (w[f"{at}.v0"] + mixed["v"] @ w[f"{at}.v1"] @ w[f"{at}.v2"]).sigmoid()
                v = v + (v_first - v) * gate
            r, k, v, decay, a = (t.view(heads, 64) for t in (r, k, v, decay, a))
            removed = (states[i] @ -kk[:, :, None]) * (kk * a)[:, None, :]
            states[i] = states[i] * decay[:, None, :] + removed + v[:, :, None] * k[:, None, :]
            y = (states[i] @ r[:, :, None]).view(1, WIDTH)
            y = F.group_norm(y, heads, w[f"{at}.ln_x.weight"], w[f"{at}.ln_x.bias"], 64e-5).view(heads, 64)
            y = y + (r * k * w[f"{at}.r_k"]).sum(-1, keepdim=True) * v
            x = x + linear(y.reshape(WIDTH) * g, f"{at}.output")
            h = norm(x, f"blocks.{i}.ln2")
            d, ffn[i] = ffn[i] - h, h
            hidden = linear(h + d * w[f"blocks.{i}.ffn.x_k"], f"blocks.{i}.ffn.key")
            x = x + linear(hidden.relu() ** 2, f"blocks.{i}.ffn.value")
        found.append(w["head.weight"] @ norm(x, "ln_out"))
    return torch.stack(found)


def documents(lengths: tuple[int, ...], seed: int = 0) -> list[Document]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for length in lengths:
        ids = torch.randint(VOCAB, (length,), generator=generator).tolist()
        found.append(Document(ids, [float(i > length // 3) for i in range(length)]))
    return found


def weights(dtype: torch.dtype) -> dict[str, Tensor]:
    tensors = random_weights(LAYERS, WIDTH, VOCAB, seed=3, ranks=RANKS, first_v=False)
    # Smaller outputs than a random model's: those of a trained one do not amplify rounding from layer to layer.
    tensors = {name: t * 0.3 if name.endswith(_SMALL) else t for name, t in tensors.items()}
    return {
        name: (t.reshape(-1) if t.dim() == 3 else t).to(dtype).clone().requires_grad_() for name, t in tensors.items()
    }


def tunables(dtype: torch.dtype) -> Tunables:
    """States and pairs with numbers, so that all of them have gradients."""
    torch.manual_seed(4)
    found = new_tunables(SHAPE, "state+lora", 8, torch.device("cpu"), 5)
    values = [(torch.randn_like(one) * 0.1).double().to(dtype).requires_grad_() for one in found.parameters]
    pairs = iter(values[LAYERS:])
    return Tunables(values[:LAYERS], {name: (next(pairs), next(pairs)) for name in found.pairs})


PACKED = documents((37, 20, 9, 50))


@functools.cache
def reference() -> tuple[float, dict[str, Tensor]]:
    """The loss of PACKED, each document alone, and its gradients by the parameters' names."""
    plain, added = weights(torch.float64), tunables(torch.float64)
    total = sum(sum(one.weights[1:]) for one in PACKED)
    loss = torch.zeros((), dtype=torch.float64)
    for one in PACKED:
        logits = plain_logits(plain, added, list(one.ids[:-1]))
        losses = F.cross_entropy(logits, torch.tensor(one.ids[1:]), reduction="none")
        loss = loss + (losses * torch.tensor(one.weights[1:])).sum() / total
    names = [*plain, *(f"state {i}" for i in range(LAYERS)), *(f"{n} {p}" for n in added.pairs for p in "AB")]
    gradients = torch.autograd.grad(loss, [*plain.values(), *added.parameters])
    return loss.item(), dict(zip(names, gradients, strict=True))


@pytest.mark.parametrize(
    ("dtype", "limit", "recomputes"),
    [(torch.float32, 1e-4, False), (torch.float32, 1e-4, True), (torch.bfloat16, 2e-2, False)],
)
def test_gradients_are_those_of_the_plain_reference(dtype: torch.dtype, limit: float, recomputes: bool) -> None:
    """Four documents in three rows, against each alone in fp64."""
    expected, wanted = reference()
    model = TrainingModel(weights(torch.float32), SHAPE, tunables(torch.float32))
    model.plan = MemoryPlan(recomputed_layers=LAYERS if recomputes else 0)
    trainer = Trainer(model, [{"params": model.tunables.parameters, "lr": 0.1}], Schedule(1, 1), dtype)
    (batch,) = pack(PACKED, 3, 64)
    assert batch.cu_seqlens.tolist()[:2] == [0, 48] and len(batch.inputs) == 3
    actual = trainer.loss(batch)
    assert abs(actual.item() - expected) <= limit * expected
    given = torch.autograd.grad(actual, [*model.weights.values(), *model.tunables.parameters])
    differences = [float((one.double() - other).norm()) for one, other in zip(given, wanted.values(), strict=True)]
    norms = [float(other.norm()) for other in wanted.values()]
    errors = {name: one / norm for name, one, norm in zip(wanted, differences, norms, strict=True)}
    worst = sorted(errors.items(), key=lambda entry: -entry[1])[:5]
    assert math.hypot(*differences) <= limit / 2 * math.hypot(*norms), worst
    assert max(errors.values()) <= limit, worst


@needs_compiler
@pytest.mark.parametrize("recomputed", [0, LAYERS])
def test_fused_gradients_on_a_cpu_are_those_of_the_plain_reference(recomputed: int) -> None:
    """Of states and pairs, in pieces of one row."""
    expected, wanted = reference()
    frozen = {name: tensor.detach() for name, tensor in weights(torch.float32).items()}
    model = CpuTrainingModel(frozen, SHAPE, tunables(torch.float32))
    model.plan = MemoryPlan(0, 1, recomputed)
    trainer = Trainer(model, [{"params": model.tunables.parameters, "lr": 0.1}], Schedule(1, 1), torch.float32)
    (batch,) = pack(PACKED, 3, 64)
    assert abs(trainer.backward(batch) - expected) <= 1e-5 * expected
    gradients = list(wanted.values())[len(frozen) :]
    for one, other in zip(model.tunables.parameters, gradients, strict=True):
        assert one.grad is not None and (one.grad.double() - other).norm() <= 1e-4 * other.norm()


@needs_compiler
def test_fused_functions_give_the_same_bits_with_any_number_of_threads() -> None:
    torch.manual_seed(2)
    products = [torch.randn(96, 128) for _ in range(8)]
    vectors, outputs, first = torch.randn(5, 128), torch.randn(3, 128), torch.randn(2, 64, 64)
    keep = torch.tensor([[False, True, False], [False, True, True]])
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        inputs = [one.clone().requires_grad_() for one in (*products, first)]
        y = cpu.TimeCore.apply(*inputs, vectors, outputs, keep)
        found.append([y, *torch.autograd.grad(y.square().sum(), inputs)])
    torch.set_num_threads(1)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("kind", [TrainingModel, pytest.param(CpuTrainingModel, marks=needs_compiler)])
def test_gradients_of_a_long_document_are_those_of_fp64(kind: type[TrainingModel]) -> None:
    """The reference is the same model in fp64, which the test above compares token by token."""
    length = 8192 if "RWKV_LONG_TESTS" in os.environ else 1024
    (document,) = documents((length + 1,))
    (batch,) = pack([Document(document.ids, [1.0] * (length + 1))], 1, length)

    def gradients(dtype: torch.dtype, kind: type[TrainingModel]) -> tuple[Tensor, ...]:
        frozen = {name: tensor.detach() for name, tensor in weights(dtype).items()}
        model = kind(frozen, SHAPE, Tunables(tunables(dtype).states))
        loss = model.loss(model.hidden(batch.inputs, batch.begins)[0], batch.targets[0], batch.weights[0].to(dtype))
        return torch.autograd.grad(loss, model.tunables.states)

    for given, wanted in zip(gradients(torch.float32, kind), gradients(torch.float64, TrainingModel), strict=True):
        assert (given.double() - wanted).norm() <= 1e-4 * wanted.norm() and 0 < wanted.norm() < 1


def wkv_inputs(rows: int, time: int, heads: int = 2) -> list[Tensor]:
    """r, log decay, k, v, -kk and kk*a, random.

    Each is [rows, time, heads, 64].
    """
    torch.manual_seed(1)
    size = (rows, time, heads, 64)
    r, k, v = (torch.randn(size) for _ in range(3))
    kk, a = F.normalize(torch.randn(size), dim=-1), torch.rand(size)
    return [x.requires_grad_() for x in (r, -0.6065 * torch.rand(size).sqrt(), k, v, -kk, kk * a)]


def wkv_loop(r: Tensor, decay: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor) -> Tensor:
    """The recurrence of S, and y = S r.

    Token by token.
    """
    ys = []
    for t in range(r.shape[1]):
        removed = (state @ a[:, t, :, :, None]) * b[:, t, :, None, :]
        state = state * decay[:, t, :, None, :].exp() + removed + v[:, t, :, :, None] * k[:, t, :, None, :]
        ys.append((state @ r[:, t, :, :, None]).squeeze(-1))
    return torch.stack(ys, 1)


def test_the_chunked_wkv_is_the_recurrence_in_value_and_gradient() -> None:
    inputs, first = wkv_inputs(2, 48), torch.randn(2, 64, 64).requires_grad_()
    keep = torch.tensor([[False, True, True]] * 2)
    y, z = wkv_loop(*inputs, first[None]), wkv_chunked(*inputs, keep, first)
    torch.testing.assert_close(y, z, rtol=1e-4, atol=1e-4)
    weight = torch.randn_like(y)
    expected = torch.autograd.grad((y * weight).sum(), [*inputs, first])
    actual = torch.autograd.grad((z * weight).sum(), [*inputs, first])
    assert all((one - other).norm() < 1e-5 * one.norm() for one, other in zip(expected, actual, strict=True))


def test_long_documents_stay_finite_and_equal_the_recurrence() -> None:
    inputs = wkv_inputs(1, 8192, 1)
    keep = torch.ones(1, 8192 // CHUNK, dtype=torch.bool)
    first = torch.zeros(1, 64, 64, requires_grad=True)
    y = wkv_chunked(*inputs, keep, first)
    with torch.no_grad():
        torch.testing.assert_close(y, wkv_loop(*inputs, first[None]), rtol=1e-3, atol=1e-3)
    assert all(one.isfinite().all() for one in torch.autograd.grad(y.square().mean(), [*inputs, first]))


def test_documents_begin_with_the_given_state() -> None:
    inputs, first = wkv_inputs(1, 48), torch.randn(2, 64, 64)
    y = wkv_chunked(*inputs, torch.tensor([[False, False, True]]), first)
    for part in (slice(0, 16), slice(16, 48)):
        alone = wkv_loop(*(x[:, part] for x in inputs), first[None])
        torch.testing.assert_close(y[:, part], alone, rtol=1e-4, atol=1e-4)


def test_rows_of_the_head_that_are_equal_become_one_and_the_loss_stays() -> None:
    torch.manual_seed(0)
    tensors = {"emb.weight": torch.zeros(1), "head.weight": torch.randn(40, WIDTH)}
    tensors["head.weight"][[3, 7, 8, 39]] = tensors["head.weight"][39].clone()
    hidden, targets, counts = torch.randn(30, WIDTH), torch.randint(40, (30,)), torch.rand(30)
    logits = hidden @ tensors["head.weight"].T
    model = TrainingModel(tensors, SHAPE)
    share_equal_rows(model, tensors)
    expected = F.cross_entropy(logits, targets, reduction="none")
    assert len(tensors["head.weight"]) == 37
    torch.testing.assert_close(model.loss(hidden, targets, counts), (expected * counts).sum() / counts.sum())
    torch.testing.assert_close(model.scores(hidden, targets)[0], expected)
