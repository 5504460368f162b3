"""A stage's layers in C++ against plain torch on random ragged batches. Also the lack of a compiler."""

from __future__ import annotations

import ctypes
import gc
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from demo.random_weights import random_weights
from native.build import SHARED_HEADERS, BuildError
from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cpu import library as cpu_library
from rwkv_batch.kernels.cpu.memory import ALIGNMENT, BLOCK, HUGE_PAGE, MIN_BLOCK_BYTES, PackedMemory, allocate_plain
from rwkv_batch.kernels.cpu.ops import CpuOps
from rwkv_batch.kernels.naive import NaiveOps
from rwkv_batch.kernels.registry import choose_ops
from rwkv_batch.model.layer import Layer, Linear
from rwkv_batch.model.loader import LayerLoader, Precision
from rwkv_batch.model.rwkv7 import forward_layers
from rwkv_batch.model.state import ModelShape, StateArena, StateFormat
from rwkv_batch.model.step_inputs import CONTINUES, StepInputs, step_inputs
from rwkv_batch.model.weights import weights_from
from test.conftest import rest_slow
from test.model.test_model import needs_compiler

pytestmark = pytest.mark.usefixtures("two_threads")
CPU = torch.device("cpu")
WIDTH, SLOTS, LAYERS = 192, 16, 3
BATCHES = [
    # tokens per row, slots read, slots written
    ([1], [0], [2]),
    ([1, 1, 1], [2, 3, 0], [2, 3, 4]),
    ([5, 1, 33, 1, 2], [0, 3, 4, 5, 6], [2, 3, 7, 5, 9]),
    ([17, 1], [2, 2], [3, 4]),
    ([1] * 12, list(range(2, 14)), list(range(2, 14))),
    ([4, 2, 6, 1, 3], [2, CONTINUES, 5, CONTINUES, CONTINUES], [3, 4, 5, 6, 7]),
]
STAGES = [(0, 3), (0, 1), (1, 3)]
"""First and last layer; stages after the first need layer 0's values."""
FP32 = Precision(CPU, torch.float32, torch.float32, StateFormat.FP32)


def layers(stage: tuple[int, int], ops: NaiveOps) -> list[Layer]:
    tensors = random_weights(LAYERS, WIDTH, 256, seed=3, ranks=(20, 24, 12, 40))
    loader = LayerLoader(weights_from(tensors), FP32, getattr(ops, "make_linear", Linear))
    loaded = [loader.layer(i) for i in range(*stage)]
    return [ops.prepare_layer(layer) for layer in loaded] if isinstance(ops, CpuOps) else loaded


def random_inputs(batch: tuple[list[int], list[int], list[int]]) -> StepInputs:
    lengths, read, write = batch
    return step_inputs([[1] * n for n in lengths], read, write, [])


def normal(*size: int, seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def random_state(stage: tuple[int, int], wkv: StateFormat = StateFormat.FP32) -> StateArena:
    """Return random slots; slot 0 is zero."""
    shape = ModelShape(LAYERS, WIDTH, 256, 4 * WIDTH)
    state = StateArena(SLOTS, stage[1] - stage[0], shape, CPU, wkv, torch.float32)
    state.wkv[1:] = wkv.pack(normal(SLOTS - 1, stage[1] - stage[0], *shape.wkv, seed=6))
    state.shift[1:] = normal(*state.shift[1:].shape, seed=5)
    return state


def run(
    ops: NaiveOps,
    stage: tuple[int, int],
    x: Tensor,
    v_first: Tensor | None,
    inputs: StepInputs,
    form: StateFormat = StateFormat.FP32,
) -> list[Tensor]:
    """Return the outputs of the layers and the states after them."""
    state = random_state(stage, form)
    given = x.clone()
    if isinstance(ops, CpuOps):
        out, first = ops.run_layers(layers(stage, ops), given, v_first, state, inputs)
    else:
        out, first = forward_layers(layers(stage, ops), given, v_first, state, inputs, ops)
    assert first is not None and torch.equal(given, x)
    return [out, first, state.wkv, state.shift]


@needs_compiler
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("stage", STAGES)
def test_layers_equal_naive(batch: tuple[list[int], list[int], list[int]], stage: tuple[int, int]) -> None:
    inputs = random_inputs(batch)
    x = normal(len(inputs.tokens), WIDTH, seed=1) * 3 + 1
    v_first = normal(len(inputs.tokens), WIDTH, seed=7) if stage[0] else None
    expected, actual = run(NaiveOps(), stage, x, v_first, inputs), run(CpuOps(), stage, x, v_first, inputs)
    for naive, fast in zip(expected, actual, strict=True):
        assert (naive - fast).abs().max() < 2e-5 * max(1, naive.abs().max())
    others = [slot for slot in range(SLOTS) if slot not in inputs.write_slots.tolist()]
    assert 0 in others
    before = random_state(stage)
    assert torch.equal(actual[2][others], before.wkv[others]) and torch.equal(actual[3][others], before.shift[others])


@needs_compiler
def test_fp16_values_of_a_gpu_stage() -> None:
    """The previous stage may send fp16."""
    inputs, stage = random_inputs(BATCHES[0]), next(stage for stage in STAGES if stage[0])
    x, v_first = (normal(len(inputs.tokens), WIDTH, seed=seed).half() for seed in (1, 7))
    expected = run(CpuOps(), stage, x.float(), v_first.float(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(expected, run(CpuOps(), stage, x, v_first, inputs), strict=True))


@needs_compiler
@pytest.mark.parametrize("threads", rest_slow([5, 1, 2]))
def test_layers_are_bit_identical_for_any_number_of_threads(threads: int) -> None:
    inputs, x = random_inputs(BATCHES[2]), normal(42, WIDTH, seed=1)
    expected = run(CpuOps(), STAGES[0], x, None, inputs)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(20):
            actual = run(CpuOps(), STAGES[0], x, None, inputs)
            assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))
    finally:
        torch.set_num_threads(before)


