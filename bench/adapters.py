"""Decode speed with 0, 1, 8 and 32 adapters in one batch, on a GPU.

    python -m bench.adapters --size 7.2b --rows 320

The weights are random. Every row uses an adapter. An adapter has a pair of rank `--rank` on all six large matrices of
each layer. A step is the service's CUDA graph: embedding, layers, head, sampling. The numbers of adapters alternate, so
a slow phase of the machine affects all of them. Bound: eight more launches per layer.

Prints one JSON line per figure; the last line has all. `share`: tokens/s relative to no adapter.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import torch

from bench.gpu import mixed_sampler, timed
from bench.tools.gpu_model import SIZES, VOCAB, random_stage
from bench.tools.record import Arguments, commit, finish
from rwkv_batch.model.low_rank import LayerPairs, Pair, Target
from rwkv_batch.model.state import StateFormat
from rwkv_batch.runner.graphs.capture import make_graph_stages
from rwkv_batch.runner.graphs.decode import DecodeGraphs

MAX_ROUNDS = 5
GPU = torch.device("cuda", 0)


def random_pairs(layers: int, width: int, rank: int, seed: int) -> dict[int, LayerPairs]:
    """Return an adapter for all large matrices: pairs a [rank, in], b [out, rank], with small values."""
    generator = torch.Generator().manual_seed(seed)

    def pair(target: Target) -> Pair:
        out, inputs = width * (4 if target is Target.FFN_KEY else 1), width * (4 if target is Target.FFN_VALUE else 1)
        a = torch.randn(rank, inputs, generator=generator) / inputs**0.5
        return Pair(a, torch.randn(out, rank, generator=generator) * 0.02)

    one = LayerPairs({target: pair(target) for target in Target})
    return dict.fromkeys(range(layers), one)


def step_ms(args: argparse.Namespace) -> dict[int, float]:
    """Return milliseconds per decode step, by number of adapters."""
    rows = args.rows
    stage = random_stage(args.size, GPU, StateFormat.FP16, dtype=args.dtype)
    stage.allocate_slots(rows + 2)
    for number in range(1, max(args.adapters) + 1):
        stage.adapters.put(number, random_pairs(len(stage.layers), stage.width, args.rank, number))
    sampler, _ = mixed_sampler(rows + 1)
    graphs = DecodeGraphs(make_graph_stages([stage], rows, 2), rows, sampler)
    req_slots, slots = list(range(rows)), list(range(2, rows + 2))
    graphs.tokens.store(req_slots, torch.randint(VOCAB, (rows,)))
    found: dict[int, list[float]] = {count: [] for count in args.adapters}
    for _ in range(MAX_ROUNDS):
        for count, times in found.items():
            numbers = [1 + row % count for row in range(rows)] if count else None
            step = lambda numbers=numbers: graphs.run(req_slots, slots, slots, (), numbers)  # noqa: E731
            times.append(timed(step, args.seconds / MAX_ROUNDS))
    return {count: statistics.median(times) for count, times in found.items()}


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--size", choices=SIZES, default="7.2b")
    parser.add_argument("--dtype", default="fp16", choices=("fp16", "fp8", "int8", "int4"))
    parser.add_argument("--rows", type=int, default=320)
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 8, 32])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each number of adapters")
    args = parser.parse_args()
    with torch.inference_mode():
        times = step_ms(args)
    results: list[dict[str, Any]] = []
    for count, ms in times.items():
        figures = {"adapters": count, "rows": args.rows, "rank": args.rank, "step_ms": round(ms, 4)}
        share = round(times[args.adapters[0]] / ms, 4)
        results.append({**figures, "tokens_s": round(args.rows / ms * 1e3), "share": share})
        print(json.dumps(results[-1]), flush=True)
    finish({"model": args.size, "dtype": args.dtype, "commit": commit(args.commit), "results": results}, args.out)


if __name__ == "__main__":
    main()
