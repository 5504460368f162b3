"""Files of a tuning: checkpoints, tuned states and LoRAs in RWKV-PEFT's forms and PEFT's, tables of losses."""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
import torch
from torch import Tensor

from native.files import write_synced
from rwkv_batch.errors import StartupError
from rwkv_batch.model.adapters.files import ADAPTER_MODEL
from rwkv_batch.model.huggingface import huggingface_module
from rwkv_batch.models_folder import ADAPTER_CONFIG
from rwkv_batch.tuning.model import TrainingModel

LORA_SCALE = 1
"""alpha / rank of the written adapters."""


def saved(content: object) -> memoryview:
    """Return what `torch.save` writes."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getbuffer()


def load_checkpoint(path: Path, device: torch.device) -> dict[str, Any]:
    """Read a checkpoint. Raises StartupError if it is damaged."""
    try:
        found = torch.load(path, map_location=device, weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, struct.error, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise StartupError(f"{path} cannot be read as a checkpoint ({reason}); delete it to begin anew") from error
    if not isinstance(found, dict):
        raise StartupError(f"{path} is no checkpoint; delete it to begin anew")
    return found


def _half(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.bfloat16).contiguous()


def write_results(model: TrainingModel, name: Path, is_full: bool) -> list[Path]:
    """Write what was tuned as `.pth` files in bf16; return their paths. Raises OSError.

    `NAME.state.pth` has `blocks.{i}.att.time_state` [H, 64 values, 64 keys]. `NAME.lora.pth` has `<weight>.lora_A`
    [rank, in] and `.lora_B` [out, rank] of scale 1; `NAME.peft` is the same for PEFT. `NAME.pth` has all weights.
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
    if model.tunables.pairs:
        paths.append(_write_peft(found[".lora.pth"], name.with_name(f"{name.name}.peft")))
    return paths


def _write_peft(pairs: Mapping[str, Tensor], folder: Path) -> Path:
    """Write a LoRA as PEFT does, for a model of Hugging Face's form; return its folder. Raises OSError."""
    folder.mkdir(exist_ok=True)
    names = {name: huggingface_module(name.rpartition(".")[0]) for name in pairs}
    tensors = {f"base_model.model.{names[name]}.{name[-6:]}.weight": tensor for name, tensor in pairs.items()}
    rank = next(len(tensor) for name, tensor in pairs.items() if name.endswith("lora_A"))
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": None, "r": rank,
        "lora_alpha": LORA_SCALE * rank, "lora_dropout": 0.0, "bias": "none", "inference_mode": True,
        "target_modules": sorted({".".join(name.split(".")[3:]) for name in names.values()}),
    }  # fmt: skip
    write_synced(folder / f"{ADAPTER_MODEL}.safetensors", safetensors.torch.save(tensors))
    write_synced(folder / ADAPTER_CONFIG, msgspec.json.encode(config))
    return folder


def loss_table(losses: Sequence[float], evaluations: Sequence[tuple[int, float, float]]) -> str:
    """Return a CSV with a row per step: the losses, and the held-out figures where they were measured."""
    held = {step: f"{loss:.6f},{accuracy:.4f}" for step, loss, accuracy in evaluations}
    rows = [f"{step},{loss:.6f},{held.get(step, ',')}" for step, loss in enumerate(losses, 1)]
    return "\n".join(["step,train_loss,valid_loss,valid_token_accuracy", *rows, ""])
