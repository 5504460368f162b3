"""States on a CPU: the formats of `model/state.py`, and the same bits for any pieces of a text."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from demo.random_weights import random_weights
from native import build, machine
from rwkv_batch.kernels.cpu import library as cpu_library
from rwkv_batch.model.state import HEAD_SIZE, StateFormat, pack_int8, unpack_int8
from rwkv_batch.model.step_inputs import CONTINUES, step_inputs
from rwkv_batch.model.weights import weights_from
from rwkv_batch.runner.pipeline import Pipeline
from test.model.older_instructions import INSTRUCTIONS, flags_of
from test.model.test_model import needs_compiler

pytestmark = [
    needs_compiler,
    pytest.mark.usefixtures("two_threads"),
]
VOCAB, SLOTS, FIRST_SLOT = 256, 100, 2


def make_pipeline(form: StateFormat, width: int, layers: tuple[float, ...] = (4,)) -> Pipeline:
    weights = weights_from(random_weights(4, width, VOCAB, seed=4))
    pipeline = Pipeline(weights, ("cpu",) * len(layers), "fp32", "cpu", form, layers)
    pipeline.allocate_slots(SLOTS)
    return pipeline


def random_steps(rng: Random, length: int) -> list[list[int]]:
    """Return, for each step, the lengths of the rows that have the text's tokens. The later ones continue the first."""
    steps = []
    while length:
        size = min(length, rng.choice((1, 3, 16, rng.randint(1, length), length)))
        drafted = rng.choice((0, 0, min(size - 1, 8)))
        steps.append([size - drafted] + [1] * drafted)
        length -= size
    return steps


def read(pipeline: Pipeline, text: list[int], steps: list[list[int]], rng: Random, most_others: int) -> list[Tensor]:
    """Read a text from the zero state in these steps, among other rows and refused drafts.

    Returns its logits, and the states after it.
    """
    slot = done = 0
    for lengths in steps:
        others = [rng.choice((1, 1, 3, rng.randint(1, 30))) for _ in range(rng.choice((0, 1, most_others)))]
        refused = rng.choice((0, 3)) if most_others else 0
        free = rng.sample([one for one in range(FIRST_SLOT, SLOTS) if one != slot], SLOTS - FIRST_SLOT - 1)
        first = rng.randint(0, len(others))
        rows = [[rng.randrange(VOCAB) for _ in range(length)] for length in others]
        reads = [rng.choice((0, slot)) for _ in others]
        own = []
        for length in lengths:
            own.append(text[done : done + length])
            done += length
        rows[first:first] = [*own, *([rng.randrange(VOCAB)] for _ in range(refused))]
        reads[first:first] = [slot] + [CONTINUES] * (len(own) + refused - 1)
        last = first + len(own) - 1
        inputs = step_inputs(rows, reads, free[: len(rows)], [last])
        logits, slot = pipeline.forward(inputs), free[last]
    states = [state for stage in pipeline.stages if (state := stage.state) is not None]
    return [logits.clone(), *(part[slot].clone() for state in states for part in (state.wkv, state.shift))]


def check_pieces(pipeline: Pipeline, texts: int) -> None:
    for case in range(texts):
        rng = Random(case)
        text = [rng.randrange(VOCAB) for _ in range(rng.choice((rng.randint(2, 8), rng.randint(9, 60))))]
        alone = read(pipeline, text, [[1]] * len(text), rng, 0)
        for steps in ([[len(text)]], *(random_steps(rng, len(text)) for _ in range(3))):
            found = read(pipeline, text, steps, rng, 25)
            assert all(map(torch.equal, found, alone)), (case, steps)


@pytest.mark.parametrize("form", StateFormat)
@pytest.mark.parametrize(("width", "layers"), [(64, (4,)), (192, (4,)), (64, (1.5, 1, 1.5))])
def test_pieces_of_a_text_leave_the_same_bits(form: StateFormat, width: int, layers: tuple[float, ...]) -> None:
    """Also in stages that begin and end within a layer."""
    check_pieces(make_pipeline(form, width, layers), 12)


@pytest.mark.slow
@pytest.mark.parametrize("instructions", INSTRUCTIONS, indirect=True)
@pytest.mark.parametrize("form", StateFormat)
def test_pieces_leave_the_same_bits_with_other_instructions(instructions: str, form: StateFormat) -> None:
    check_pieces(make_pipeline(form, 128), 8)


@pytest.mark.parametrize("instructions", ["native", *INSTRUCTIONS])
def test_formats_round_as_they_are_defined(tmp_path: Path, instructions: str) -> None:
    """Bit for bit: each fp16 number with products that round up, down and to even; int8 with kept and new scales."""
    flags = (build.NATIVE,) if instructions == "native" else flags_of(instructions)
    source, built = Path(__file__).with_name("state_decay.cpp"), tmp_path / "state_decay.so"
    includes = (*build.INCLUDES, f"-I{cpu_library.SOURCES}")
    subprocess.run([machine.cxx(), *build.CPP_FLAGS, *flags, *includes, "-shared", source, "-o", built], check=True)
    library = ctypes.CDLL(str(built))

    def decayed(name: str, head: Tensor, decay: float) -> Tensor:
        after = torch.empty_like(head)
        getattr(library, name)(
            ctypes.c_void_p(head.data_ptr()), ctypes.c_void_p(after.data_ptr()), ctypes.c_float(decay)
        )
        return after

    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    halves = halves[halves.isfinite() & ~(halves.signbit() & (halves == 0))]  # -0 + 0 is 0
    halves = torch.cat([halves, halves.new_zeros(-len(halves) % HEAD_SIZE**2)]).view(-1, HEAD_SIZE, HEAD_SIZE)
    for decay in (1.0, 0.999, 0.75, 0.5, 1.5, 2.0**-9, 3.0 * 2**-11):
        for head in halves:
            assert torch.equal(decayed("decay_fp16", head, decay), (head.float() * decay).half())

    generator = torch.Generator().manual_seed(1)
    sizes = torch.logspace(-40, 3, HEAD_SIZE).unsqueeze(-1)
    stored = pack_int8(torch.randn(HEAD_SIZE, HEAD_SIZE, generator=generator) * sizes)
    for decay in (1.0, 0.999, 0.97, 1.02, 0.5, 1.0):
        expected = pack_int8(unpack_int8(stored) * torch.tensor(decay), stored)
        assert torch.equal(decayed("decay_int8", stored, decay), expected)
        assert decay != 1 or torch.equal(expected, stored)
        stored = expected
