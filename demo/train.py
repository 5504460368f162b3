"""Train the demo model: `python -m demo.train --out DIR`."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from demo.engine_client import open_engine
from demo.evaluate import report
from demo.export import demo_shape, initial_weights, load_compact, save_compact, training_model
from demo.files import TABLES, ensure_model
from demo.packing import Batches, used_ids
from demo.vocabulary import Compact
from rwkv_batch.tuning.curve import loss_curve
from rwkv_batch.tuning.model import TrainingModel
from rwkv_batch.tuning.trainer import Schedule, Trainer

WARM_UP, PLATEAU = 100, 0.3


@dataclass(frozen=True, slots=True)
class TimedSchedule(Schedule):
    seconds: float = 0.0
    end: float = 0.0
    """of time.monotonic"""

    def progress(self, step: int) -> float:
        return 1 - (self.end - time.monotonic()) / self.seconds


def timed(seconds: float) -> TimedSchedule:
    return TimedSchedule(0, WARM_UP, PLATEAU, seconds, time.monotonic() + seconds)


def trainer_of(model: TrainingModel, schedule: Schedule, peak: float, dtype: torch.dtype = torch.float32) -> Trainer:
    """Return the trainer of all weights. Only large matrices have weight decay."""
    large = {name for name, one in model.weights.items() if one.dim() == 2 and name.endswith(".weight")}
    large.discard("emb.weight")
    groups: list[dict[str, Any]] = [
        {"params": [one for name, one in model.weights.items() if (name in large) == is_large], "weight_decay": decay}
        for is_large, decay in ((True, 0.05), (False, 0.0))
    ]
    return Trainer(model, [{**group, "lr": peak} for group in groups], schedule, dtype)


def start_from(path: Path, compact: Compact) -> dict[str, Tensor]:
    """Return a compact file's weights. Ids that the file lacks start as its last row."""
    weights, known, _ = load_compact(path)
    rows = torch.from_numpy(np.append(known.of_id[compact.ids], known.unused))
    return weights | {name: weights[name][rows] for name in TABLES}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the compact file, loss.png and figures.json"
    )
    parser.add_argument("--seconds", type=float, default=600, help="time of the steps, after the start")
    parser.add_argument("--rows", type=int, default=128, help="rows of a batch")
    parser.add_argument("--time", type=int, default=512, help="tokens of a row")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--peak", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--workers", type=int, default=14, help="processes that make batches")
    parser.add_argument(
        "--vocabulary-documents", type=int, default=150_000, help="documents to count ids in; 0: the ids of --start"
    )
    parser.add_argument("--start", type=Path, help="a compact file to continue from")
    parser.add_argument("--sentences", type=int, default=1000, help="held-out sentences to evaluate; 0: none")
    given = parser.parse_args()
    if not given.vocabulary_documents and given.start is None:
        parser.error("--vocabulary-documents 0 takes the ids of --start FILE; give both, or a number of documents")
    return given


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.vocabulary_documents:
        compact = Compact(used_ids(args.seed, args.vocabulary_documents, args.workers))
    else:
        compact = load_compact(args.start)[1]
    shape = demo_shape(compact.rows, args.layers, args.width)
    weights = start_from(args.start, compact) if args.start else initial_weights(shape)
    kind: type[TrainingModel] = TrainingModel
    if device.type == "cuda":
        from demo.gpu_model import GpuDemoModel  # needs Triton

        kind = GpuDemoModel
    model = training_model({name: one.to(device) for name, one in weights.items()}, compact, shape, kind)
    size = sum(p.numel() for p in model.weights.values()) / 1e6
    print(f"{compact.rows} rows, {size:.2f} M parameters, {device}", flush=True)
    stream = Batches(args.seed, compact, args.rows, args.time)
    loader = DataLoader(stream, batch_size=None, num_workers=args.workers, prefetch_factor=4 if args.workers else None)
    batches, schedule = iter(loader), timed(args.seconds)
    trainer = trainer_of(model, schedule, args.peak, torch.bfloat16 if device.type == "cuda" else torch.float32)
    with tqdm(mininterval=10, unit="step") as bar:
        while schedule.progress(len(trainer.losses)) < 1:
            bar.set_postfix(loss=f"{trainer.step(next(batches)):.4f}", refresh=False)
            bar.update()
    losses, path = trainer.losses, args.out / "rwkv7-demo.compact"
    save_compact(path, dict(model.weights), compact.ids)
    (args.out / "loss.png").write_bytes(loss_curve(losses, []))
    figures: dict[str, object] = {"steps": len(losses), "rows": compact.rows, "losses": losses[::10]}
    figures["loss"] = round(sum(losses[-100:]) / len(losses[-100:]), 5)
    if args.sentences:
        with open_engine(ensure_model(args.out, path), device=device.type) as client:
            figures |= report(client, sentences=args.sentences, sessions=max(args.sentences // 4, 8))
    (args.out / "figures.json").write_text(json.dumps(figures, ensure_ascii=False, indent=1), encoding="utf-8")
    print(json.dumps({name: value for name, value in figures.items() if name not in ("losses", "wrong")}), flush=True)


if __name__ == "__main__":
    main()
