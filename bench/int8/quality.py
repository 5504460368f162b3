"""KL of integer products against fp32, on a random 7.2B model.

Measures with and without planted outlier channels.

    python -m bench.int8.quality --size 7.2b --tokens 256 --out OUT/int8-quality.json

Every product of the layers and the head is computed in fp32 from rounded inputs and weights. So the figures show the
rounding of a definition, not of a kernel. The definition is rwkv_batch/model/quant/w8a8.py. Outliers: eight channels
per norm are scaled. The last line is JSON. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.tools.gpu_model import random_file
from rwkv_batch.kernels.naive import NaiveOps
from rwkv_batch.model.loader import Precision
from rwkv_batch.model.state import StateFormat
from rwkv_batch.model.step_inputs import StepInputs
from rwkv_batch.runner.pipeline import Stage

LARGE = 128
Linear = Callable[[Tensor], Tensor]
MATRICES = ("receptance", "key", "value", "output", "ffn_key", "ffn_value")
U8 = "ffn_value"


def steps(v: Tensor, largest: float, segments: int, ratios: int = 0) -> Tensor:
    """Step [R, K] of each value: one scale per row and segment. `ratios`: segment 1's scale in 16ths, at most so many."""
    if segments == 1:
        return (v.abs().amax(1, True) / largest).clamp(min=1e-12).expand_as(v)
    large, rest = v[:, :LARGE].abs().amax(1, True), v[:, LARGE:].abs().amax(1, True)
    if ratios:
        rest = torch.maximum(rest, large * 16 / ratios)
        large = rest * (large / rest.clamp(min=1e-30) * 16).ceil().clamp(16, ratios) / 16
    step = torch.empty_like(v)
    step[:, :LARGE], step[:, LARGE:] = large / largest, rest / largest
    return step.clamp(min=1e-12)


def groups(v: Tensor, largest: float, size: int) -> Tensor:
    """Step [R, K] with one scale per row and `size` inputs."""
    tops = v.view(len(v), -1, size).abs().amax(2, True)
    return (tops / largest).clamp(min=1e-12).expand(-1, -1, size).reshape(v.shape)


