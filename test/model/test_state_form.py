"""int8 states: precision, no drift, and slots read and written as in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from demo.random_weights import random_weights
from rwkv_batch.model.state import (
    HEAD_BYTES,
    MAX_CODE,
    MIN_KEPT_CODE,
    ModelShape,
    StateFormat,
    find_invalid,
    pack_int8,
    unpack_int8,
)
from rwkv_batch.model.step_inputs import step_inputs
from rwkv_batch.model.weights import Weights, weights_from
from rwkv_batch.runner.pipeline import Pipeline
from test.model.test_model import KERNELS

SLOTS, LAYERS, WIDTH = 12, 3, 128
CODES = 64 * 64


def numbers(*size: int, seed: int = 1) -> Tensor:
    """Return states [..., 64, 64] with rows of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(*size, 64, 1, generator=generator).mul(3).exp()
    return torch.randn(*size, 64, 64, generator=generator) * rows


def scales(packed: Tensor) -> Tensor:
    return packed[..., CODES:].contiguous().view(torch.bfloat16).float()


def codes(packed: Tensor) -> Tensor:
    return packed[..., :CODES].contiguous().view(torch.int8).unflatten(-1, (64, 64))


def test_the_error_is_below_one_step_of_the_row() -> None:
    reference = numbers(8, 4)
    packed = pack_int8(reference)
    assert packed.shape == (8, 4, HEAD_BYTES) and packed.dtype is torch.uint8
    largest, scale = reference.abs().amax(-1), scales(packed)
    assert (scale >= largest / MAX_CODE).all() and (scale <= largest / MAX_CODE * (1 + 2**-7)).all()
    assert codes(packed).abs().max() == MAX_CODE
    steps = (unpack_int8(packed) - reference) / scale.unsqueeze(-1)
    assert steps.abs().max() < 1 + 2**-15
    assert steps.mean().abs() < 0.005, "131,072 roundings of variance 1/6"


def test_unchanged_numbers_keep_their_bits() -> None:
    packed = first = pack_int8(numbers(8, 4))
    for _ in range(3):
        packed = pack_int8(unpack_int8(packed), packed)
        assert torch.equal(packed, first)
    for _ in range(9):  # the first scale may shrink if its largest value is 126
        packed = pack_int8(unpack_int8(packed))
    assert torch.equal(packed, pack_int8(unpack_int8(packed)))


def test_a_scale_is_kept_while_it_fits() -> None:
    row = torch.linspace(-1, 1, 64).expand(1, 64, 64)
    packed = pack_int8(row)
    smaller = (MIN_KEPT_CODE + 1) / MAX_CODE
    assert torch.equal(scales(pack_int8(row * smaller, packed)), scales(packed))
    for factor in (1.02, (MIN_KEPT_CODE - 2) / MAX_CODE):
        assert torch.equal(scales(pack_int8(row * factor, packed)), scales(pack_int8(row * factor)))


@pytest.mark.parametrize("decay", [0.99, 0.999])
def test_slow_decays_are_exact_on_average(decay: float) -> None:
    """With rounding to nearest, small values would never decay. These are values below 1 / (2 (1 - decay))."""
    reference = numbers(2, 2)
    packed, tiny = pack_int8(reference), reference.abs().amax(-1, keepdim=True) * 1e-3
    start, generator = reference.clone(), torch.Generator().manual_seed(3)
    for _ in range(300):
        added = torch.randn(reference.shape, generator=generator) * tiny
        packed = pack_int8(unpack_int8(packed) * decay + added, packed)
        reference = reference * decay + added
    left = (unpack_int8(packed) * start).sum() / (reference * start).sum()
    assert abs(left.item() - 1) < 0.02


def test_rows_of_zeros_and_of_extremes() -> None:
    assert not pack_int8(torch.zeros(2, 64, 64)).any()
    assert not pack_int8(torch.full((2, 64, 64), 1e-38)).any()
    huge = numbers(2).clamp(-1, 1) * 1e37
    assert unpack_int8(pack_int8(huge)).isfinite().all()


INT8 = StateFormat.INT8
BITS = {"NaN": 0x7FC0, "NaN below zero": 0xFFC0, "NaN of all bits": 0xFFFF, "infinite": 0x7F80, "minus": 0xBF80}
"""The upper halves of such numbers in fp32."""


def test_invalid_states_are_recognised() -> None:
    packed = pack_int8(numbers(2))
    empty = torch.zeros(0, 2, HEAD_BYTES, dtype=torch.uint8)
    assert (
        not INT8.find_invalid(packed)
        and not INT8.find_invalid(empty)
        and not INT8.find_invalid(pack_int8(torch.zeros(1, 64, 64)))
    )
    for bits in BITS.values():
        wrong = packed.clone()
        wrong[1, CODES + 6 : CODES + 8] = torch.tensor([bits & 0xFF, bits >> 8], dtype=torch.uint8)
        assert INT8.find_invalid(wrong) == "NaN, infinite or negative scales (1, the first at 67)"
    for form in (StateFormat.FP32, StateFormat.FP16):
        for name, bits in BITS.items():
            state = form.pack(numbers(2))
            state[1, 0, 5] = torch.tensor(bits << 16, dtype=torch.int64).int().view(torch.float32)
            said = "" if name == "minus" else "NaN or infinite numbers (1, the first at 4101)"
            assert form.find_invalid(state) == said
    assert (
        find_invalid(torch.tensor([1.0, -3.0, torch.inf, torch.nan])) == "NaN or infinite numbers (2, the first at 2)"
    )


