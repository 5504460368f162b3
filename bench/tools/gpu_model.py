"""A stage with random weights of a released shape on the GPU.

Its channel mix is as sparse as a trained model's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from demo.random_weights import random_weights
from rwkv_batch.kernels.registry import choose_ops, make_deterministic
from rwkv_batch.model.adapter_table import LayerAdapters
from rwkv_batch.model.layer import Layer
from rwkv_batch.model.loader import Precision
from rwkv_batch.model.ops import Mixed
from rwkv_batch.model.quant.formats import format_of
from rwkv_batch.model.quant.w8a8 import Codes
from rwkv_batch.model.state import ModelShape, StateFormat
from rwkv_batch.model.step_inputs import StepInputs
from rwkv_batch.model.weights import Weights
from rwkv_batch.runner.calibration import MeasuredInputs
from rwkv_batch.runner.pipeline import Stage

VOCAB = 65536
SIZES = {
    "0.1b": (12, 768, (64, 64, 32, 128)),
    "0.4b": (24, 1024, (64, 64, 32, 128)),
    "1.5b": (24, 2048, (96, 96, 64, 256)),
    "2.9b": (32, 2560, (96, 96, 64, 320)),
    "7.2b": (32, 4096, (128, 128, 96, 480)),
}
"""Name -> layers, width, ranks of w, a, v, g."""
QUIET = 1.4
"""Shift of relu's input below zero; 12 % of the outputs stay positive with these weights."""


def random_stage(
    size: str,
    device: torch.device,
    wkv_state: StateFormat,
    dtype: str = "fp16",
    layers: int | None = None,
    deterministic: bool = False,
) -> Stage:
    """Return a model on one device, without slots.

    layers: number of layers; None: all layers of its size.
    """
    weights = random_file(size, device, layers)
    ops, _ = choose_ops("cuda", device)
    storage = format_of(dtype)
    precision = Precision(device, torch.float16, torch.float16, wkv_state, storage)
    if deterministic:
        make_deterministic(ops, precision)
    return Stage(weights, 0, weights.shape.layers, precision, ops, largest_inputs=MeasuredInputs(weights, device))


def random_file(size: str, device: torch.device, layers: int | None = None) -> Weights:
    """Return a random model's tensors as an opened file has them: bf16 values, as released, in fp16 on the device."""
    all_layers, width, ranks = SIZES[size]
    layers = layers or all_layers
    tensors = random_weights(layers, width, VOCAB, ranks=ranks, first_v=False, dtype=torch.float16, device=device)
    tensors = {name: tensor.bfloat16().half() for name, tensor in tensors.items()}
    for i in range(layers):
        _push_down(tensors[f"blocks.{i}.ffn.key.weight"], tensors[f"blocks.{i}.ln2.bias"])
    return Weights(Path("random"), tensors, ModelShape(layers, width, VOCAB, 4 * width, *ranks), "")


def _push_down(key: Tensor, bias: Tensor) -> None:
    """Lower every output of `key` [out, in] by QUIET on average: its inputs contain the norm's bias [in]."""
    key -= QUIET * bias / bias.float().square().sum()


@torch.inference_mode()
def active_share(stage: Stage, batches: tuple[int, ...]) -> dict[int, float]:
    """Return batch size -> share of hidden channels nonzero in any row. The share is over all layers."""
    assert stage.state is not None
    shares: dict[int, float] = {}
    plain = stage.ops.channel_mix
    counts: list[float] = []

    def counting(layer: Layer, x: Mixed, adapters: LayerAdapters | None = None) -> Tensor:
        key: Any = layer.ffn_key
        hidden = key.multiply_codes(x) if isinstance(x, Codes) else key(x)
        counts.append((hidden > 0).any(0).float().mean().item())
        mixed: Tensor = plain(layer, x, adapters)
        return mixed

    stage.ops.channel_mix = counting  # type: ignore[method-assign]
    for batch in batches:
        counts.clear()
        device = stage.precision.device
        tokens = torch.randint(VOCAB, (batch,), device=device)
        if batch == 1:  # two equal rows: with one row a fused kernel computes ffn.key's output
            tokens = tokens.repeat(2)
        rows = len(tokens)
        slots = torch.arange(2, 2 + rows, device=device)
        inputs = StepInputs(tokens, torch.arange(rows + 1, device=device), slots, slots, slots[:0], 1)
        stage.forward(stage.embed(tokens), None, inputs)
        shares[batch] = sum(counts) / len(counts)
    stage.ops.channel_mix = plain  # type: ignore[method-assign]
    return shares


def write_random_file(size: str, path: Path, device: torch.device) -> Path:
    """Write a random model of a released shape as bf16 `.safetensors`. It is as sparse as `random_stage`'s."""
    from safetensors.torch import save_file

    tensors = random_file(size, device).tensors
    save_file({name: tensor.bfloat16().cpu() for name, tensor in tensors.items()}, path)
    return path