@needs_compiler
@pytest.mark.parametrize(("form", "error"), [(StateFormat.FP16, 1e-3), (StateFormat.INT8, 0.05)])
@pytest.mark.parametrize("batch", BATCHES)
def test_layers_over_smaller_states_equal_naive(
    form: StateFormat, error: float, batch: tuple[list[int], list[int], list[int]]
) -> None:
    """Sums in another order round some numbers to their other neighbour."""
    inputs = random_inputs(batch)
    x = normal(len(inputs.tokens), WIDTH, seed=1) * 3 + 1
    expected, actual = (run(ops, STAGES[0], x, None, inputs, form) for ops in (NaiveOps(), CpuOps()))
    expected[2], actual[2] = form.unpack(expected[2]), form.unpack(actual[2])
    for naive, fast in zip(expected, actual, strict=True):
        assert (naive - fast).abs().max() < error * max(1, naive.abs().max())
    others = [slot for slot in range(SLOTS) if slot not in inputs.write_slots.tolist()]
    assert torch.equal(actual[2][others], form.unpack(random_state(STAGES[0], form).wkv)[others])


def test_a_row_that_continues_another() -> None:
    """As one row with the tokens of both; both write their slots."""
    x = normal(7, WIDTH, seed=1)
    whole, cut, first = (
        run(NaiveOps(), STAGES[0], x[: sum(lengths)], None, random_inputs((lengths, read, write)))
        for lengths, read, write in (([7], [2], [3]), ([4, 3], [2, CONTINUES], [4, 3]), ([4], [2], [4]))
    )
    assert torch.allclose(whole[0], cut[0], atol=1e-5)
    for i in (2, 3):
        assert torch.allclose(whole[i][3], cut[i][3], atol=1e-5)
        assert torch.allclose(first[i][4], cut[i][4], atol=1e-5)


@needs_compiler
@pytest.mark.parametrize(
    ("lengths", "read", "write"),
    [
        ([1, 1], [0, 2], [2, SLOTS]),
        ([1, 1], [CONTINUES, 2], [2, 3]),
        ([1, 1], [2, -2], [2, 3]),
        ([1, 2], [0, 0], [2, 3]),
        ([2, 0], [0, 0], [2, 3]),
    ],
)
def test_rows_that_do_not_fit_are_refused(lengths: list[int], read: list[int], write: list[int]) -> None:
    inputs, ops, state = random_inputs((lengths, read, write)), CpuOps(), random_state(STAGES[0])
    before = random_state(STAGES[0])
    with pytest.raises(IndexError, match="do not fit"):
        ops.run_layers(layers(STAGES[0], ops), normal(2, WIDTH, seed=1), None, state, inputs)
    assert torch.equal(state.wkv, before.wkv) and torch.equal(state.shift, before.shift)


@needs_compiler
def test_one_slot_per_row() -> None:
    inputs, ops = random_inputs(([1, 1], [0, 2], [2, 3])), CpuOps()
    inputs.write_slots = inputs.write_slots[:1]
    with pytest.raises(ValueError, match="2 rows, but 2 slots to read and 1 to write"):
        ops.run_layers(layers(STAGES[0], ops), normal(2, WIDTH, seed=1), None, random_state(STAGES[0]), inputs)


