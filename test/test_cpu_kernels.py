"""The C++ pieces of a layer against plain torch, on random ragged batches; and what happens without a compiler."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from demo.random_weights import random_weights
from native.build import BuildError
from rwkv_batch.batch import StepInputs, step_inputs
from rwkv_batch.kernels import cpu_library
from rwkv_batch.kernels.cpu import CpuOps
from rwkv_batch.kernels.naive import NaiveOps
from rwkv_batch.kernels.registry import choose_ops
from rwkv_batch.layer import Layer, Norm, Projections
from rwkv_batch.loader import LayerLoader, Precision
from rwkv_batch.weights import weights_from

needs_compiler = pytest.mark.skipif(cpu_library.build_problem() is not None, reason=str(cpu_library.build_problem()))
CPU = torch.device("cpu")
WIDTH, SLOTS = 192, 16
BATCHES = [
    # tokens per row, slots read, slots written
    ([1], [0], [2]),
    ([1, 1, 1], [2, 3, 0], [2, 3, 4]),
    ([5, 1, 33, 1, 2], [0, 3, 4, 5, 6], [2, 3, 7, 5, 9]),
    ([17, 1], [2, 2], [3, 4]),
    ([1] * 12, list(range(2, 14)), list(range(2, 14))),
]


def one_layer(index: int) -> Layer:
    tensors = random_weights(2, WIDTH, 256, seed=3, ranks=(20, 24, 12, 40))
    return LayerLoader(weights_from(tensors), Precision(CPU, torch.float32, torch.float32, torch.float32)).layer(index)


def random_inputs(batch: tuple[list[int], list[int], list[int]]) -> StepInputs:
    lengths, read, write = batch
    return step_inputs([[1] * n for n in lengths], read, write, [])


def normal(*size: int, seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def state(*size: int, seed: int) -> Tensor:
    """Slots of two layers, so that a layer's view is strided; slot 0 is zero."""
    arena = normal(SLOTS, 2, *size, seed=seed)
    arena[0] = 0
    return arena


def assert_only_written(after: Tensor, before: Tensor, inputs: StepInputs, layer: int) -> None:
    """Slots that no row writes, and the other layer, are as they were."""
    others = [slot for slot in range(SLOTS) if slot not in inputs.write_slots.tolist()]
    assert 0 in others
    assert torch.equal(after[others], before[others])
    assert torch.equal(after[:, 1 - layer], before[:, 1 - layer])


@needs_compiler
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("mixes", [1, 6])
@pytest.mark.parametrize("with_delta", [False, True])
def test_shift_mix_equals_naive(batch: tuple[list[int], list[int], list[int]], mixes: int, with_delta: bool) -> None:
    inputs = random_inputs(batch)
    tokens = len(inputs.tokens)
    x = normal(tokens, WIDTH, seed=1) * 3 + 1
    delta = normal(tokens, WIDTH, seed=2) if with_delta else None
    norm = Norm(normal(WIDTH, seed=3), normal(WIDTH, seed=4))
    mix, before = torch.rand(mixes, WIDTH), state(WIDTH, seed=5)
    results = []
    for ops in (NaiveOps(), CpuOps()):
        arena = before.clone()
        total, mixed = ops.shift_mix(x.clone(), delta, norm, mix, arena[:, 1], inputs)
        assert_only_written(arena, before, inputs, 1)
        results.append((total, mixed, arena))
    for naive, fast in zip(*results, strict=True):
        assert (naive - fast).abs().max() < 1e-5
    assert torch.equal(results[0][0], results[1][0])


def random_projections(tokens: int, gate: bool) -> Projections:
    parts = [normal(tokens, WIDTH, seed=20 + i) for i in range(7)]
    return Projections(*parts[:6], v_gate=parts[6] if gate else None)


