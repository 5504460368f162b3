"""What it costs that rows have adapters of their own: tokens per second with 0, 1, 8 and 32 adapters in the batch.

    python -m bench.adapters                         # the demo model's engine on a CPU
    python -m bench.adapters --thread-time --rows 64 # its forward on one thread, by that thread's time
    python -m bench.adapters --size 7.2b --rows 320  # decode steps on a GPU, a random model of a released shape

Every row has an adapter, dealt in turn, each with a pair of --rank beside all six large maps of every layer. On a CPU
the service's engine decodes greedily; what bounds it are the pairs' products, a token's own each; `--thread-time` is
for machines that others use, where seconds say little. On a GPU a step is the service's own CUDA graph (embedding,
layers, head, draw): what bounds the difference are 8 launches a layer, and the bytes of outputs that are read and
written again. Numbers of adapters take turns, so that a machine that slows down slows all of them. One JSON line per
figure; the last line holds all, `share` being tokens per second over those with no adapter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from bench.tools.origin import commit
from demo import files
from rwkv_batch.config import EngineConfig
from rwkv_batch.engine import Engine
from rwkv_batch.model.low_rank import LayerPairs, Pair, Target
from rwkv_batch.model.state_form import StateForm
from rwkv_batch.model.step_inputs import step_inputs
from rwkv_batch.model.weights import open_weights
from rwkv_batch.request import GenerateRequest, Job
from rwkv_batch.runner.decode_graphs import DecodeGraphs
from rwkv_batch.runner.pipeline import Pipeline
from rwkv_batch.runner.stage_graphs import graph_stages
from sampling.params import SamplingParams
from state_pool.config import PoolConfig

MOST_TURNS = 5
FORWARDS = 25
GPU = torch.device("cuda", 0)


def random_pairs(layers: int, width: int, rank: int, seed: int) -> dict[int, LayerPairs]:
    """An adapter beside all large maps: pairs a [rank, in], b [out, rank] of a size that changes little."""
    generator = torch.Generator().manual_seed(seed)

    def pair(target: Target) -> Pair:
        out, inputs = width * (4 if target is Target.FFN_KEY else 1), width * (4 if target is Target.FFN_VALUE else 1)
        a = torch.randn(rank, inputs, generator=generator) / inputs**0.5
        return Pair(a, torch.randn(out, rank, generator=generator) * 0.02)

    one = LayerPairs({target: pair(target) for target in Target})
    return dict.fromkeys(range(layers), one)


def on_gpu(size: str, rows: int, counts: list[int], rank: int, seconds: float, dtype: str) -> dict[int, float]:
    """Milliseconds of a decode step of so many rows, by number of adapters."""
    from bench.gpu import mixed_sampler, timed
    from bench.tools.gpu_model import VOCAB, random_stage

    stage = random_stage(size, GPU, StateForm.FP16, dtype=dtype)
    stage.allocate_slots(rows + 2)
    for number in range(1, max(counts) + 1):
        stage.adapters.put(number, random_pairs(len(stage.layers), stage.width, rank, number))
    sampler, _ = mixed_sampler(rows + 1)
    graphs = DecodeGraphs(graph_stages([stage], rows, 2), rows, sampler)
    seats, slots = list(range(rows)), list(range(2, rows + 2))
    graphs.tokens.remember(seats, torch.randint(VOCAB, (rows,)))
    found: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(MOST_TURNS):
        for count in counts:
            numbers = [1 + row % count for row in range(rows)] if count else None
            step = lambda numbers=numbers: graphs.run(seats, slots, slots, (), numbers)  # noqa: E731
            found[count].append(timed(step, seconds / MOST_TURNS))
    return {count: statistics.median(times) for count, times in found.items()}


def write_adapters(folder: Path, count: int, layers: int, width: int, rank: int) -> list[str]:
    """Files of adapters, as --adapter-serve names them."""
    names = {Target.FFN_KEY: "ffn.key", Target.FFN_VALUE: "ffn.value"}
    entries = []
    for number in range(1, count + 1):
        tensors = {}
        for i, pairs in random_pairs(layers, width, rank, number).items():
            for target, pair in pairs.pairs.items():
                name = f"blocks.{i}.{names.get(target, f'att.{target.name.lower()}')}"
                tensors |= {f"{name}.lora_A": pair.a, f"{name}.lora_B": pair.b}
        torch.save(tensors, folder / f"{number}.pth")
        entries.append(f"a{number}={folder}/{number}.pth:1")
    return entries


def on_cpu(rows: int, counts: list[int], rank: int, tokens: int) -> dict[int, float]:
    """Milliseconds of a decode step of the demo model, by number of adapters."""
    model = files.ensure_model()
    with tempfile.TemporaryDirectory() as folder:
        shape = open_weights(str(model)).shape
        entries = write_adapters(Path(folder), max(counts), shape.layers, shape.width, rank)
        config = EngineConfig(
            model_path=str(model), devices=("cpu",), max_running=rows, pool=PoolConfig(state_db=""),
            served_adapters=tuple(entries),
        )  # fmt: skip
        engine = Engine(config)
        engine.start()
    try:
        found: dict[int, list[float]] = {count: [] for count in counts}
        for _ in range(MOST_TURNS):
            for count in counts:
                found[count].append(_decode(engine, rows, count, tokens))
        return {count: statistics.median(times) for count, times in found.items()}
    finally:
        engine.stop()


def on_one_thread(rows: int, counts: list[int], rank: int) -> dict[int, float]:
    """Milliseconds of a core that a decode step of the demo model takes on one thread, by number of adapters."""
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


def _decode(engine: Engine, rows: int, count: int, tokens: int) -> float:
    """Milliseconds of a step of `rows` rows, over so many."""
    greedy = SamplingParams(temperature=0.0)
    asked = [
        GenerateRequest(
            prompt=[11 + row], max_tokens=tokens, sampling=greedy, ignore_eos=True, use_prefix_cache=False,
            chunk_size=0, adapter=f"a{1 + row % count}" if count else "",
        )
        for row in range(rows)
    ]  # fmt: skip
    done = threading.Event()
    started = time.perf_counter()
    job = Job(job_id=f"{time.monotonic_ns()}", rows=asked)
    ended = lambda what: done.set() if what is not None and getattr(what, "done", True) else None  # noqa: E731
    engine.submit(job, ended, ended)
    done.wait()
    return (time.perf_counter() - started) * 1e3 / tokens


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="", help="a released shape, on a GPU; without it the demo model on a CPU")
    parser.add_argument("--dtype", default="fp16", help="on a GPU: fp16, fp8, int8, int4")
    parser.add_argument("--rows", type=int, default=0, help="in the batch; 0: 320 on a GPU, 32 on a CPU")
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 8, 32])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="on a CPU: of each row")
    parser.add_argument("--seconds", type=float, default=2.0, help="on a GPU: for each number of adapters")
    parser.add_argument("--thread-time", action="store_true", help="on a CPU: forwards on one thread, by its own time")
    args = parser.parse_args()
    rows = args.rows or (320 if args.size else 32)
    with torch.inference_mode():
        if args.size:
            times = on_gpu(args.size, rows, args.adapters, args.rank, args.seconds, args.dtype)
        elif args.thread_time:
            times = on_one_thread(rows, args.adapters, args.rank)
        else:
            times = on_cpu(rows, args.adapters, args.rank, args.tokens)
    about = {"rows": rows, "rank": args.rank}
    results: list[dict[str, Any]] = [
        {"adapters": count, **about, "step_ms": round(ms, 4), "tokens_s": round(rows / ms * 1e3)}
        for count, ms in times.items()
    ]
    for result in results:
        result["share"] = round(times[args.adapters[0]] / result["step_ms"], 4)
        print(json.dumps(result), flush=True)
    what = {"model": args.size or "demo", "dtype": args.dtype if args.size else "auto", "commit": commit()}
    print(json.dumps(what | {"results": results}))


if __name__ == "__main__":
    main()
