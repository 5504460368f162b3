"""Writes a training model as a compact file and reads it back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from demo.files import Bits, compress, decompress
from demo.model import HEAD, Rwkv7, Shape
from demo.vocabulary import Compact

UNUSED = ("blocks.0.att.v0", "blocks.0.att.v1", "blocks.0.att.v2")


def bits(model: Rwkv7) -> dict[str, Bits]:
    """Return the weights as bf16 bits under their standard names."""
    return {
        name: tensor.detach().cpu().to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16)
        for name, tensor in model.state_dict().items()
        if name not in UNUSED
    }


def save_compact(path: Path, model: Rwkv7, ids: NDArray[np.int64]) -> None:
    path.write_bytes(compress(bits(model), ids))


def load_compact(path: Path) -> tuple[Rwkv7, Compact]:
    """Read a compact file as a training model in fp32. Raises ValueError if the shapes do not fit."""
    tensors, ids = decompress(path.read_bytes())
    weights = {
        name: torch.from_numpy(t.astype(np.uint16).view(np.int16).copy()).view(torch.bfloat16).float()
        for name, t in tensors.items()
    }
    layers = sum(name.endswith(".ln1.weight") for name in weights)
    vocab, width = weights["emb.weight"].shape
    ranks = tuple(weights[f"blocks.1.att.{letter}1"].shape[1] for letter in "wavg")
    model = Rwkv7(Shape(vocab, layers, width, (ranks[0], ranks[1], ranks[2], ranks[3])))
    missing, unknown = model.load_state_dict(weights, strict=False)
    if unknown or set(missing) - set(UNUSED) or width % HEAD:
        raise ValueError(
            f"{path}: unknown tensors {unknown}, missing tensors {missing}; use a file that demo.train wrote"
        )
    return model, Compact(ids)
