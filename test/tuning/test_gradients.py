"""The training model against a plain reference in fp64: losses and gradients, packed and token by token."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from demo.random_weights import random_weights
from rwkv_batch.model.state import ModelShape
from rwkv_batch.tuning.model import TrainingModel, Tunables, new_tunables
from rwkv_batch.tuning.packing import Document, pack
from rwkv_batch.tuning.trainer import Schedule, Trainer

LAYERS, WIDTH, VOCAB, RANKS = 4, 128, 96, (16, 16, 8, 24)
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
            r, k, v = (linear(mixed[s], f"{at}.{n}") for s, n in zip("rkv", ("receptance", "key", "value"), strict=True))
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


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("recomputes", [False, True])
def test_gradients_are_those_of_the_plain_reference(dtype: torch.dtype, limit: float, recomputes: bool) -> None:
    """Four documents packed into two rows, against each alone, token by token in fp64."""
    packed = documents((37, 20, 9, 50))
    plain, plain_added = weights(torch.float64), tunables(torch.float64)
    total = sum(sum(one.weights[1:]) for one in packed)
    expected = torch.zeros((), dtype=torch.float64)
    for one in packed:
        losses = F.cross_entropy(
            plain_logits(plain, plain_added, list(one.ids[:-1])), torch.tensor(one.ids[1:]), reduction="none"
        )
        expected = expected + (losses * torch.tensor(one.weights[1:])).sum() / total
    wide = torch.float32
    model = TrainingModel(weights(wide), SHAPE, tunables(wide))
    model.recomputes = recomputes
    trainer = Trainer(model, [{"params": model.tunables.parameters, "lr": 0.1}], Schedule(1, 1), dtype)
    (batch,) = pack(packed, 3, 64)
    actual = trainer.loss(batch)
    assert abs(float(actual) - float(expected)) <= limit * float(expected)
    names = [*plain, *(f"state {i}" for i in range(LAYERS)), *(f"{n} {p}" for n in plain_added.pairs for p in "AB")]
    wanted = torch.autograd.grad(expected, [*plain.values(), *plain_added.parameters])
    given = torch.autograd.grad(actual, [*model.weights.values(), *model.tunables.parameters])
    errors = {
        name: float((one.double() - other).norm() / other.norm())
        for name, one, other in zip(names, given, wanted, strict=True)
    }
    assert max(errors.values()) <= limit, sorted(errors.items(), key=lambda entry: -entry[1])[:5]
