"""Train the demo's tuned states and adapters: `python -m demo.tune chinese json french spanish --out DIR`.

A state is a `.pth` of `blocks.{i}.att.time_state` [heads, 64 values, 64 keys] that documents begin with; an adapter is a
`.safetensors` of `<weight>.lora_A` [rank, in] and `.lora_B` [out, rank] to be added with scale 1 (W + B A). The model
itself stays as it is.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader
from tqdm import tqdm

from demo.corpus import manners
from demo.corpus.document import Document
from demo.export import load_compact
from demo.files import MODEL
from demo.model import HEAD, Rwkv7, State
from demo.packing import Batches
from demo.talker import TorchTalker
from demo.train import loss_of, rate
from demo.vocabulary import Compact

RANK = 16
TARGETS = ("att.receptance", "att.key", "att.value", "att.output", "ffn.key", "ffn.value")


@dataclass(frozen=True, slots=True)
class Tuning:
    """What is trained, and on what."""

    source: Callable[[Random], Document]
    is_state: bool
    peak: float


TUNINGS = {
    "chinese": Tuning(manners.in_chinese, True, 0.1),
    "json": Tuning(manners.in_json, True, 0.1),
    "french": Tuning(manners.french, False, 4e-3),
    "spanish": Tuning(manners.spanish, False, 4e-3),
}


class LowRank(nn.Module):
    """A weight [out, in] with a product of low rank on top: W + B A."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        out, inner = weight.shape
        self.a = nn.Parameter(torch.randn(RANK, inner, device=weight.device) * inner**-0.5)
        self.b = nn.Parameter(torch.zeros(out, RANK, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        """The weight in use."""
        return weight + self.b @ self.a


def adapted(model: Rwkv7) -> dict[str, LowRank]:
    """Put a low-rank product on every target of the model; returns them by the weight's name without `.weight`."""
    found: dict[str, LowRank] = {}
    for index, block in enumerate(model.blocks):
        for target in TARGETS:
            linear = block.get_submodule(target)
            found[f"blocks.{index}.{target}"] = low = LowRank(linear.get_parameter("weight"))
            parametrize.register_parametrization(linear, "weight", low)
    return found


def tune(name: str, model: Rwkv7, compact: Compact, args: argparse.Namespace) -> list[Tensor] | dict[str, LowRank]:
    """Train one of `TUNINGS`; returns the states of all layers, or the low-rank products on the model."""
    tuning = TUNINGS[name]
    device = model.emb.weight.device
    model.requires_grad_(False)
    states: list[Tensor] | None = None
    lows: dict[str, LowRank] = {}
    if tuning.is_state:
        shape = (model.shape.width // HEAD, HEAD, HEAD)
        states = [torch.zeros(shape, device=device, requires_grad=True) for _ in range(model.shape.layers)]
        parameters = states
    else:
        lows = adapted(model)
        parameters = [parameter for low in lows.values() for parameter in low.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=tuning.peak, betas=(0.9, 0.97), weight_decay=0.01)
    stream = Batches(args.seed, 0, compact, args.rows, args.time, tuning.source)
    loader = DataLoader(stream, batch_size=None, num_workers=args.workers, prefetch_factor=4 if args.workers else None)
    bar, began = tqdm(total=args.steps, desc=name, mininterval=5, unit="step"), time.monotonic()
    for step, batch in enumerate(loader):
        if step >= args.steps or time.monotonic() - began > args.minutes * 60:
            break
        inputs, targets, weights, begins = (t.to(device, non_blocking=True) for t in batch)
        progress = max(step / args.steps, (time.monotonic() - began) / (args.minutes * 60))
        for group in optimizer.param_groups:
            group["lr"] = rate(step + 50, progress, tuning.peak)
        loss = loss_of(lambda ids, marks: model(ids, marks, states), compact, inputs, targets, weights, begins)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        bar.update()
        if step % 50 == 0:
            bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
    bar.close()
    return lows if states is None else states


class TunedTalker(TorchTalker):
    """A talker whose sessions begin with a state."""

    def __init__(self, model: Rwkv7, compact: Compact, states: list[Tensor] | None) -> None:
        super().__init__(model, compact)
        self._states = states

    def begun(self, batch: int) -> State:
        """The tuned state in place of zero."""
        state = super().begun(batch)
        if self._states is not None:
            state.wkv = [one.detach().expand(batch, *one.shape).clone() for one in self._states]
        return state


def score(name: str, talker: TorchTalker, count: int, seed: int) -> float:
    """The share of exact answers in drawn documents of a tuning's own kind."""
    rng = Random(f"tune/{name}/{seed}")
    scripts: list[list[tuple[str, str]]] = []
    while len(scripts) < count:
        if name in ("french", "spanish"):
            scripts.append([manners.phrase(rng, name.capitalize())])
            continue
        document = TUNINGS[name].source(rng)
        segments = [segment.text for segment in document]
        scripts.append([(segments[at], segments[at + 1]) for at in range(0, len(segments), 3)])
    answers = talker.converse([[prompt for prompt, _ in script] for script in scripts], 96)
    pairs = [
        (wanted.strip(), got.strip())
        for script, given in zip(scripts, answers, strict=True)
        for (_, wanted), got in zip(script, given, strict=True)
    ]
    for wanted, got in [pair for pair in pairs if pair[0] != pair[1]][:5]:
        print(f"{name}: wanted {wanted!r}, got {got!r}", flush=True)
    return sum(wanted == got for wanted, got in pairs) / len(pairs)


def save(name: str, tuned: list[Tensor] | dict[str, LowRank], out: Path) -> Path:
    """Write a state's or an adapter's file."""
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
    """Train, write and score each of the named ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=TUNINGS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=MODEL, help="a compact file")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--minutes", type=float, default=2.0, help="for each")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--time", type=int, default=256)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--scored", type=int, default=200)
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
        talker = TunedTalker(model, compact, tuned if isinstance(tuned, list) else None)
        figures[name] = {"exact": round(score(name, talker, args.scored, args.seed), 4), "bytes": path.stat().st_size}
        print(name, figures[name], flush=True)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
