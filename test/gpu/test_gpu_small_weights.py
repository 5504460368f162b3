"""Whole steps with quantised weights of several widths. The row counts are those where kernels change."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from demo.random_weights import random_weights
from rwkv_batch.kernels.cuda.hopper_gemm import has_hopper_gemm, prepare_hopper_gemm
from rwkv_batch.kernels.naive import NaiveOps
from rwkv_batch.model.loader import Precision
from rwkv_batch.model.quant.formats import Format
from rwkv_batch.model.state import ModelShape, StateFormat
from rwkv_batch.model.step_inputs import StepInputs, step_inputs
from rwkv_batch.model.weights import Weights
from rwkv_batch.runner.calibration import MeasuredInputs
from rwkv_batch.runner.pipeline import Stage
from test.gpu.test_gpu_forward import poisoned_memory  # noqa: F401  # for every test here too

GPU = torch.device("cuda", 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
LAYERS, VOCAB = 2, 512
SIZES = {
    "0.1B": (768, (64, 64, 32, 128), 3072),
    "1.5B": (2048, (96, 96, 64, 256), 8192),
    "2.9B": (2560, (96, 96, 64, 320), 10240),
    "13.3B": (4096, (192, 192, 128, 384), 16384),
    "ffn of 3.5 widths": (1024, (64, 64, 32, 128), 3584),
}
"""Width, ranks, width of the channel mix."""
ROWS = (
    *(1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 80, 81, 96, 112, 113, 128, 129, 132, 133),
    *(240, 256, 257, 320, 321, 512, 513, 640, 641),
)
MOST = ROWS[-1]
FEW = 64
"""Row counts whose inputs are not quantised."""
SPARSE = 8
"""Row counts whose sums depend on the inputs of ffn.value that are zero in all rows."""


class Pair(NamedTuple):
    """The same weights with the CUDA kernels and with plain torch."""

    fast: Stage
    true: Stage


def weights_of(size: str) -> Weights:
    width, ranks, ffn = SIZES[size]
    tensors = random_weights(LAYERS, width, VOCAB, seed=3, ranks=ranks, first_v=False, device=GPU)
    for i in range(LAYERS):
        key, value = f"blocks.{i}.ffn.key.weight", f"blocks.{i}.ffn.value.weight"
        tensors[key], tensors[value] = tensors[key][:ffn].contiguous(), tensors[value][:, :ffn].contiguous()
    return Weights(Path("random"), tensors, ModelShape(LAYERS, width, VOCAB, ffn, *ranks), "")


CASES = [*((size, format_, 8) for size in SIZES for format_ in Format), ("2.9B", Format.W8A8, 16)]


@pytest.fixture(scope="module", params=CASES, ids=lambda param: " ".join(map(str, param)))
def pair(request: pytest.FixtureRequest) -> Pair:
    from rwkv_batch.kernels.cuda.ops import CudaOps

    size, format_, bits = request.param
    weights, half, full = weights_of(size), torch.float16, torch.float32
    largest = MeasuredInputs(weights, GPU)
    fast_precision = Precision(GPU, half, half, StateFormat.FP16, format_, bits)
    true_precision = Precision(GPU, full, full, StateFormat.FP32, format_, bits)
    made = Pair(
        Stage(weights, 0, LAYERS, fast_precision, CudaOps(), largest_inputs=largest),
        Stage(weights, 0, LAYERS, true_precision, NaiveOps(), largest_inputs=largest),
    )
    generator = torch.Generator(GPU).manual_seed(1)
    for stage in made:
        stage.allocate_slots(2 + 2 * MOST)
    fast, reference = (stage.state for stage in made)
    assert fast is not None and reference is not None
    for to, like in ((fast.wkv, reference.wkv), (fast.shift, reference.shift)):
        for layer in range(LAYERS):
            read = to[2 : 2 + MOST, layer]
            read.copy_(torch.randn(read.shape, device=GPU, generator=generator) * 0.3)
            like[2 : 2 + MOST, layer] = read.float()
    return made


def step(rows: int, seed: int = 0) -> StepInputs:
    """Return a decode step; each row reads one slot and writes another."""
    tokens = torch.randint(VOCAB, (rows,), generator=torch.Generator().manual_seed(seed)).tolist()
    slots = list(range(2, 2 + rows))
    return step_inputs([[token] for token in tokens], slots, [slot + MOST for slot in slots], list(range(rows))).to(GPU)


class Left(NamedTuple):
    """Return a step's logits and the states that it writes, by row."""

    logits: Tensor
    wkv: Tensor
    shift: Tensor


