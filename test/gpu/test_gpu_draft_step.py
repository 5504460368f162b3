"""A draft model's step in one launch next to the forward of the same model."""

from __future__ import annotations

import pytest
import torch

from demo.random_weights import random_weights
from rwkv_batch.model.step_inputs import step_inputs
from rwkv_batch.model.weights import weights_from
from rwkv_batch.runner.draft_steps import make_draft_step
from rwkv_batch.runner.pipeline import Pipeline

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LAYERS, VOCAB, SLOTS, STEPS = (
    4,
    65536,
    40,
    5,
)  # layers: so that a launch does not begin with the buffer of the one before


@pytest.mark.parametrize("width", [768, 1024])
@torch.inference_mode()
def test_steps_choose_what_the_forward_does(width: int) -> None:
    """Chains of 5 steps of 1, 3 and 8 rows, in a graph: choices, states and token shifts."""
    device = torch.device("cuda:0")
    tensors = random_weights(LAYERS, width, VOCAB, seed=width, dtype=torch.float16)
    pipeline = Pipeline(weights_from(tensors), (str(device),))
    pipeline.allocate_slots(SLOTS)
    stage = pipeline.stages[0]
    step, state = make_draft_step(stage), stage.state
    if step is None:
        pytest.skip("needs a GPU of compute capability 9.0")
    assert state is not None
    for rows in (1, 3, 8):
        state.wkv.normal_().mul_(0.5)
        state.shift.normal_()
        slots = torch.randperm(SLOTS)[: 2 * rows].view(2, rows)
        table = torch.full((STEPS, 3, rows), -1, dtype=torch.int64)
        table[::2, :2], table[1::2, :2] = slots, slots.flip(0)
        table[0, 2] = torch.randint(VOCAB, (rows,))
        count = torch.zeros(1, dtype=torch.int64, device=device)
        chosen = torch.zeros(rows, dtype=torch.int64, device=device)
        guesses = torch.zeros(STEPS, rows, dtype=torch.int64, device=device)
        on_device = table.to(device)
        before = state.wkv.clone(), state.shift.clone()
        step.launch(rows, on_device, count, chosen, guesses)  # loads the library
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step.launch(rows, on_device, count, chosen, guesses)
        state.wkv.copy_(before[0])
        state.shift.copy_(before[1])
        count.zero_()
        for _ in range(STEPS):
            graph.replay()
        tokens = [*table[0, 2].unsqueeze(0).tolist(), *guesses.tolist()]
        ours = [[kept[slot].float() for kept in (state.wkv, state.shift)] for slot in slots.tolist()]
        assert count.item() == STEPS and chosen.tolist() == tokens[-1]
        state.wkv.copy_(before[0])
        state.shift.copy_(before[1])
        for number in range(STEPS):
            reads, writes = table[number, :2].tolist()
            logits = pipeline.forward(
                step_inputs([[token] for token in tokens[number]], reads, writes, list(range(rows)))
            )
            picked = logits.gather(1, guesses[number].unsqueeze(1)).squeeze(1)
            assert (logits.amax(-1) - picked < 0.02 * logits.std()).all()
        for side, kept in zip(slots.tolist(), ours, strict=True):
            for one, other in zip(kept, (state.wkv, state.shift), strict=True):
                assert torch.allclose(one, other[side].float(), rtol=0.02, atol=0.03)
