"""Train the demo model on one GPU: `python -m demo.train --out DIR`. A checkpoint in DIR is resumed."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from tqdm import tqdm

from demo.evaluate import report
from demo.export import load_compact, save_compact
from demo.files import TABLES
from demo.model import Rwkv7, Shape
from demo.packing import Batches, used_ids
from demo.talker import TorchTalker
from demo.vocabulary import Compact


def rate(step: int, progress: float, peak: float) -> float:
    """The learning rate: a short warm-up, a plateau, then a cosine to nearly nothing; `progress` goes from 0 to 1."""
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
    """The weighted mean of the cross-entropy over all 65,536 ids, the unused ones counted with their number."""
    logits = model(inputs, begins).float().flatten(0, 1)
    share = torch.zeros(compact.rows, device=logits.device)
    share[compact.unused] = math.log(compact.multiplicity)
    losses = F.cross_entropy(logits + share, targets.flatten(), reduction="none")
    flat = weights.flatten()
    return (losses * flat).sum() / flat.sum().clamp_min(1)


def optimizer_of(model: Rwkv7, peak: float) -> torch.optim.AdamW:
    """AdamW with weight decay on the large matrices alone."""
    large = [p for n, p in model.named_parameters() if p.dim() == 2 and n.endswith(".weight") and "emb" not in n]
    known = {id(p) for p in large}
    small = [p for p in model.parameters() if id(p) not in known]
    groups = [{"params": large, "weight_decay": 0.05}, {"params": small, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.97), eps=1e-12, fused=torch.cuda.is_available())


def vocabulary_of(args: argparse.Namespace) -> NDArray[np.int64]:
    """The ids with rows of their own: given, or counted, and those of the model to go on from."""
    ids: NDArray[np.int64] = (
        np.load(args.vocabulary) if args.vocabulary else used_ids(args.seed, args.vocabulary_documents)
    )
    return np.union1d(ids, load_compact(args.start)[1].ids) if args.start else ids


def start_from(path: Path, model: Rwkv7, compact: Compact) -> None:
    """Take a compact file's weights over: rows of its tables by their ids, its last row for those it does not know."""
    trained, known = load_compact(path)
    rows = torch.from_numpy(np.append(known.of_id[compact.ids], known.unused))
    weights = trained.state_dict()
    for name in TABLES:
        weights[name] = weights[name][rows]
    model.load_state_dict(weights)


def draw_curve(losses: list[tuple[int, float]], path: Path) -> None:
    """The loss curve as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4))
    axes.plot(*zip(*losses, strict=True), linewidth=0.8)
    axes.set(xlabel="step", ylabel="loss (nats, weighted)", yscale="log", title="demo model")
    axes.grid(alpha=0.3, which="both")
    figure.savefig(path, dpi=110, bbox_inches="tight")
    pyplot.close(figure)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="for the compact file, the curve and the figures")
    parser.add_argument("--checkpoint", type=Path, help="default: OUT/checkpoint.pt")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument(
        "--minutes",
        type=float,
        default=28.0,
        help="end after so long; the learning rate falls with the steps or the time, whichever is ahead",
    )
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--time", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--peak", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--vocabulary-documents", type=int, default=150_000)
    parser.add_argument("--vocabulary", type=Path, help="ids as a .npy file, instead of counting them in documents")
    parser.add_argument("--start", type=Path, help="a compact file to go on from; ids that it lacks begin as its rest")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--sentences", type=int, default=1000, help="held-out sentences at the end")
    return parser.parse_args()


def main() -> None:  # noqa: PLR0915 - one pass from the arguments to the figures
    """Train, checkpoint, export, evaluate."""
    args = arguments()
    began = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    checkpoint = args.checkpoint or args.out / "checkpoint.pt"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    saved = torch.load(checkpoint, map_location=device) if checkpoint.is_file() else None
    ids = np.array(saved["ids"]) if saved else vocabulary_of(args)
    compact = Compact(ids)
    model = Rwkv7(Shape(compact.rows, args.layers, args.width)).to(device)
    if args.start:
        start_from(args.start, model, compact)
    optimizer = optimizer_of(model, args.peak)
    first, losses = 0, []
    if saved:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first, losses = saved["step"], saved["losses"]
    print(
        f"{compact.rows} rows, {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {device}",
        flush=True,
    )
    stream = Batches(args.seed, first, compact, args.rows, args.time)
    loader = DataLoader(stream, batch_size=None, num_workers=args.workers, prefetch_factor=4 if args.workers else None)
    compute = torch.compile(loss_of) if args.compile else loss_of

    def save(step: int) -> None:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": step,
            "losses": losses,
            "ids": ids.tolist(),
        }
        part = checkpoint.with_suffix(".part")
        torch.save(state, part)
        part.replace(checkpoint)

    bar = tqdm(total=args.steps, initial=first, mininterval=10, unit="step")
    pending: list[tuple[int, Tensor]] = []
    step = first
    for batch in loader:
        if step >= args.steps or time.monotonic() - began > args.minutes * 60:
            break
        inputs, targets, weights, begins = (t.to(device, non_blocking=True) for t in batch)
        progress = max(step / args.steps, (time.monotonic() - began) / (args.minutes * 60))
        for group in optimizer.param_groups:
            group["lr"] = rate(step, progress, args.peak)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            loss = compute(model, compact, inputs, targets, weights, begins)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        pending.append((step, loss.detach()))
        step += 1
        bar.update()
        if step % 50 == 0:
            losses += [(at, float(value)) for at, value in pending]
            pending.clear()
            bar.set_postfix(loss=f"{losses[-1][1]:.4f}", refresh=False)
        if step % 500 == 0:
            save(step)
    bar.close()
    losses += [(at, float(value)) for at, value in pending]
    seconds = time.monotonic() - began
    save(step)
    save_compact(args.out / "rwkv7-demo.compact", model, ids)
    draw_curve(losses, args.out / "loss.png")
    exported, _ = load_compact(args.out / "rwkv7-demo.compact")
    talker = TorchTalker(exported.to(device), compact)
    torch.set_float32_matmul_precision("highest")
    figures: dict[str, object] = {
        "steps": step, "seconds": round(seconds), "rows": compact.rows, "seed": args.seed, "loss": round(sum(v for _, v in losses[-100:]) / len(losses[-100:]), 5),
        **report(talker, sentences=args.sentences, sessions=max(args.sentences // 4, 8)),
        "losses": losses[::10],
    }  # fmt: skip
    (args.out / "figures.json").write_text(json.dumps(figures, ensure_ascii=False), encoding="utf-8")
    wrong = figures.pop("wrong")
    figures.pop("losses")
    print(json.dumps(figures), flush=True)
    if isinstance(wrong, dict):
        for name, cases in wrong.items():
            for case in cases[:12]:
                print(name, "|", " | ".join(case), flush=True)


if __name__ == "__main__":
    main()
