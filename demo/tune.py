"""Train tuned states and LoRA adapters: `python -m demo.tune chinese json french spanish --out DIR`.

A state is a `.pth` of `blocks.{i}.att.time_state` [heads, 64 values, 64 keys], the state before a document. An adapter
is a `.safetensors` of `<weight>.lora_A` [rank, in] and `.lora_B` [out, rank], added with scale 1: W + B A. The model's
own weights do not change.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from demo.corpus import tuning
from demo.corpus.documents import Document
from demo.engine_client import EngineClient, open_engine
from demo.export import load_compact
from demo.files import MODEL, ensure_model
from demo.model import HEAD, Rwkv7
from demo.packing import Batches
from demo.train import fit, loss_of
from demo.vocabulary import Compact

RANK = 16
TARGETS = ("att.receptance", "att.key", "att.value", "att.output", "ffn.key", "ffn.value")


@dataclass(frozen=True, slots=True)
class Tuning:
    """One tuning's training text, kind of weights and learning rate."""

    source: Callable[[Random], Document]
    is_state: bool
    peak: float


TUNINGS = {
    "chinese": Tuning(tuning.in_chinese, True, 0.1),
    "json": Tuning(tuning.in_json, True, 0.1),
    "french": Tuning(tuning.french, False, 4e-3),
    "spanish": Tuning(tuning.spanish, False, 4e-3),
}


class LowRank(nn.Module):
    """W [out, in] + B A"""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        out, inner = weight.shape
        self.a = nn.Parameter(torch.randn(RANK, inner, device=weight.device) * inner**-0.5)
        self.b = nn.Parameter(torch.zeros(out, RANK, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        """Return the adapted weight [out, in]."""
        return weight + self.b @ self.a


def adapted(model: Rwkv7) -> dict[str, LowRank]:
    """Add a low-rank product to every target; return them by weight name without `.weight`."""
    found: dict[str, LowRank] = {}
    for index, block in enumerate(model.blocks):
        for target in TARGETS:
            linear = block.get_submodule(target)
            found[f"blocks.{index}.{target}"] = low = LowRank(linear.get_parameter("weight"))
            parametrize.register_parametrization(linear, "weight", low)
    return found


def tune(name: str, model: Rwkv7, compact: Compact, args: argparse.Namespace) -> list[Tensor] | dict[str, LowRank]:
    """Train one of `TUNINGS`. Returns the states [heads, 64, 64] per layer, or the low-rank products."""
    chosen = TUNINGS[name]
    model.requires_grad_(False)
    states: list[Tensor] | None = None
    lows: dict[str, LowRank] = {}
    if chosen.is_state:
        shape = (model.shape.width // HEAD, HEAD, HEAD)
        device = model.emb.weight.device
        states = [torch.zeros(shape, device=device, requires_grad=True) for _ in range(model.shape.layers)]
    else:
        lows = adapted(model)
    parameters = states or [parameter for low in lows.values() for parameter in low.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=chosen.peak, betas=(0.9, 0.97), weight_decay=0.01)
    stream = Batches(args.seed, 0, compact, args.rows, args.time, chosen.source)

    def compute(*rows: Tensor) -> Tensor:
        return loss_of(lambda ids, begins: model(ids, begins, states), compact, *rows)

    fit(optimizer, stream, compute, args, chosen.peak, warm_steps=50)
    return states or lows


def score(name: str, client: EngineClient, count: int, seed: int) -> float:
    """Return a tuning's share of exact answers in `count` sampled documents."""
    rng = Random(f"tune/{name}/{seed}")
    scripts: list[list[tuple[str, str]]] = []
    while len(scripts) < count:
        if name in ("french", "spanish"):
            scripts.append([tuning.phrase(rng, name.capitalize())])
            continue
        document = TUNINGS[name].source(rng)
        segments = [segment.text for segment in document]
        scripts.append([(segments[start], segments[start + 1]) for start in range(0, len(segments), 3)])
    answers = client.converse([[prompt for prompt, _ in script] for script in scripts], 96)
    expected = [answer.strip() for script in scripts for _, answer in script]
    actual = [answer.strip() for given in answers for answer in given]
    return sum(one == other for one, other in zip(expected, actual, strict=True)) / len(expected)


def save(name: str, tuned: list[Tensor] | dict[str, LowRank], out: Path) -> Path:
    """Write the file of a state or an adapter; return its path."""
    if isinstance(tuned, list):
        path = out / f"{name}.pth"
        states = {f"blocks.{i}.att.time_state": one.detach().cpu().to(torch.bfloat16) for i, one in enumerate(tuned)}
        torch.save(states, path)
        return path
    path = out / f"{name}.safetensors"
    tensors = {}
    for weight, low in tuned.items():
        tensors[f"{weight}.lora_A"] = low.a.detach().cpu().to(torch.bfloat16).contiguous()
        tensors[f"{weight}.lora_B"] = low.b.detach().cpu().to(torch.bfloat16).contiguous()
    save_file(tensors, path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=TUNINGS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=MODEL, help="a compact file")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--minutes", type=float, default=2.0, help="time limit of each tuning")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--time", type=int, default=256)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--scored", type=int, default=200, help="documents to score")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    figures = {}
    for name in args.names:
        torch.manual_seed(args.seed)
        model, compact = load_compact(args.model)
        model = model.to(device)
        tuned = tune(name, model, compact, args)
        path = save(name, tuned, args.out)
        is_state = TUNINGS[name].is_state
        with open_engine(
            ensure_model(source=args.model),
            device=device.type,
            states=[f"{name}={path}"] if is_state else [],
            adapters=[] if is_state else [f"{path}:1"],
        ) as client:
            exact = score(name, EngineClient(client.engine, name if is_state else ""), args.scored, args.seed)
        figures[name] = {"exact": round(exact, 4), "bytes": path.stat().st_size}
        print(name, figures[name], flush=True)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