def test_without_a_compiler_naive_is_used_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(library: object) -> None:
        raise BuildError("cannot build rwkv_cpu: no C++ compiler (g++ is not on the PATH)")

    monkeypatch.setattr("native.build.load", fail)
    cpu_library.library.cache_clear()
    cpu_library.library_unavailable_reason.cache_clear()
    try:
        ops, refusals = choose_ops("auto", CPU)
        assert ops.name == "naive"
        assert "no C++ compiler" in refusals["cpu"]
        with pytest.raises(ValueError, match=r"no C\+\+ compiler"):
            choose_ops("cpu", CPU)
    finally:
        cpu_library.library.cache_clear()
        cpu_library.library_unavailable_reason.cache_clear()


def test_another_device_is_refused() -> None:
    assert "on a CPU" in str(CpuOps.unavailable_reason(torch.device("cuda")))


def test_activation_codes_match_the_header() -> None:
    header = (SHARED_HEADERS / "activation.h").read_text()
    numbers = {name: int(number) for name, number in re.findall(r"(\w+) = (\d+)", header)}
    assert numbers == {activation.name: activation.value for activation in Activation}


RESERVE = """
import ctypes, torch
from concurrent.futures import ThreadPoolExecutor
from test.model.test_cpu_kernels import CpuOps, layers, normal, random_state, step_inputs, WIDTH
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd",
                                                     "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
def used():
    info = libc.mallinfo2()
    return info.uordblks + info.hblkhd
ops, stage = CpuOps(), (0, 3)
made, state, x = layers(stage, ops), random_state(stage), normal(300, WIDTH, seed=1)
def run(*lengths):
    inputs = step_inputs([[1] * n for n in lengths], [0] * len(lengths), list(range(2, 2 + len(lengths))), [])
    ops.run_layers(made, x[: sum(lengths)], None, state, inputs)
    return used()
def grown(reserved):
    first = run(3)
    if reserved:
        ops.reserve(made, WIDTH, 300)
        first = used()
    return run(100, 200) - first
for reserved in (False, True):  # each thread has memory of its own
    with ThreadPoolExecutor(1) as thread:
        print(thread.submit(grown, reserved).result())
"""


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the heap of glibc 2.33 or later")
def test_reserved_memory_is_enough_for_the_largest_step() -> None:
    """The process grew by 5 MiB whenever a step was the largest so far, after 74 minutes in one run."""
    done = subprocess.run([sys.executable, "-c", RESERVE], capture_output=True, check=True)
    plain, reserved = map(int, done.stdout.split())
    assert plain > 1 << 20
    assert reserved < 1 << 16


SMAPS = Path("/proc/self/smaps")
HAS_FLAGS = Path("/sys/kernel/mm/transparent_hugepage").exists() and SMAPS.exists() and "VmFlags" in SMAPS.read_text()


def mapping_of(address: int) -> str | None:
    """Return the kernel's record of the mapping that has an address; None if there is none."""
    for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", SMAPS.read_text()):
        first, last = (int(end, 16) for end in part.split(" ", 1)[0].split("-"))
        if first <= address < last:
            return part
    return None


def test_allocations_are_zero_and_do_not_overlap() -> None:
    memory = PackedMemory()
    sizes = [
        MIN_BLOCK_BYTES,
        MIN_BLOCK_BYTES + 1,
        3,
        BLOCK - MIN_BLOCK_BYTES,
        2 * BLOCK + 5,
        MIN_BLOCK_BYTES,
        100,
        BLOCK,
    ]
    pieces = [memory.allocate(size) for size in sizes]
    assert [len(piece) for piece in pieces] == sizes
    for number, piece in enumerate(pieces, 1):
        assert piece.dtype == torch.uint8 and piece.data_ptr() % ALIGNMENT == 0 and not piece.any()
        piece.fill_(number)
    assert all((piece == number).all() for number, piece in enumerate(pieces, 1))
    assert pieces[1].data_ptr() - pieces[0].data_ptr() == MIN_BLOCK_BYTES, "they lie in one block, one behind the other"


@pytest.mark.skipif(not HAS_FLAGS, reason="this kernel has no huge pages, or does not say so")
def test_blocks_use_huge_pages_and_are_freed() -> None:
    memory = PackedMemory()
    first, second, small = (
        memory.allocate(MIN_BLOCK_BYTES),
        memory.allocate(BLOCK),
        memory.allocate(MIN_BLOCK_BYTES - 1),
    )
    address = first.data_ptr()
    assert address % HUGE_PAGE == 0 and second.data_ptr() % HUGE_PAGE == 0
    for piece, is_huge in ((first, True), (second, True), (small, False), (allocate_plain(BLOCK), False)):
        mapping = mapping_of(piece.data_ptr())
        assert mapping is not None and (" hg" in mapping.rpartition("VmFlags:")[2]) is is_huge
    before = mapping_of(address)
    del first
    gc.collect()
    assert before is not None and mapping_of(address) is None, "a block of which nothing is left"