@torch.inference_mode()
def forward(stage: Stage, inputs: StepInputs) -> Tensor:
    x, _ = stage.forward(stage.embed(inputs.tokens), None, inputs)
    return stage.logits(x, inputs)


def ran(stage: Stage, inputs: StepInputs) -> Left:
    wipe(stage)
    return left_by(stage, forward(stage, inputs))


def wipe(stage: Stage) -> None:
    assert stage.state is not None
    stage.state.wkv[2 + MOST :] = torch.nan
    stage.state.shift[2 + MOST :] = torch.nan


def left_by(stage: Stage, logits: Tensor) -> Left:
    assert stage.state is not None
    written = slice(2 + MOST, 2 + MOST + len(logits))
    return Left(logits.clone(), stage.state.wkv[written].clone(), stage.state.shift[written].clone())


def is_same(one: Left, other: Left, kept: slice = slice(None)) -> bool:
    return all(torch.equal(a[kept], b[kept]) for a, b in zip(one, other, strict=True))


def worst(actual: Left, reference: Left) -> dict[str, float]:
    """Return the largest relative error of a row, for logits and states."""
    errors = {}
    for name, a, b in zip(Left._fields, actual, reference, strict=True):
        a, b = a.float().flatten(1), b.float().flatten(1)
        errors[name] = float(((a - b).norm(dim=1) / b.norm(dim=1)).nan_to_num(torch.inf).max())
    return errors


def test_steps_of_any_number_of_rows(pair: Pair) -> None:
    """Near plain torch; the same bits in a second run and with other rows."""
    faults = []
    for rows in ROWS:
        inputs = step(rows)
        actual, reference = ran(pair.fast, inputs), ran(pair.true, inputs)
        rounded = rows > FEW and pair.fast.precision.storage is Format.FP8
        errors = worst(actual, reference)
        if max(errors.values()) > (0.2 if rounded else 0.03):
            faults.append(f"{rows} rows: {errors}")
        if not all(is_same(ran(pair.fast, inputs), actual) for _ in range(3)):
            faults.append(f"{rows} rows: other bits when run again")
        if rows > SPARSE:
            others = step(rows, seed=1)
            others.tokens[::3] = inputs.tokens[::3]
            if not is_same(ran(pair.fast, others), actual, slice(None, None, 3)):
                faults.append(f"{rows} rows: a row has other bits with other rows")
    assert not faults
    assert not has_hopper_gemm(GPU) or not prepare_hopper_gemm(GPU).counters.any()


def test_graphs_between_steps_of_other_shapes(pair: Pair) -> None:
    """Graphs share work space and counters with the steps between them."""
    sizes, graphs = (1, 4, 8, 32, 96), []
    for rows in sizes:
        inputs = step(rows)
        expected = ran(pair.fast, inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = forward(pair.fast, inputs)
        graphs.append((graph, inputs, logits, expected))  # the graph reads these inputs where they are
    for turn, between in enumerate((1, 641, 9, 64, 3, 257, 33, 128)):
        graph, _, logits, expected = graphs[turn % len(sizes)]
        inputs = step(between)
        eager = ran(pair.fast, inputs)
        wipe(pair.fast)
        graph.replay()
        assert is_same(left_by(pair.fast, logits), expected), (
            f"graph of {sizes[turn % len(sizes)]} behind {between} rows"
        )
        assert is_same(ran(pair.fast, inputs), eager), f"{between} rows behind a graph"
