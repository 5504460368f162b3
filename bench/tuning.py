"""Training speed and memory of `rwkv-batch tune` on a GPU, with random weights of a released shape.

    python -m bench.tuning --size 7.2b --method state                # tokens/s and peak memory of a step
    python -m bench.tuning --size 7.2b --method lora --rank 32 --dtype int8
    python -m bench.tuning --size 7.2b --layers 8 --against-fla      # the same layers of flash-linear-attention beside

A step is 16 rows of 2,048 tokens whose every token counts in the loss: forward, backward, clipping and AdamW. Memory is
the allocator's peak; `--memory-gb` is also its hard limit. A token costs 4 FLOP per weight (forward, and gradients of
activations), 6 in layers that are computed again, plus the pairs of a LoRA; `bound_tokens_s` is that at 790 TFLOP/s.
Between the products, a layer's kernels move about 700 bytes per channel and token. Weights and tokens are random, so
the loss means nothing.

`--profile` prints the GPU's time by kernel. `--against-fla` runs fla's RWKV-7 blocks, their weights frozen, over the
same tokens: forward with a loss on the last layer's output, and the gradient of the first one's input. Each of fla's
kernels has the best of `--configs` configurations, spread evenly over those of at most 8 warps and 3 stages, because
compiling all of them takes many minutes. `--warm-up N` compiles the N-th ones only, and our kernels if N is 0: several
such processes at once fill Triton's cache.

Prints one JSON line per figure; the last line has all.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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
    found = {
        "size": args.size, "layers": layers, "method": args.method, "dtype": args.dtype, "tokens": tokens,
        "tokens_s": round(tokens / seconds), "bound_tokens_s": round(PEAK / flop), "step_s": round(seconds, 3),
        "first_step_s": round(first, 1), "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "planned_gib": round(plan.needed_bytes / 2**30, 2), "piece_rows": plan.piece_rows,
        "recomputed_layers": plan.recomputed_layers,
    }  # fmt: skip
    if args.profile:
        print_profile(lambda: trainer.step(batch))
    return found


def print_profile(step: Callable[[], object]) -> None:
    """Print the GPU's time by kernel."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    rows = sorted(profile.key_averages(), key=lambda one: -one.self_device_time_total)
    total = sum(one.self_device_time_total for one in rows)
    for one in rows[:28]:
        share = one.self_device_time_total / total
        print(f"{share:6.1%} {one.self_device_time_total / 1e3:9.1f} ms {one.count:6} x {one.key[:90]}")


def fla_seconds(args: argparse.Namespace, rows: int) -> float:
    """Return the seconds of fla's blocks for `rows` rows."""
    import transformers.modeling_utils

    transformers.modeling_utils._init_weights = False  # orthogonal starts take minutes
    from fla.models.rwkv7 import RWKV7Config
    from fla.models.rwkv7.modeling_rwkv7 import RWKV7Block

    all_layers, width, (w, a, v, g) = SIZES[args.size]
    layers = args.layers or all_layers
    config = RWKV7Config(
        hidden_size=width, num_hidden_layers=layers, head_dim=64, decay_low_rank_dim=w, a_low_rank_dim=a,
        v_low_rank_dim=v, gate_low_rank_dim=g,
    )  # fmt: skip
    _few_configurations(args.configs, args.warm_up)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(GPU):
        blocks = torch.nn.ModuleList([RWKV7Block(config, i) for i in range(layers)])
    torch.set_default_dtype(torch.float32)
    blocks.requires_grad_(False).train()
    for parameter in blocks.parameters():
        if parameter.dim() == 1:
            parameter.data.uniform_(0.1, 0.9)
    x = torch.randn(rows, args.time, width, device=GPU, dtype=torch.bfloat16, requires_grad=True)

    def step() -> None:
        y, first_v = x, None
        for block in blocks:
            y, _, _, first_v = block(y, v_first=first_v)
        y.float().square().mean().backward()

    return step_seconds(step, args.steps)


def _few_configurations(count: int, only: int | None) -> None:
    """Leave `count` configurations to each of fla's autotuned kernels, or the one with number `only`."""
    import sys
    from functools import partial

    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    def chosen(configs: list[Any]) -> list[Any]:
        usual = [one for one in configs if one.num_warps <= 8 and one.num_stages <= 3] or configs
        spread = [usual[n * len(usual) // count] for n in range(min(count, len(usual)))]
        return spread if only is None else spread[only % len(spread) :][:1]

    for module in [one for name, one in sys.modules.items() if name.startswith("fla.")]:
        for kernel in vars(module).values():
            inner = kernel
            while inner is not None and not isinstance(inner, Autotuner):
                inner = getattr(inner, "fn", None) if type(inner).__module__.startswith("triton") else None
            if inner is not None:
                inner.configs = chosen(inner.configs)
                inner.do_bench = partial(do_bench, warmup=5, rep=20)


def own_seconds(args: argparse.Namespace, rows: int) -> float:
    """Return the seconds of our layers for `rows` rows, with the same loss as fla's."""
    tuning = random_tuning(args, rows)
    model, batch = tuning.trainer.model, tuning.first_batch().to(GPU)

    def step() -> None:
        hidden: Tensor = model.hidden(batch.inputs, batch.begins)
        hidden.square().mean().backward()

    return step_seconds(step, args.steps)


def against_fla(args: argparse.Namespace) -> dict[str, Any]:
    """Return tokens/s of our layers and of fla's, in the same run, without recomputation."""
    found: dict[str, Any] = {"size": args.size, "layers": args.layers, "rows": args.piece, "method": args.method}
    tokens = args.piece * args.time
    found["own_tokens_s"] = round(tokens / own_seconds(args, args.piece))
    torch.cuda.empty_cache()
    found["fla_tokens_s"] = round(tokens / fla_seconds(args, args.piece))
    found["ratio"] = round(found["own_tokens_s"] / found["fla_tokens_s"], 2)
    return found | {"fla_configurations": args.configs}


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
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--against-fla", action="store_true")
    parser.add_argument("--piece", type=int, default=2, help="rows of --against-fla")
    parser.add_argument("--configs", type=int, default=8, help="of each of fla's kernels")
    parser.add_argument(
        "--warm-up", type=int, help="only compile the kernels of --against-fla, with this configuration"
    )
    args = parser.parse_args()
    if args.warm_up is not None:
        args.layers, args.steps = 2, 1
        if args.warm_up == 0:
            own_seconds(args, args.piece)
        print(f"compiled: {fla_seconds(args, args.piece):.3f} s a step")
        return
    figures = against_fla(args) if args.against_fla else speed(args)
    finish({"commit": commit(args.commit), "gpu": torch.cuda.get_device_name(), **figures}, args.out)


if __name__ == "__main__":
    main()
