"""WKV with int8 states on a GPU: decode and prefill against plain torch in fp32, with unbiased rounding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rwkv_batch.model.state import HEAD_BYTES, pack_int8, unpack_int8
from test.gpu.test_gpu_wkv import GPU, WIDTH, expected_output, make_inputs, make_layer, make_parts, relative_error, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

HEADS = WIDTH // 64
NAMES = ("r", "w", "k", "v", "a", "g", "v_gate")


def make_state(slots: int, seed: int = 3) -> Tensor:
    """Return states [slots, HEADS, 4224] uint8; the first is zero."""
    generator = torch.Generator(GPU).manual_seed(seed)
    state = 0.3 * torch.randn(slots, HEADS, 64, 64, device=GPU, generator=generator)
    state[0] = 0
    return pack_int8(state)


def scales(stored: Tensor) -> Tensor:
    """Return the scales [..., 64, 1] fp32 of states [..., 4224]."""
    return stored[..., 64 * 64 :].contiguous().view(torch.bfloat16).float().unsqueeze(-1)


@pytest.mark.parametrize(
    "lengths",
    [[1], [1] * 3, [1] * 300, [1] * 1500, [2], [300, 12], [1, 2, 15, 16, 17, 33, 300, 64], [5, 40] * 40],
    ids=lambda lengths: f"{len(lengths)} rows, {sum(lengths)} tokens",
)
def test_a_step(lengths: list[int]) -> None:
    """y is as exact as with other states. States differ by less than one code, by 0 on average, in their slots only."""
    rows = len(lengths)
    state = make_state(2 * rows + 2)
    reads = [0 if i % 3 == 0 else i + 1 for i in range(rows)]
    writes = [i + 1 if i % 3 == 1 else rows + i + 1 for i in range(rows)]
    inputs, layer = make_inputs(lengths, reads, writes), make_layer()
    parts, first = make_parts(sum(lengths))
    wkv, expected = state.clone(), unpack_int8(state)
    y, expected_y = run(layer, parts, first, wkv, inputs), expected_output(layer, parts, first, expected, inputs)
    assert torch.isfinite(y).all()
    assert relative_error(y, expected_y) < 1e-3
    actual, scale = unpack_int8(wkv[writes]), scales(wkv[writes])
    assert torch.isfinite(actual).all()
    # A row that is almost 0 is what is left of larger numbers, which fp32 rounds as well.
    off = ((actual - expected[writes]) / scale.clamp(min=1e-5)).double()
    assert float(off.abs().max()) < 1.2
    assert abs(float(off.mean())) < 0.002 + 3 / off.numel() ** 0.5
    assert float(off.square().mean()) < 0.2
    others = torch.ones(len(wkv), dtype=torch.bool, device=GPU)
    others[writes] = False
    assert torch.equal(wkv[others], state[others])


@pytest.mark.parametrize("tokens", [1, 40])
def test_unchanged_states_stay(tokens: int) -> None:
    layer = make_layer(w0=-100.0)
    parts, first = make_parts(30 * tokens)
    parts = replace(parts, k=parts.k * 0, w=parts.w * 0)
    wkv = make_state(32)
    kept, slots = wkv.clone(), list(range(2, 32))
    for _ in range(3):
        run(layer, parts, first, wkv, make_inputs([tokens] * 30, slots, slots))
        assert torch.equal(wkv, kept)


@pytest.mark.parametrize(
    "company",
    [[[1], [1] * 3, [1] * 80, [1] * 1000], [[150], [150, 9], [150, 133, 170] * 12, [150] + [20] * 40]],
    ids=["a token", "a prompt"],
)
def test_any_batch_same_bits(company: list[list[int]]) -> None:
    length = company[0][0]
    own, own_first = make_parts(length, seed=7)
    layer, results = make_layer(), []
    for lengths in company:
        rows, mine = len(lengths), len(lengths) - 1 - lengths[::-1].index(length)
        parts, first = make_parts(sum(lengths), seed=8)
        at = sum(lengths[:mine])
        for name in NAMES:
            getattr(parts, name)[at : at + length] = getattr(own, name)
        first[at : at + length] = own_first
        wkv = make_state(rows + 1)
        wkv[mine + 1] = make_state(2, seed=9)[1]
        slots = list(range(1, rows + 1))
        y = run(layer, parts, first, wkv, make_inputs(lengths, slots, slots))
        results.append((y[at : at + length], wkv[mine + 1]))
    for y, state in results[1:]:
        assert torch.equal(y, results[0][0])
        assert torch.equal(state, results[0][1])


def test_slow_decay_over_many_tokens() -> None:
    """A decay of 0.9995 moves no code by half a step: with rounding to nearest, nothing would decay."""
    rows, steps = 40, 400
    rate = torch.logit(torch.tensor(0.0005 / 0.6065306597)).item()
    layer = make_layer(w0=rate)
    parts, first = make_parts(rows)
    parts = replace(parts, k=parts.k * 0, w=parts.w * 0)
    wkv, slots = make_state(rows + 2), list(range(2, rows + 2))
    before = unpack_int8(wkv)[2:]
    for step in range(steps):
        noise, _ = make_parts(rows, seed=step)
        run(layer, replace(noise, k=parts.k, w=parts.w), first, wkv, make_inputs([1] * rows, slots, slots))
    assert wkv.shape[-1] == HEAD_BYTES
    after = unpack_int8(wkv)[2:]
    left = float((after * before).sum() / before.square().sum())
    assert abs(left - 0.9995**steps) < 0.005


def test_values_far_beyond_the_state() -> None:
    """A row whose added values are much larger than its old ones."""
    layer = make_layer()
    parts, first = make_parts(3)
    state = pack_int8(1e-6 * torch.randn(5, HEADS, 64, 64, device=GPU))
    inputs = make_inputs([1] * 3, [2, 3, 4], [2, 3, 4])
    wkv, expected = state.clone(), unpack_int8(state)
    y, expected_y = run(layer, parts, first, wkv, inputs), expected_output(layer, parts, first, expected, inputs)
    assert relative_error(y, expected_y) < 1e-3
    off = (unpack_int8(wkv[2:]) - expected[2:]) / scales(wkv[2:]).clamp(min=1e-5)
    assert float(off.abs().max()) < 1.2
