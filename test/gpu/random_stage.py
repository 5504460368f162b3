"""Layers with random weights on a GPU."""

from __future__ import annotations

from pathlib import Path

import torch

from demo.random_weights import random_weights
from rwkv_batch.model.loader import Precision
from rwkv_batch.model.state import ModelShape, StateFormat
from rwkv_batch.model.weights import Weights
from rwkv_batch.runner.pipeline import Stage

GPU = torch.device("cuda", 0)
WIDTH, VOCAB, RANKS = 1024, 512, (64, 64, 32, 128)


def random_stage(layers: int, slots: int) -> Stage:
    """Return a whole fp16 model with the GPU's kernels and `slots` states."""
    from rwkv_batch.kernels.cuda.ops import CudaOps

    tensors = random_weights(layers, WIDTH, VOCAB, seed=2, ranks=RANKS, first_v=False, device=GPU)
    weights = Weights(Path("random"), tensors, ModelShape(layers, WIDTH, VOCAB, 4 * WIDTH, *RANKS), "")
    half = torch.float16
    stage = Stage(weights, 0, layers, Precision(GPU, half, half, StateFormat.FP16), CudaOps())
    stage.allocate_slots(slots)
    return stage
