"""Train the demo model: `python -m demo.train --out DIR`. A checkpoint in DIR is resumed."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
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


def vocabulary_of(args: argparse.Namespace) -> NDArray[np.int64]:
    """Return the ids with their own rows: given or counted, plus those of `--start`."""
    ids: NDArray[np.int64] = (
        np.load(args.vocabulary) if args.vocabulary else used_ids(args.seed, args.vocabulary_documents)
    )
    return np.union1d(ids, load_compact(args.start)[1].ids) if args.start else ids


def start_from(path: Path, model: Rwkv7, compact: Compact) -> None:
    """Load a compact file into `model`. Ids that the file lacks start as its last row."""
    trained, known = load_compact(path)
    rows = torch.from_numpy(np.append(known.of_id[compact.ids], known.unused))
    weights = trained.state_dict()
    for name in TABLES:
        weights[name] = weights[name][rows]
    model.load_state_dict(weights)


def plot_losses(losses: list[tuple[int, float]], path: Path) -> None:
    """Write the loss curve as a PNG."""
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
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the compact file, the loss curve and the figures"
    )
    parser.add_argument("--checkpoint", type=Path, help="default: OUT/checkpoint.pt")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--minutes", type=float, default=28.0, help="time limit; the learning rate decays with it")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--time", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--peak", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--vocabulary-documents", type=int, default=150_000)
    parser.add_argument("--vocabulary", type=Path, help="a .npy file of ids; default: count ids in documents")
    parser.add_argument("--start", type=Path, help="a compact file to continue from")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument(
        "--sentences", type=int, default=1000, help="held-out sentences of the final evaluation; 0: none"
    )
    return parser.parse_args()


class Training:
    """One training run, new or resumed from a checkpoint."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._began = time.monotonic()
        self._checkpoint: Path = args.checkpoint or args.out / "checkpoint.pt"
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        saved = torch.load(self._checkpoint, map_location=self.device) if self._checkpoint.is_file() else None
        self.ids = np.array(saved["ids"]) if saved else vocabulary_of(args)
        self.compact = Compact(self.ids)
        self.model = Rwkv7(Shape(self.compact.rows, args.layers, args.width)).to(self.device)
        if args.start:
            start_from(args.start, self.model, self.compact)
        self._optimizer = optimizer_of(self.model, args.peak)
        self.step = 0
        self.losses: list[tuple[int, float]] = []
        """(step, loss)"""
        if saved:
            self.model.load_state_dict(saved["model"])
            self._optimizer.load_state_dict(saved["optimizer"])
            self.step, self.losses = saved["step"], saved["losses"]

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def save(self) -> None:
        """Write the checkpoint atomically."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "step": self.step,
            "losses": self.losses,
            "ids": self.ids.tolist(),
        }
        part = self._checkpoint.with_suffix(".part")
        torch.save(state, part)
        part.replace(self._checkpoint)

    def run(self) -> None:
        """Train until the last step or the time limit."""
        args, limit_s = self._args, self._args.minutes * 60
        stream = Batches(args.seed, self.step, self.compact, args.rows, args.time)
        ahead = 4 if args.workers else None
        loader = DataLoader(stream, batch_size=None, num_workers=args.workers, prefetch_factor=ahead)
        compute = torch.compile(loss_of) if args.compile else loss_of
        bar = tqdm(total=args.steps, initial=self.step, mininterval=10, unit="step")
        pending: list[tuple[int, Tensor]] = []
        for batch in loader:
            if self.step >= args.steps or self.seconds > limit_s:
                break
            progress = max(self.step / args.steps, self.seconds / limit_s)
            pending.append((self.step, self._train(compute, batch, rate(self.step, progress, args.peak))))
            self.step += 1
            bar.update()
            if self.step % 50 == 0:  # reading a loss synchronises the device
                self.losses += [(at, float(value)) for at, value in pending]
                pending.clear()
                bar.set_postfix(loss=f"{self.losses[-1][1]:.4f}", refresh=False)
            if self.step % 500 == 0:
                self.save()
        bar.close()
        self.losses += [(at, float(value)) for at, value in pending]

    def _train(self, compute: Callable[..., Tensor], batch: Sequence[Tensor], learning_rate: float) -> Tensor:
        """Train on a batch (inputs, targets, weights, begins); return its loss, a scalar on the device."""
        inputs, targets, weights, begins = (t.to(self.device, non_blocking=True) for t in batch)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = compute(self.model, self.compact, inputs, targets, weights, begins)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def export(training: Training, args: argparse.Namespace) -> None:
    """Write the compact file, the loss curve and the figures; print the first mistakes."""
    seconds, losses = training.seconds, training.losses
    save_compact(args.out / "rwkv7-demo.compact", training.model, training.ids)
    plot_losses(losses, args.out / "loss.png")
    last = [loss for _, loss in losses[-100:]]
    figures: dict[str, object] = {
        "steps": training.step,
        "seconds": round(seconds),
        "rows": training.compact.rows,
        "seed": args.seed,
        "loss": round(sum(last) / len(last), 5),
        "losses": losses[::10],
    }
    if args.sentences:
        model_path = ensure_model(args.out, args.out / "rwkv7-demo.compact")
        with open_engine(model_path, device=training.device.type) as client:
            figures |= report(client, sentences=args.sentences, sessions=max(args.sentences // 4, 8))
    (args.out / "figures.json").write_text(json.dumps(figures, ensure_ascii=False), encoding="utf-8")
    wrong = figures.pop("wrong", None)
    figures.pop("losses")
    print(json.dumps(figures), flush=True)
    if isinstance(wrong, dict):
        for name, cases in wrong.items():
            for case in cases[:12]:
                print(name, "|", " | ".join(case), flush=True)


def main() -> None:
    """Train, export and evaluate."""
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    training = Training(args)
    size = sum(p.numel() for p in training.model.parameters()) / 1e6
    print(f"{training.compact.rows} rows, {size:.2f} M parameters, {training.device}", flush=True)
    training.run()
    training.save()
    export(training, args)


if __name__ == "__main__":
    main()
