"""A draft model's step in one launch, against plain torch in fp32. The CPU runs the kernel thread by thread."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from demo.random_weights import random_weights
from rwkv_batch.kernels.cuda import draft_step
from rwkv_batch.kernels.cuda.draft_step import DraftStep
from rwkv_batch.kernels.cuda.layer import prepare_layer
from rwkv_batch.kernels.cuda.library import DraftStepArgs
from rwkv_batch.kernels.naive import NaiveOps
from rwkv_batch.model.layer import Layer, layer_norm
from rwkv_batch.model.loader import LayerLoader, Precision
from rwkv_batch.model.rwkv7 import forward_layers
from rwkv_batch.model.state import ModelShape, StateArena, StateFormat
from rwkv_batch.model.step_inputs import step_inputs
from rwkv_batch.model.weights import Weights, weights_from
from test.model.emulated.library import call, emulation_of, needs_headers, send_launches_to

pytestmark = [pytest.mark.slow, needs_headers]
CPU, LAYERS, WIDTH, VOCAB, SLOTS, CTAS = torch.device("cpu"), 2, 256, 512, 20, 3

library = emulation_of("draft_step")
"""The kernel on the CPU."""


class Reference:
    """The model in fp32, kernel by kernel."""

    def __init__(self, weights: Weights) -> None:
        loader = LayerLoader(weights, Precision(CPU, torch.float32, torch.float32, StateFormat.FP32))
        self.layers: list[Layer] = [loader.layer(i) for i in range(LAYERS)]
        self.embedding = loader.embedding().fold(torch.float32).table
        self.head = loader.head()
        self.state = StateArena(SLOTS, LAYERS, weights.shape, CPU, StateFormat.FP32, torch.float32)

    def step(self, tokens: list[int], reads: list[int], writes: list[int]) -> Tensor:
        """Return logits [R, V]."""
        inputs = step_inputs([[token] for token in tokens], reads, writes, list(range(len(tokens))))
        x, _ = forward_layers(self.layers, self.embedding[inputs.tokens], None, self.state, inputs, NaiveOps())
        return self.head.linear(layer_norm(x, self.head.ln_out))


@pytest.mark.parametrize(("rows", "gate_rank"), [(1, 128), (3, 64), (8, 128)])
def test_a_step_is_that_of_plain_torch(
    rows: int, gate_rank: int, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps: given tokens, then the chosen ones; states, token shifts and choices. Other slots stay."""
    torch.manual_seed(rows)
    weights = weights_from(
        random_weights(LAYERS, WIDTH, VOCAB, seed=rows, ranks=(64, 48, 32, gate_rank), dtype=torch.float16)
    )
    reference = Reference(weights)
    precision = Precision(CPU, torch.float16, torch.float16, StateFormat.FP16)
    loader = LayerLoader(weights, precision)
    layers = [prepare_layer(loader.layer(i)) for i in range(LAYERS)]
    state = StateArena(SLOTS, LAYERS, weights.shape, CPU, StateFormat.FP16, torch.float16)
    state.wkv.copy_(torch.randn_like(state.wkv, dtype=torch.float32))
    state.shift.copy_(torch.randn_like(state.shift, dtype=torch.float32))
    reference.state.wkv.copy_(state.wkv), reference.state.shift.copy_(state.shift)
    send_launches_to(lambda name: library, monkeypatch, draft_step)
    library.emulation_set(CTAS, 227 << 10)
    head, table = loader.head(), loader.embedding().fold(torch.float16).table
    step = DraftStep(layers, table, head.ln_out, head.linear, state, CTAS)

    before = state.wkv.clone(), state.shift.clone()
    first = torch.randint(VOCAB, (rows,)).tolist()
    slots = torch.randperm(SLOTS)[: 2 * rows].tolist()
    lines = torch.zeros(3, 3, rows + 2, dtype=torch.int64)
    lines[0, :, :rows] = torch.tensor([slots[:rows], slots[rows:], first])
    lines[1, :, :rows] = torch.tensor([slots[rows:], slots[:rows], [-1] * rows])
    count, chosen = torch.zeros(1, dtype=torch.int64), torch.full((rows + 2,), -9)
    guesses = torch.full((3, rows + 2), -7)
    tokens = first
    for number in range(2):
        reads, writes = lines[number, :2, :rows].tolist()
        logits = reference.step(tokens, reads, writes)
        step.launch(rows, lines, count, chosen, guesses)
        tokens = chosen[:rows].tolist()
        assert count == number + 1 and guesses[number, :rows].tolist() == tokens
        best = logits.amax(-1)
        assert (best - logits[range(rows), tokens] < 0.02 * logits.std()).all()
        for ours, theirs in ((state.wkv, reference.state.wkv), (state.shift, reference.state.shift)):
            assert torch.allclose(ours[writes].float(), theirs[writes], rtol=0.02, atol=0.02)
    assert (chosen[rows:] == -9).all() and (guesses[:, rows:] == -7).all() and (guesses[2] == -7).all()
    others = [slot for slot in range(SLOTS) if slot not in slots]
    assert torch.equal(state.wkv[others], before[0][others]) and torch.equal(state.shift[others], before[1][others])


def test_a_gpu_with_more_ctas_than_tiles_is_refused(library: ctypes.CDLL) -> None:
    """Of width 256: a CTA without a tile of ffn.key would not update its residual stream."""
    args = DraftStepArgs(width=WIDTH, rows=1)
    library.emulation_set(WIDTH // 2 + 1, 227 << 10)
    with pytest.raises(AssertionError, match="refused"):
        call(library, "rwkv_draft_step", ctypes.byref(args))


def test_models_that_the_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_step, "has_hopper_gemm", lambda device: True)
    monkeypatch.setattr(draft_step, "is_mps_active", lambda: False)
    shape = ModelShape(12, 768, 65536, 3072, decay_rank=64, a_rank=64, v_rank=32, gate_rank=128)
    gpu = torch.device("cuda:0")
    assert draft_step.fits(shape, gpu) and not draft_step.fits(shape, CPU)
    for change in ({"width": 256, "ffn": 1024}, {"gate_rank": 160}, {"decay_rank": 96}, {"vocab": 50277}):
        assert not draft_step.fits(replace(shape, **change), gpu)
    monkeypatch.setattr(draft_step, "is_mps_active", lambda: True)
    assert not draft_step.fits(shape, gpu), "other processes may hold SMs"
