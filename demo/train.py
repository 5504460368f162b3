"""Train the demo model: `python -m demo.train --out DIR`."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from tqdm import tqdm

from demo.engine_client import open_engine
from demo.evaluate import report
from demo.export import load_compact, save_compact
from demo.files import TABLES, ensure_model
from demo.model import Rwkv7, Shape
from demo.packing import Batches, used_ids
from demo.vocabulary import Compact


def rate(step: int, progress: float, peak: float) -> float:
    """Return the learning rate: warm-up, plateau, then cosine decay. `progress` is 0 to 1."""
    warm, turn = 100, 0.3
    if step < warm:
        return peak * (step + 1) / warm
    falling = min(max((progress - turn) / (1 - turn), 0.0), 1.0)
    return peak * (0.005 + 0.995 * 0.5 * (1 + math.cos(math.pi * falling)))


def loss_of(
    model: Callable[[Tensor, Tensor], Tensor],
    compact: Compact,
    inputs: Tensor,
    targets: Tensor,
    weights: Tensor,
    begins: Tensor,
) -> Tensor:
    """Return the weighted mean cross-entropy over all 65,536 ids.

    The row of the unused ids counts once per id, so that sampling over the full vocabulary does not favour them.
    `inputs`, `targets`, `weights` and `begins` are [batch, time].
    """
    logits = model(inputs, begins).float().flatten(0, 1)
    share = torch.zeros(compact.rows, device=logits.device)
    share[compact.unused] = math.log(compact.multiplicity)
    losses = F.cross_entropy(logits + share, targets.flatten(), reduction="none")
    flat = weights.flatten()
    return (losses * flat).sum() / flat.sum().clamp_min(1)


def optimizer_of(model: Rwkv7, peak: float) -> torch.optim.AdamW:
    """Return AdamW with weight decay on the large matrices only."""
    large = [p for n, p in model.named_parameters() if p.dim() == 2 and n.endswith(".weight") and "emb" not in n]
    known = {id(p) for p in large}
    small = [p for p in model.parameters() if id(p) not in known]
    groups = [{"params": large, "weight_decay": 0.05}, {"params": small, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.97), eps=1e-12, fused=torch.cuda.is_available())


def start_from(path: Path, model: Rwkv7, compact: Compact) -> None:
    """Load a compact file into `model`. Ids that the file lacks start as its last row."""
    trained, known = load_compact(path)
    rows = torch.from_numpy(np.append(known.of_id[compact.ids], known.unused))
    weights = trained.state_dict()
    for name in TABLES:
        weights[name] = weights[name][rows]
    model.load_state_dict(weights)


def plot_losses(losses: list[float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4))
    axes.plot(losses, linewidth=0.8)
    axes.set(xlabel="step", ylabel="loss (nats, weighted)", yscale="log", title="demo model")
    axes.grid(alpha=0.3, which="both")
    figure.savefig(path, dpi=110, bbox_inches="tight")
    pyplot.close(figure)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the compact file, loss.png and figures.json"
    )
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--minutes", type=float, default=28.0, help="time limit; the learning rate decays with it")
    parser.add_argument("--rows", type=int, default=128, help="rows of a batch")
    parser.add_argument("--time", type=int, default=512, help="tokens of a row")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--peak", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--workers", type=int, default=14, help="processes that make batches")
    parser.add_argument("--vocabulary-documents", type=int, default=150_000, help="documents to count ids in")
    parser.add_argument("--start", type=Path, help="a compact file to continue from")
    parser.add_argument("--sentences", type=int, default=1000, help="held-out sentences to evaluate; 0: none")
    return parser.parse_args()


def fit(
    optimizer: torch.optim.Optimizer,
    stream: Batches,
    compute: Callable[..., Tensor],
    args: argparse.Namespace,
    peak: float,
    warm_steps: int = 0,
) -> list[float]:
    """Train until the last step or the time limit; return the loss of each step.

    `compute` returns the loss of inputs, targets, weights and begins. `warm_steps`: steps of the warm-up to skip.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    began, limit_s = time.monotonic(), args.minutes * 60
    loader = DataLoader(stream, batch_size=None, num_workers=args.workers, prefetch_factor=4 if args.workers else None)
    losses: list[Tensor] = []
    with tqdm(total=args.steps, mininterval=10, unit="step") as bar:
        for step, batch in enumerate(loader):
            seconds = time.monotonic() - began
            if step >= args.steps or seconds > limit_s:
                break
            for group in optimizer.param_groups:
                group["lr"] = rate(step + warm_steps, max(step / args.steps, seconds / limit_s), peak)
            loss = compute(*(tensor.to(parameters[0].device, non_blocking=True) for tensor in batch))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
            bar.update()
            if step % 50 == 0:  # reading a loss synchronises the device
                bar.set_postfix(loss=f"{float(losses[-1]):.4f}", refresh=False)
    return [float(loss) for loss in losses]


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ids = used_ids(args.seed, args.vocabulary_documents)
    compact = Compact(np.union1d(ids, load_compact(args.start)[1].ids) if args.start else ids)
    model = Rwkv7(Shape(compact.rows, args.layers, args.width)).to(device)
    if args.start:
        start_from(args.start, model, compact)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{compact.rows} rows, {size:.2f} M parameters, {device}", flush=True)

    def compute(*rows: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            return loss_of(model, compact, *rows)

    stream = Batches(args.seed, 0, compact, args.rows, args.time)
    losses = fit(optimizer_of(model, args.peak), stream, compute, args, args.peak)
    path = args.out / "rwkv7-demo.compact"
    save_compact(path, model, compact.ids)
    plot_losses(losses, args.out / "loss.png")
    figures: dict[str, object] = {"steps": len(losses), "rows": compact.rows, "losses": losses[::10]}
    figures["loss"] = round(sum(losses[-100:]) / len(losses[-100:]), 5)
    if args.sentences:
        with open_engine(ensure_model(args.out, path), device=device.type) as client:
            figures |= report(client, sentences=args.sentences, sessions=max(args.sentences // 4, 8))
    (args.out / "figures.json").write_text(json.dumps(figures, ensure_ascii=False, indent=1), encoding="utf-8")
    print(json.dumps({name: value for name, value in figures.items() if name not in ("losses", "wrong")}), flush=True)


if __name__ == "__main__":
    main()