@pytest.mark.parametrize("bits", BITS.values(), ids=BITS)
def test_nan_and_infinity_are_not_lost(bits: int) -> None:
    """With any NaN bits; otherwise a row would continue unnoticed."""
    states = numbers(2)
    states.view(torch.int32)[1, 3, 40] = torch.tensor(bits << 16 | 0xFFFF, dtype=torch.int64).int()
    before = pack_int8(numbers(2, seed=3))
    for packed in (pack_int8(states), pack_int8(states, before)):
        odd = not bool(states[1, 3, 40].isfinite())
        assert bool(unpack_int8(packed)[1, 3].isnan().all()) == odd == bool(INT8.find_invalid(packed))
        assert unpack_int8(packed)[0].isfinite().all() and unpack_int8(packed)[1, 4:].isfinite().all()


@pytest.mark.parametrize("form", list(StateFormat))
@pytest.mark.parametrize("kernels", KERNELS)
def test_an_invalid_state_affects_only_its_row(weights: Weights, kernels: str, form: StateFormat) -> None:
    """In every format, logits are NaN and the state stays NaN. Samplers handle these logits."""
    model, alone = pipeline(weights, kernels, form.value), pipeline(weights, kernels, form.value)
    for made in (model, alone):
        made.forward(step_inputs([prompt(2, 5), prompt(3, 4)], [0, 0], [2, 3], []))
    (state,) = [stage.state for stage in model.stages]
    assert state is not None
    wkv = form.unpack(state.wkv[2])
    wkv[1, 0, 3, 4] = torch.nan
    state.wkv[2] = form.pack(wkv)
    for _ in range(2):
        logits = model.forward(step_inputs([[7], [8]], [2, 3], [2, 3], [0, 1]))
        reference = alone.forward(step_inputs([[7], [8]], [2, 3], [2, 3], [0, 1]))
        assert logits[0].isnan().all() and torch.equal(logits[1], reference[1])
    assert form.find_invalid(state.wkv[2]) and not form.find_invalid(state.wkv[3])


def test_bytes_of_a_slot() -> None:
    shape = ModelShape(32, 4096, 65536, 16384)
    fp16, int8 = (shape.slot_bytes(32, form, 2) for form in (StateFormat.FP16, StateFormat.INT8))
    assert fp16 - int8 == 32 * 64 * (2 * CODES - HEAD_BYTES)


@pytest.fixture(scope="module")
def weights() -> Weights:
    return weights_from(random_weights(LAYERS, WIDTH, 300, seed=7))


def pipeline(weights: Weights, kernels: str, form: str = "int8", stages: int = 1) -> Pipeline:
    made = Pipeline(weights, ("cpu",) * stages, "fp32", kernels, form)
    made.allocate_slots(SLOTS)
    return made


def state_of(model: Pipeline, slot: int) -> list[Tensor]:
    states = [stage.state for stage in model.stages if stage.state is not None]
    return [torch.cat([state.wkv[slot] for state in states]), torch.cat([state.shift[slot] for state in states])]


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(1, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("kernels", KERNELS)
def test_logits_are_close_to_fp32(weights: Weights, kernels: str) -> None:
    int8, fp32 = pipeline(weights, kernels), pipeline(weights, kernels, "fp32")
    for i, token in enumerate(prompt(1, 60)):
        found, reference = (model.forward(step_inputs([[token]], [2 if i else 0], [2], [0])) for model in (int8, fp32))
    assert 0 < (found - reference).norm() / reference.norm() < 0.03


def test_a_head_is_packed_alike_alone_and_in_a_batch() -> None:
    states, before = numbers(6, 4), pack_int8(numbers(6, 4, seed=2))
    together = pack_int8(states, before)
    assert torch.equal(together[3:4, 1:2], pack_int8(states[3:4, 1:2].clone(), before[3:4, 1:2]))


@pytest.mark.parametrize("kernels", KERNELS)
def test_rows_are_independent(weights: Weights, kernels: str) -> None:
    """Over two steps of one and several tokens: as alone, and other slots do not change."""
    prompts = [prompt(seed, length) for seed, length in enumerate((1, 9, 1, 23))]
    slots = list(range(3, 7))
    batch = pipeline(weights, kernels)
    batch.forward(step_inputs(prompts, [0] * 4, slots, []))
    before = [state_of(batch, slot) for slot in range(SLOTS)]
    together = batch.forward(step_inputs([[5], [6, 7], [8]], slots[:3], [3, 8, 5], [0, 1, 2]))
    for i, row in enumerate(([5], [6, 7], [8])):
        alone = pipeline(weights, kernels)
        alone.forward(step_inputs([prompts[i]], [0], [2], []))
        found, states = alone.forward(step_inputs([row], [2], [2], [0]))[0], state_of(batch, (3, 8, 5)[i])
        if kernels == "cpu":  # its products do not depend on the batch
            assert torch.equal(found, together[i])
            assert all(map(torch.equal, state_of(alone, 2), states))
        else:
            assert (found - together[i]).norm() < 0.02 * found.norm()
    for slot in (0, 2, 4, 6, 7):
        assert all(map(torch.equal, state_of(batch, slot), before[slot]))
    assert not state_of(batch, 0)[0].any()


@pytest.mark.parametrize("kernels", KERNELS)
def test_two_stages_equal_one(weights: Weights, kernels: str) -> None:
    one, two = pipeline(weights, kernels), pipeline(weights, kernels, stages=2)
    assert two.slot_bytes == one.slot_bytes
    for row, read in ((prompt(1, 12), 0), ([4], 2), ([9], 2)):
        inputs = step_inputs([row], [read], [2], [0])
        assert torch.equal(one.forward(inputs), two.forward(inputs))
    assert all(map(torch.equal, state_of(one, 2), state_of(two, 2)))
