"""Decode speed with 0, 1, 8 and 32 adapters in one batch.

    python -m bench.adapters --size 7.2b --rows 320  # GPU: random weights of a released shape
    python -m bench.adapters --rows 64               # CPU: the demo model on one thread, in CPU time

Every row uses an adapter. An adapter has a rank `--rank` pair on all six large matrices of each layer. A GPU step is
the service's CUDA graph: embedding, layers, head, sampling. The numbers of adapters alternate, so a slow phase of the
machine affects all of them. Bounds: on a GPU eight more launches per layer, on a CPU the products of the pairs.

Prints one JSON line per figure; the last line has all. `share`: tokens/s relative to no adapter.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import torch

from bench.tools.record import Arguments, commit, finish
from demo import files
from rwkv_batch.model.low_rank import LayerPairs, Pair, Target
from rwkv_batch.model.state import StateFormat
from rwkv_batch.model.step_inputs import step_inputs
from rwkv_batch.model.weights import open_weights
from rwkv_batch.runner.graphs.capture import make_graph_stages
from rwkv_batch.runner.graphs.decode import DecodeGraphs
from rwkv_batch.runner.pipeline import Pipeline

MAX_ROUNDS = 5
FORWARDS = 25
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


def gpu_step_ms(size: str, rows: int, counts: list[int], rank: int, seconds: float, dtype: str) -> dict[int, float]:
    """Return milliseconds per decode step on a GPU, by number of adapters."""
    from bench.gpu import mixed_sampler, timed
    from bench.tools.gpu_model import VOCAB, random_stage

    stage = random_stage(size, GPU, StateFormat.FP16, dtype=dtype)
    stage.allocate_slots(rows + 2)
    for number in range(1, max(counts) + 1):
        stage.adapters.put(number, random_pairs(len(stage.layers), stage.width, rank, number))
    sampler, _ = mixed_sampler(rows + 1)
    graphs = DecodeGraphs(make_graph_stages([stage], rows, 2), rows, sampler)
    req_slots, slots = list(range(rows)), list(range(2, rows + 2))
    graphs.tokens.store(req_slots, torch.randint(VOCAB, (rows,)))
    found: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(MAX_ROUNDS):
        for count in counts:
            numbers = [1 + row % count for row in range(rows)] if count else None
            step = lambda numbers=numbers: graphs.run(req_slots, slots, slots, (), numbers)  # noqa: E731
            found[count].append(timed(step, seconds / MAX_ROUNDS))
    return {count: statistics.median(times) for count, times in found.items()}


def cpu_step_ms(rows: int, counts: list[int], rank: int) -> dict[int, float]:
    """Return CPU milliseconds per decode step, by number of adapters. The demo model runs on one thread."""
    torch.set_num_threads(1)
    weights = open_weights(str(files.ensure_model()))
    pipeline = Pipeline(weights, ("cpu",), "fp32", "cpu", "fp32", ())
    pipeline.allocate_slots(rows + 2)
    for number in range(1, max(counts) + 1):
        pairs = random_pairs(weights.shape.layers, weights.shape.width, rank, number)
        pipeline.stages[0].adapters.put(number, pairs)
    slots = list(range(2, rows + 2))
    found: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(1 + FORWARDS):
        for count, times in found.items():
            inputs = step_inputs([[11 + row] for row in range(rows)], slots, slots, list(range(rows)))
            inputs.adapters = torch.tensor([1 + row % count for row in range(rows)]) if count else None
            started = time.thread_time()
            pipeline.forward(inputs)
            times.append((time.thread_time() - started) * 1e3)
    return {count: statistics.median(times[1:]) for count, times in found.items()}


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--size", default="", help="a released shape, on a GPU; without it the demo model on a CPU")
    parser.add_argument("--dtype", default="fp16", help="on a GPU: fp16, fp8, int8, int4")
    parser.add_argument("--rows", type=int, default=0, help="in the batch; 0: 320 on a GPU, 32 on a CPU")
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 8, 32])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=2.0, help="on a GPU: for each number of adapters")
    args = parser.parse_args()
    rows = args.rows or (320 if args.size else 32)
    with torch.inference_mode():
        if args.size:
            times = gpu_step_ms(args.size, rows, args.adapters, args.rank, args.seconds, args.dtype)
        else:
            times = cpu_step_ms(rows, args.adapters, args.rank)
    about = {"rows": rows, "rank": args.rank}
    results: list[dict[str, Any]] = [
        {"adapters": count, **about, "step_ms": round(ms, 4), "tokens_s": round(rows / ms * 1e3)}
        for count, ms in times.items()
    ]
    for result in results:
        result["share"] = round(times[args.adapters[0]] / result["step_ms"], 4)
        print(json.dumps(result), flush=True)
    what = {"model": args.size or "demo", "dtype": args.dtype if args.size else "auto", "commit": commit(args.commit)}
    finish(what | {"results": results}, args.out)


if __name__ == "__main__":
    main()
