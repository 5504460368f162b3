"""Initial weights of a demo model, and compact files of its weights."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from demo.files import compress, decompress
from demo.vocabulary import Compact
from rwkv_batch.model.state import ModelShape
from rwkv_batch.model.weights import WeightsError, expected_shapes, weights_from
from rwkv_batch.tuning.model import TrainingModel

RANKS = (32, 32, 16, 64)
"""of w, a, v and g"""
_MIX_POWERS = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}
_FILLED = (("v0", 1.0), ("k_a", 1.0), ("k_k", 0.85))
_SCALES = {"att.receptance": 0.5, "att.key": 0.1, "att.value": 0.5, "ffn.key": 0.5}


def demo_shape(vocab: int, layers: int = 6, width: int = 256, ranks: tuple[int, int, int, int] = RANKS) -> ModelShape:
    return ModelShape(layers, width, vocab, 4 * width, *ranks)


def initial_weights(shape: ModelShape) -> dict[str, Tensor]:
    """Return a new model's weights by name, fp32."""
    c = shape.width
    channel, ramp = torch.arange(c) / c, torch.arange(c) / (c - 1)
    found = {name: torch.zeros(size) for name, size in expected_shapes(shape).items()}
    for norm in (name for name, one in found.items() if name.endswith(".weight") and one.dim() == 1):
        found[norm].fill_(1)
    nn.init.normal_(found["emb.weight"], std=0.05)
    nn.init.normal_(found["head.weight"], std=0.5 * c**-0.5)
    for layer in range(shape.layers):
        block, att = f"blocks.{layer}", f"blocks.{layer}.att"
        depth, shallow = layer / max(shape.layers - 1, 1), 1 - layer / shape.layers
        found[f"{att}.ln_x.weight"].fill_(((1 + layer) / shape.layers) ** 0.7)
        found |= {f"{att}.x_{s}": 1 - channel ** (power * shallow) for s, power in _MIX_POWERS.items()}
        found[f"{block}.ffn.x_k"] = 1 - channel ** (shallow**4)
        found[f"{att}.w0"] = -5.5 + 5 * ramp ** (0.85 + depth**0.5)
        found |= {f"{att}.{name}": torch.full((c,), value) for name, value in _FILLED if layer or name != "v0"}
        for letter in "wavg" if layer else "wag":
            nn.init.orthogonal_(found[f"{att}.{letter}2"], gain=0.1)
        for name, scale in _SCALES.items():
            nn.init.uniform_(found[f"{block}.{name}.weight"], -scale * c**-0.5, scale * c**-0.5)
    return found


def training_model(
    weights: dict[str, Tensor], compact: Compact, shape: ModelShape, kind: type[TrainingModel] = TrainingModel
) -> TrainingModel:
    """Return the model that trains `weights`. The row of the unused ids counts once per id in the loss."""
    share = torch.zeros(compact.rows, device=weights["emb.weight"].device)
    share[compact.unused] = math.log(compact.multiplicity)
    return kind({name: one.requires_grad_() for name, one in weights.items()}, shape, head_bias=share)


def save_compact(path: Path, weights: dict[str, Tensor], ids: NDArray[np.int64]) -> None:
    halves = {name: tensor.detach().cpu().to(torch.bfloat16).contiguous() for name, tensor in weights.items()}
    bits = {name: tensor.view(torch.int16).numpy().view(np.uint16) for name, tensor in halves.items()}
    path.write_bytes(compress(bits, ids))


def load_compact(path: Path) -> tuple[dict[str, Tensor], Compact, ModelShape]:
    """Read a compact file's weights in fp32. Raises ValueError if the shapes do not fit."""
    tensors, ids = decompress(path.read_bytes())
    weights = {
        name: torch.from_numpy(t.astype(np.uint16).view(np.int16).copy()).view(torch.bfloat16).float()
        for name, t in tensors.items()
    }
    try:
        shape = weights_from(weights, path).shape
    except WeightsError as error:
        raise ValueError(f"{error}; use a file that demo.train wrote") from error
    return {name: t.flatten() if t.dim() == 3 else t for name, t in weights.items()}, Compact(ids), shape