@needs_compiler
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("index", [0, 1])
def test_time_mix_equals_naive(batch: tuple[list[int], list[int], list[int]], index: int) -> None:
    layer, inputs = one_layer(index), random_inputs(batch)
    tokens = len(inputs.tokens)
    before = state(WIDTH // 64, 64, 64, seed=6)
    v_first = normal(tokens, WIDTH, seed=7) if index else None
    results = []
    for ops in (NaiveOps(), CpuOps()):
        arena, p = before.clone(), random_projections(tokens, index == 1)
        y, first = ops.time_mix(layer, p, v_first, arena[:, index], inputs)
        assert_only_written(arena, before, inputs, index)
        results.append((y, first, arena))
    for naive, fast in zip(*results, strict=True):
        assert (naive - fast).abs().max() < 1e-5 * max(1, naive.abs().max())


@needs_compiler
def test_time_mix_is_bit_identical_in_any_company_and_chunking() -> None:
    layer, ops = one_layer(1), CpuOps()
    p, v_first = random_projections(40, True), normal(40, WIDTH, seed=7)
    arena = state(WIDTH // 64, 64, 64, seed=6)

    def part(start: int, stop: int) -> tuple[Projections, Tensor]:
        cut = [getattr(p, name)[start:stop] for name in ("r", "w", "k", "v", "a", "g")]
        assert p.v_gate is not None
        return Projections(*cut, v_gate=p.v_gate[start:stop]), v_first[start:stop]

    whole, _ = ops.time_mix(layer, p, v_first, arena[:, 0], random_inputs(([3, 36, 1], [2, 3, 4], [2, 3, 4])))
    other = state(WIDTH // 64, 64, 64, seed=6)
    pieces = []
    for start, stop in ((3, 4), (4, 20), (20, 39)):
        piece, first = part(start, stop)
        pieces.append(ops.time_mix(layer, piece, first, other[:, 0], random_inputs(([stop - start], [3], [3])))[0])
    assert torch.equal(torch.cat(pieces), whole[3:39])
    assert torch.equal(other[3, 0], arena[3, 0])


@needs_compiler
@pytest.mark.parametrize("tokens", [1, 40])
def test_project_and_channel_mix_equal_naive(tokens: int) -> None:
    tensors = random_weights(2, WIDTH, 256, seed=3, ranks=(20, 24, 12, 40))
    precision = Precision(CPU, torch.float32, torch.float32, torch.float32)
    naive, fast = one_layer(1), LayerLoader(weights_from(tensors), precision, CpuOps.make_linear).layer(1)
    mixed = normal(6, tokens, WIDTH, seed=8)
    wanted, got = NaiveOps().project(naive, mixed), CpuOps().project(fast, mixed)
    for name in ("r", "w", "k", "v", "a", "g", "v_gate"):
        assert (getattr(wanted, name) - getattr(got, name)).abs().max() < 1e-5, name
    assert (NaiveOps().channel_mix(naive, mixed[0]) - CpuOps().channel_mix(fast, mixed[0])).abs().max() < 5e-5


@needs_compiler
def test_fp16_states_take_the_plain_path() -> None:
    layer, inputs = one_layer(0), random_inputs(BATCHES[2])
    before = state(WIDTH // 64, 64, 64, seed=6).half()
    results = []
    for ops in (NaiveOps(), CpuOps()):
        arena = before.clone()
        y, _ = ops.time_mix(layer, random_projections(len(inputs.tokens), False), None, arena[:, 0], inputs)
        results.append((y, arena))
    assert all(torch.equal(naive, fast) for naive, fast in zip(*results, strict=True))


@needs_compiler
def test_a_state_strided_within_a_slot_is_refused() -> None:
    arena = state(WIDTH // 64, 64, 64, seed=6).transpose(-1, -2)
    with pytest.raises(ValueError, match="not contiguous in a slot"):
        CpuOps().time_mix(one_layer(0), random_projections(1, False), None, arena[:, 0], random_inputs(BATCHES[0]))


@needs_compiler
@pytest.mark.parametrize(
    ("lengths", "read", "write"),
    [([1, 1], [0, 2], [2, SLOTS]), ([1, 1], [-1, 2], [2, 3]), ([1, 2], [0, 0], [2, 3]), ([2, 0], [0, 0], [2, 3])],
)
def test_rows_that_do_not_fit_are_refused(lengths: list[int], read: list[int], write: list[int]) -> None:
    inputs, ops, layer = random_inputs((lengths, read, write)), CpuOps(), one_layer(0)
    shifts, wkv, x = state(WIDTH, seed=5), state(WIDTH // 64, 64, 64, seed=6), normal(2, WIDTH, seed=1)
    before = shifts.clone(), wkv.clone()
    with pytest.raises(IndexError, match="do not fit"):
        ops.shift_mix(x, None, layer.ln1, layer.att_mix, shifts[:, 0], inputs)
    with pytest.raises(IndexError, match="do not fit"):
        ops.time_mix(layer, random_projections(2, False), None, wkv[:, 0], inputs)
    assert torch.equal(shifts, before[0]) and torch.equal(wkv, before[1])


@needs_compiler
def test_as_many_slots_as_rows() -> None:
    inputs = random_inputs(([1, 1], [0, 2], [2, 3]))
    inputs.write_slots = inputs.write_slots[:1]
    with pytest.raises(ValueError, match="2 rows, but 2 slots to read and 1 to write"):
        CpuOps().shift_mix(
            normal(2, WIDTH, seed=1), None, one_layer(0).ln1, torch.rand(1, WIDTH), state(WIDTH, seed=5)[:, 0], inputs
        )


def test_without_a_compiler_the_reason_is_given_and_naive_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(library: object) -> None:
        raise BuildError("cannot build rwkv_cpu: no C++ compiler (g++ is not on the PATH)")

    monkeypatch.setattr("native.build.load", fail)
    cpu_library.library.cache_clear()
    cpu_library.build_problem.cache_clear()
    try:
        ops, refusals = choose_ops("auto", CPU)
        assert ops.name == "naive"
        assert "no C++ compiler" in refusals["cpu"]
        with pytest.raises(ValueError, match=r"no C\+\+ compiler"):
            choose_ops("cpu", CPU)
    finally:
        cpu_library.library.cache_clear()
        cpu_library.build_problem.cache_clear()


def test_another_device_is_refused() -> None:
    assert "on a CPU" in str(CpuOps.why_not(torch.device("cuda")))
