"""The Triton kernels of training against fp64: gradients of states and pairs, in pieces and computed again."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from rwkv_batch.model.quant.formats import Format, dequantise, quantise
from rwkv_batch.tuning.model import MemoryPlan
from rwkv_batch.tuning.packing import pack
from rwkv_batch.tuning.products import dequantised
from rwkv_batch.tuning.trainer import Schedule, Trainer
from rwkv_batch.tuning.wkv import wkv_chunked
from test.tuning.test_gradients import LAYERS, SHAPE, documents, plain_logits, tunables, weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
GPU = torch.device("cuda")
LENGTHS = (37, 20, 9, 50, 64)


@cache
def expected() -> tuple[float, list[Tensor]]:
    """Loss and gradients of the tunables in fp64, document by document, from weights of bf16 values."""
    plain = {name: one.detach().bfloat16().double() for name, one in weights(torch.float32).items()}
    added = tunables(torch.float64)
    packed = documents(LENGTHS)
    total = sum(sum(one.weights[1:]) for one in packed)
    loss = torch.zeros((), dtype=torch.float64)
    for one in packed:
        losses = F.cross_entropy(
            plain_logits(plain, added, list(one.ids[:-1])), torch.tensor(one.ids[1:]), reduction="none"
        )
        loss = loss + (losses * torch.tensor(one.weights[1:])).sum() / total
    return float(loss), list(torch.autograd.grad(loss, added.parameters))


@pytest.mark.parametrize("plan", [MemoryPlan(), MemoryPlan(0, 1, 2)])
def test_gradients_of_the_fused_layers(plan: MemoryPlan) -> None:
    from rwkv_batch.tuning.gpu.model import GpuTrainingModel

    loss, wanted = expected()
    tensors = {
        name: one.detach().bfloat16().to(GPU, torch.bfloat16 if one.dim() == 2 and "r_k" not in name else torch.float32)
        for name, one in weights(torch.float32).items()
    }
    added = tunables(torch.float32)
    added.states = [one.detach().to(GPU).requires_grad_() for one in added.states]
    added.pairs = {
        name: (a.detach().to(GPU).requires_grad_(), b.detach().to(GPU).requires_grad_())
        for name, (a, b) in added.pairs.items()
    }
    model = GpuTrainingModel(tensors, SHAPE, added)
    model.plan = plan
    trainer = Trainer(model, [{"params": added.parameters, "lr": 0.1}], Schedule(1, 1), torch.bfloat16)
    (batch,) = pack(documents(LENGTHS), 4, 64)
    assert abs(trainer.backward(batch) - loss) <= 5e-3 * loss
    given = [one.grad.cpu().double() for one in added.parameters]
    errors = [float((one - other).norm() / other.norm()) for one, other in zip(given, wanted, strict=True)]
    whole = math.hypot(*(float((one - other).norm()) for one, other in zip(given, wanted, strict=True)))
    norm = math.hypot(*(float(one.norm()) for one in wanted))
    print(f"whole {whole / norm:.2e}, states {errors[:LAYERS]}, worst {max(errors):.2e}")
    assert whole <= 2e-2 * norm and max(errors) <= 4e-2


@pytest.mark.parametrize("format_", [Format.FP8, Format.W8A8])
def test_dequantised_matrices_are_those_of_the_definition(format_: Format) -> None:
    weight = torch.randn(48, 2304, device=GPU)
    stored = quantise(weight, format_, torch.rand(2304, device=GPU) * 4)
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(dequantised(stored, dtype), dequantise(stored, dtype))


@pytest.mark.parametrize("has_first", [True, False])
def test_the_core_of_a_time_mix(has_first: bool) -> None:
    """Against the formulas in fp64, long rows with resets; inputs are bf16 values."""
    from rwkv_batch.tuning.gpu.wkv import TimeCore

    rows, time, heads = 3, 1024, 4
    width, random = heads * 64, torch.Generator(GPU).manual_seed(3)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=random, device=GPU).bfloat16()

    products = [normal(rows * time, width) for _ in range(8)]
    first = (normal(heads, 64, 64) * 0.3).float() if has_first else None
    inputs, outputs = normal(5, width).float() * 0.3, normal(3, width).float() * 0.3
    inputs[3:] += 0.8
    outputs[0] += 1
    keep = torch.rand(rows, time // 16, generator=random, device=GPU) > 0.1
    keep[:, 0] = False

    def plain(r: Tensor, k: Tensor, v: Tensor, w: Tensor, a: Tensor, g: Tensor, gate: Tensor, *more: Tensor) -> Tensor:
        w0, a0, v0, k_k, k_a = inputs.double()
        v = v + (more[0] - v) * torch.sigmoid(v0 + gate)
        rate = torch.sigmoid(a0 + a)
        r, k_raw, v, w, rate_heads = (
            one.view(rows, time, heads, 64) for one in (r, k * k_k, v, -math.exp(-0.5) * torch.sigmoid(w0 + w), rate)
        )
        k = (k * (1 + (rate - 1) * k_a)).view(rows, time, heads, 64)
        kk = F.normalize(k_raw, dim=-1, eps=1e-12)
        y = wkv_chunked(r, w, k, v, -kk, kk * rate_heads, keep, more[1] if has_first else None)
        norm = outputs[0].double(), outputs[1].double()
        y = F.group_norm(y.flatten(2).flatten(0, 1), heads, *norm, eps=64e-5).view(y.shape)
        y = y + (r * k * outputs[2].double().view(heads, 64)).sum(-1, keepdim=True) * v
        return y.flatten(0, 1).flatten(1) * g

    wide = [one.double().requires_grad_() for one in [*products, *([first] if has_first else [])]]
    narrow = [one.clone().requires_grad_() for one in products]
    narrow[7] = products[7].float().requires_grad_()
    state = first.clone().requires_grad_() if first is not None else None
    weight = normal(rows * time, width)
    expected_y = plain(*wide)
    wanted = torch.autograd.grad((expected_y * weight).sum(), wide)
    y = TimeCore.apply(*narrow, state, inputs, outputs, keep)
    given = torch.autograd.grad((y * weight).sum(), [*narrow, *([state] if state is not None else [])])
    errors = [
        float((one.double() - other).norm() / other.norm())
        for one, other in zip([y, *given], [expected_y, *wanted], strict=True)
    ]
    print([f"{one:.1e}" for one in errors])
    assert max(errors) <= 2e-2
