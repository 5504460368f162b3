"""Files of a tuning: checkpoints, tuned states and LoRAs in RWKV-PEFT's forms, loss curves."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rwkv_batch.errors import StartupError
from rwkv_batch.tuning.model import TrainingModel

LORA_SCALE = 1
"""alpha / rank of the written adapters."""
_BLOCKS = "▁▂▃▄▅▆▇█"


def write_synced(path: Path, content: bytes | memoryview) -> None:
    """Write a file that is on disk before it gets its name. Raises OSError."""
    half = path.with_name(f".{path.name}.half")
    with half.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    half.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def saved(content: object) -> memoryview:
    """Return what `torch.save` writes."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getbuffer()


def load_checkpoint(path: Path, device: torch.device) -> dict[str, Any]:
    """Read a checkpoint. Raises StartupError if it is damaged."""
    try:
        found: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise StartupError(f"{path} cannot be read as a checkpoint ({error}); delete it to begin anew") from error
    return found


def _half(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.bfloat16).contiguous()


def write_results(model: TrainingModel, name: Path, is_full: bool) -> list[Path]:
    """Write what was tuned as `.pth` files in bf16; return their paths. Raises OSError.

    `NAME.state.pth` has `blocks.{i}.att.time_state` [H, 64 values, 64 keys]. `NAME.lora.pth` has `<weight>.lora_A`
    [rank, in] and `.lora_B` [out, rank] of scale 1. `NAME.pth` has all weights.
    """
    found: dict[str, dict[str, Tensor]] = {}
    if model.tunables.states:
        states = enumerate(model.tunables.states)
        found[".state.pth"] = {f"blocks.{i}.att.time_state": _half(state) for i, state in states}
    if model.tunables.pairs:
        pairs = found[".lora.pth"] = {}
        for weight, (a, b) in model.tunables.pairs.items():
            pairs |= {f"{weight}.lora_A": _half(a), f"{weight}.lora_B": _half(b)}
    if is_full:
        found[".pth"] = {weight: _half(tensor) for weight, tensor in model.weights.items()}
    paths = []
    for suffix, tensors in found.items():
        paths.append(name.with_name(name.name + suffix))
        write_synced(paths[-1], saved(tensors))
    return paths


def loss_table(losses: Sequence[float], evaluations: Sequence[tuple[int, float, float]]) -> str:
    """Return a CSV with a row per step: the losses, and the held-out figures where they were measured."""
    held = {step: f"{loss:.6f},{accuracy:.4f}" for step, loss, accuracy in evaluations}
    rows = [f"{step},{loss:.6f},{held.get(step, ',')}" for step, loss in enumerate(losses, 1)]
    return "\n".join(["step,train_loss,valid_loss,valid_token_accuracy", *rows, ""])


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Return a curve in one line: means of `width` parts, high to low."""
    size = max(1, -(-len(values) // width))
    means = [sum(part) / len(part) for start in range(0, len(values), size) if (part := values[start : start + size])]
    low, high = min(means, default=0.0), max(means, default=0.0)
    span = (high - low) or 1.0
    return "".join(_BLOCKS[round((mean - low) / span * (len(_BLOCKS) - 1))] for mean in means)


def loss_curve(losses: Sequence[float], evaluations: Sequence[tuple[int, float, float]]) -> str:
    """Return an SVG of the losses per step: training thin, held-out thick."""
    held = [(step, loss) for step, loss, _ in evaluations]
    values = [*losses, *(loss for _, loss in held)] or [0.0]
    low, high, steps = min(values), max(values), max(len(losses), 1)

    def points(entries: Sequence[tuple[int, float]]) -> str:
        span = (high - low) or 1.0
        return " ".join(f"{60 + 720 * step / steps:.1f},{20 + 340 * (high - y) / span:.1f}" for step, y in entries)

    lines = ((list(enumerate(losses, 1)), "#8ab", 1), (held, "#c40", 3))
    shapes = [
        f'<polyline points="{points(entries)}" fill="none" stroke="{colour}" stroke-width="{width}"/>'
        for entries, colour, width in lines
    ]
    labels = [f'<text x="4" y="{y}">{value:.3f}</text>' for y, value in ((24, high), (364, low))]
    labels.append(f'<text x="420" y="392">{len(losses)} steps; loss in nats, thick: held out</text>')
    opening = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 400" font-family="sans-serif" font-size="13">'
    return "\n".join([opening, '<rect width="800" height="400" fill="#fff"/>', *shapes, *labels, "</svg>", ""])
