"""Training speed and memory of `rwkv-batch tune` on a GPU, with random weights of a released shape.

    python -m bench.tuning --size 7.2b --method state                # tokens/s and peak memory of a step
    python -m bench.tuning --size 7.2b --method lora --rank 32 --dtype int8

A step is 16 rows of 2,048 tokens whose every token counts in the loss: forward, backward, clipping and AdamW. Memory is
the allocator's peak; `--memory-gb` is also its hard limit. A token costs 4 FLOP per weight (forward, and gradients of
activations), 6 in layers that are computed again, plus the pairs of a LoRA; `bound_tokens_s` is that at 790 TFLOP/s.
Between the products, a layer's kernels move about 700 bytes per channel and token. Weights and tokens are random, so
the loss means nothing.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.tools.gpu_model import SIZES, VOCAB, random_file
from bench.tools.record import Arguments, commit, finish
from rwkv_batch.runner.calibration import MeasuredInputs
from rwkv_batch.tuning import COMPACT_DTYPES, Document
from rwkv_batch.tuning.run import Place, prepare
from rwkv_batch.tuning.trainer import TuneOptions, Tuning

GPU = torch.device("cuda", 0)
PEAK = 790e12
"""FLOP/s of a large bf16 product on an H200."""


class _Capped(Place):
    """A device with less free memory than it has."""

    limit = 0

    @property
    def free_bytes(self) -> int | None:
        return self.limit


def random_tuning(args: argparse.Namespace, rows: int) -> Tuning:
    """Return a tuning of documents as long as a row."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCAB - 8, (2 * rows, args.time + 1), generator=generator).tolist()
    documents = [Document(one, [1.0] * len(one)) for one in ids]
    options = TuneOptions(args.method, args.rank, 100, rows * args.time, dtype=args.dtype)
    place = _Capped(GPU, torch.bfloat16)
    _Capped.limit = int(args.memory_gb * 1e9)
    weights = random_file(args.size, GPU, layers=args.layers)
    tuning = prepare(weights, documents, [], options, place, None, largest_inputs=MeasuredInputs(weights, GPU))
    weights.tensors.clear()
    torch.cuda.empty_cache()
    return tuning


def step_seconds(step: Callable[[], object], count: int) -> float:
    """Return the median seconds of a step, after two that are not counted."""
    seconds = []
    for _ in range(count + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[2:])


def speed(args: argparse.Namespace) -> dict[str, Any]:
    """Return figures of a training step."""
    tuning = random_tuning(args, args.rows)
    batch, trainer = tuning.first_batch(), tuning.trainer
    if args.memory_gb:
        total = torch.cuda.get_device_properties(GPU).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.memory_gb * 1e9 / total), GPU)
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    trainer.backward(batch)
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    trainer.optimizer.zero_grad()
    seconds = step_seconds(lambda: trainer.step(batch), args.steps)
    plan, tokens = trainer.model.plan, args.rows * args.time
    layers = trainer.model.shape.layers
    numbers = {name: one.numel() for name, one in trainer.model.weights.items() if one.dim() == 2}
    numbers |= {name: one.codes.numel() for name, one in trainer.model.compact.items()}
    inner = sum(count for name, count in numbers.items() if name.startswith("blocks."))
    flop = inner * (4 + 2 * plan.recomputed_layers / layers) + 4 * numbers["head.weight"]
    pairs = sum(one.numel() for pair in trainer.model.tunables.pairs.values() for one in pair)
    flop += pairs * (6 + 2 * plan.recomputed_layers / layers)
    return {
        "size": args.size, "layers": layers, "method": args.method, "dtype": args.dtype, "tokens": tokens,
        "tokens_s": round(tokens / seconds), "bound_tokens_s": round(PEAK / flop), "step_s": round(seconds, 3),
        "first_step_s": round(first, 1), "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "planned_gib": round(plan.needed_bytes / 2**30, 2), "piece_rows": plan.piece_rows,
        "recomputed_layers": plan.recomputed_layers,
    }  # fmt: skip


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--size", choices=SIZES, default="7.2b")
    parser.add_argument("--layers", type=int, help="default: all")
    parser.add_argument("--method", choices=("state", "lora", "state+lora"), default="state")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--dtype", choices=("auto", *COMPACT_DTYPES), default="auto", help="of the large matrices")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--time", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--memory-gb", type=float, default=40.0)
    args = parser.parse_args()
    finish({"commit": commit(args.commit), "gpu": torch.cuda.get_device_name(), **speed(args)}, args.out)


if __name__ == "__main__":
    main()