class IntegerLinear:
    """A product with rounded inputs and weights."""

    def __init__(self, weight: Tensor, x_max: Tensor, x_row_max: tuple[float, float], way: dict[str, Any]) -> None:
        """weight [N, K] fp32; x_max [K] and x_row_max (segments): largest calibrated inputs, before smoothing."""
        self.way, self.unsigned = way, way["unsigned"]
        s = torch.ones_like(x_max)
        if way["alpha"] is not None and (way["value_factor"] or not self.unsigned):
            s = x_max.clamp(min=1e-5).pow(way["alpha"]) / weight.abs().amax(0).clamp(min=1e-5).pow(1 - way["alpha"])
        order = torch.sort(x_max if way["order"] == "inputs" else x_max / s, descending=True, stable=True).indices
        self.factors, self.order = (1 / s)[order], order
        w = (weight * s)[:, order]
        step = groups(w, 127, 128) if way["groups"] else steps(w, 127, way["segments"], 256 if way["ratios"] else 0)
        self.weight = (w / step).round().clamp(-127, 127) * step
        tops = (x_max / s)[order]
        self.static = (tops[:LARGE].max() * way["margin"], tops[LARGE:].max() * way["margin"])
        self.saturated = 0

    def __call__(self, x: Tensor) -> Tensor:
        v = x.float()[:, self.order] * self.factors
        largest = 255.0 if self.unsigned else 127.0
        low = 0.0 if self.unsigned else -128.0
        if self.unsigned and self.way["static"]:
            step = torch.empty_like(v)
            step[:, :LARGE], step[:, LARGE:] = self.static[0] / largest, self.static[1] / largest
            self.saturated += int((v / step > largest + 0.5).sum())
        elif self.way["groups"]:
            step = groups(v, largest, 128)
        elif self.unsigned and self.way["tiles"]:
            step = groups(v, largest, self.way["tiles"])
        else:
            step = steps(v, largest, self.way["segments"], (255 if self.unsigned else 511) if self.way["ratios"] else 0)
        codes = (v / step).round().clamp(low, largest)
        if self.way["parts"] == 2:
            codes = codes + ((v / step - codes) * 254).round() / 254
        return ((codes * step) @ self.weight.T).half().float()

    def to_fp32(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self(x)


class Recorded:
    """A product that records its largest inputs per channel."""

    def __init__(self, plain: Any) -> None:
        self.plain, self.x_max = plain, torch.zeros(plain.weight.shape[1], device=plain.weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        self.x_max = torch.maximum(self.x_max, x.float().abs().amax(0))
        return self.plain(x)

    def to_fp32(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self(x)


def each_product(stage: Stage, made: Callable[[str, Any], Any]) -> None:
    """Replaces every product: `made` gets its name and the present one."""
    for i, layer in enumerate(stage.layers):
        for name in MATRICES:
            setattr(layer, name, made(f"{i}.{name}", getattr(layer, name)))
    stage.head.linear = made("head", stage.head.linear)


@torch.inference_mode()
def logits(stage: Stage, texts: Tensor) -> Tensor:
    """fp32 [B * T, V] after every token of texts [B, T]."""
    device, (rows, length) = texts.device, texts.shape
    ends = torch.arange(rows + 1, device=device) * length
    slots = torch.arange(rows, device=device) + 2
    tokens = torch.arange(rows * length, device=device)
    inputs = StepInputs(texts.flatten(), ends, torch.zeros_like(slots), slots, tokens, length)
    x, _ = stage.forward(stage.embed(inputs.tokens), None, inputs)
    return stage.logits(x, inputs)


def kl(reference: Tensor, actual: Tensor) -> float:
    """Mean KL of next-token distributions, nats."""
    total = 0.0
    for a, b in zip(reference.split(64), actual.split(64), strict=True):
        p, q = a.log_softmax(-1), b.log_softmax(-1)
        total += (p.exp() * (p - q)).sum().item()
    return total / len(reference)


BASE = {
    "segments": 2,
    "ratios": True,
    "alpha": 0.5,
    "parts": 1,
    "static": False,
    "margin": 1.0,
    "tiles": 0,
    "groups": False,
    "order": "inputs",
    "value_factor": True,
}
WAYS: dict[str, dict[str, Any]] = {
    "int8 weights only": {"weights_only": True},
    "one scale, no factor": {"segments": 1, "ratios": False, "alpha": None},
    "one scale, factor": {"segments": 1, "ratios": False},
    "two free scales": {"ratios": False},
    "ratios": {},
    "ratios, no factor": {"alpha": None},
    "ratios, alpha 0.35": {"alpha": 0.35},
    "ratios, alpha 0.65": {"alpha": 0.65},
    "ratios, largest after the factor": {"order": "smoothed"},
    "ratios, no factor for value": {"value_factor": False},
    "ratios, no factor for value, static": {"value_factor": False, "static": True, "margin": 1.2},
    "ratios, static value": {"static": True},
    "ratios, static value, margin 1.5": {"static": True, "margin": 1.5},
    "ratios, value by 128": {"tiles": 128},
    "ratios, value by 1024": {"tiles": 1024},
    "groups of 128": {"groups": True, "ratios": False},
    "two parts": {"parts": 2},
}


def main() -> None:
    """Prints one line per way and number of outliers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="7.2b")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--outliers", type=float, nargs="*", default=[1.0, 20.0, 100.0])
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("--out", type=Path, default=Path("int8-quality.json"))
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device(args.device)
    lines: list[dict[str, Any]] = []
    for times in args.outliers:
        weights = random_file(args.size, device)
        chosen = torch.Generator(device).manual_seed(7)
        for name, tensor in weights.tensors.items():
            if (
                name.startswith("blocks.")
                and ".ln" in name
                and ".ln0." not in name
                and "ln_x" not in name
                and name.endswith("weight")
            ):
                channels = torch.randperm(len(tensor), generator=chosen, device=device)[:8]
                tensor[channels] *= times
                weights.tensors[name.replace("weight", "bias")][channels] *= times
        stage = Stage(
            weights,
            0,
            weights.shape.layers,
            Precision(device, torch.float32, torch.float32, StateFormat.FP32),
            NaiveOps(),
        )
        del weights
        stage.allocate_slots(4)
        plain: dict[str, Any] = {}
        each_product(stage, lambda name, linear: plain.setdefault(name, linear))
        texts = torch.randint(1, 65000, (2, args.tokens), generator=chosen, device=device)
        held_out = torch.randint(1, 65000, (2, args.tokens), generator=chosen, device=device)
        each_product(stage, lambda name, _: Recorded(plain[name]))
        logits(stage, texts)
        tops: dict[str, Tensor] = {}
        each_product(stage, lambda name, now: (tops.setdefault(name, now.x_max), plain[name])[1])
        reference = logits(stage, held_out)
        for label in args.ways:
            way = {**BASE, **WAYS[label]}
            made: dict[str, IntegerLinear] = {}

            def rounded(name: str, _: Any, way: dict[str, Any] = way, made: dict[str, IntegerLinear] = made) -> Any:
                linear = plain[name]
                if way.get("weights_only"):
                    w = linear.weight
                    step = (w.view(len(w), -1, 128).abs().amax(2, True) / 127).clamp(min=1e-12)
                    value = ((w.view(len(w), -1, 128) / step).round() * step).view_as(w)
                    return type(linear)(value)
                is_u8 = name.endswith(U8)
                made[name] = IntegerLinear(linear.weight, tops[name], (0, 0), {**way, "unsigned": is_u8})
                return made[name]

            each_product(stage, rounded)
            actual = logits(stage, held_out)
            each_product(stage, lambda name, _: plain[name])
            line = {
                "outliers": times,
                "way": label,
                "kl": kl(reference, actual),
                "saturated": sum(one.saturated for one in made.values()),
            }
            lines.append(line)
            print(json.dumps(line), flush=True)
            del actual, made
            args.out.write_text(json.dumps(lines, indent=1))
        del stage, plain, reference
        if device.type == "cuda":
            torch.cuda.empty_cache()
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    result = {
        "program": "bench.int8.quality",
        "size": args.size,
        "gpu": gpu,
        "torch": torch.__version__,
        "commit": commit,
        "lines": lines,
    }
    args.out.write_text(json.dumps(result, indent=1))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
