"""Time of each forward kernel compared with the bytes it must move.

Measures one width on one GPU.

    python -m bench.kernels --width 4096

Each case rotates over several copies of its tensors inside one CUDA graph, so the L2 cache does not hold them. Prints
one JSON line per case; the last line has all. Its "steps" have the kernels of whole forwards of five layers and the
head, by torch.profiler: for each weight type and number of tokens, in order, with grid, block and shared memory, on
Hopper's kernels and on those for other GPUs. These launches wait for each other, so that their times do not overlap.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bench.adapters import random_pairs
from bench.gpu import GPU, prefill_inputs
from bench.tools.gpu_model import SIZES, VOCAB, random_stage
from bench.tools.record import Arguments, finish
from demo.random_weights import random_weights
from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cuda import hopper_gemm
from rwkv_batch.kernels.cuda.channel_mix import sparse_value
from rwkv_batch.kernels.cuda.layer import CudaLayer
from rwkv_batch.kernels.cuda.linear import MAX_SKINNY_ROWS, Gemm, is_grouped, multiply, multiply_transposed, skinny
from rwkv_batch.kernels.cuda.low_ranks import finish_projections
from rwkv_batch.kernels.cuda.ops import CudaOps
from rwkv_batch.kernels.cuda.workspace import MAX_SPARSE_ROWS
from rwkv_batch.model.layer import Projections
from rwkv_batch.model.loader import LayerLoader, Precision
from rwkv_batch.model.state import ModelShape, StateFormat
from rwkv_batch.model.step_inputs import StepInputs
from rwkv_batch.model.weights import Weights
from rwkv_batch.runner.pipeline import Stage
from sampling.params import SamplingParams
from sampling.rapid import RapidSampler

COPIES = 4
FEW = (1, 2, 4, 8, 16)
MANY = (32, 64, 128, 320, 960)
PROMPTS = ((1, 512), (1, 4096), (8, 512), (32, 512))
PROFILED_ROWS = (1, 4, 8, 16, 64, 256, 320, 960)
PROFILED_PROMPTS = ((8, 512), (32, 512))
PROFILED_DTYPES = ("fp16", "fp8", "int8", "int4")
RUNS = 5


@dataclass(slots=True)
class Case:
    """One kernel at one size.

    `run(i)` uses the i-th copy of the tensors. `bytes` and `flops` are the minimum for one run.
    """

    name: str
    rows: int
    run: Callable[[int], object]
    bytes: float
    flops: float = 0.0


def timed_in_graph(case: Case) -> float:
    """Return microseconds per run, including gaps between launches."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(COPIES):
            case.run(i)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(2 * COPIES):
            case.run(i % COPIES)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    begin.record()
    for _ in range(10):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / (10 * 2 * COPIES)


def decode_inputs(rows: int) -> StepInputs:
    slots = torch.arange(2, rows + 2, device=GPU)
    ends = torch.arange(rows + 1, device=GPU)
    return StepInputs(ends[:-1], ends, slots, slots, ends[:-1], 1)


class Bench:
    """Layers of one width with their states."""

    def __init__(self, width: int) -> None:
        ranks = next(ranks for _, w, ranks in SIZES.values() if w == width)
        self.width, self.ops = width, CudaOps()
        tensors = random_weights(COPIES + 1, width, 64, ranks=ranks, dtype=torch.float16, device=GPU)
        weights = Weights(Path("random"), tensors, ModelShape(COPIES + 1, width, 64, 4 * width, *ranks), "")
        loader = LayerLoader(
            weights, Precision(GPU, torch.float16, torch.float16, StateFormat.FP32), self.ops.make_linear
        )
        self.layers: list[CudaLayer] = [self.ops.prepare_layer(loader.layer(i + 1)) for i in range(COPIES)]

    def normal(self, *size: int) -> Tensor:
        return torch.randn(*size, device=GPU, dtype=torch.float16)

    def elementwise_and_wkv(self, inputs: StepInputs) -> Iterator[Case]:
        """Yield shift_mix and WKV of one step."""
        tokens, width, rows = len(inputs.tokens), self.width, len(inputs.read_slots)
        kind = "decode" if inputs.max_seqlen == 1 else f"{rows}x{inputs.max_seqlen}"
        x, delta = self.normal(tokens, width), self.normal(tokens, width)
        shift = torch.zeros(rows + 2, COPIES, 2, width, device=GPU, dtype=torch.float16)
        for name, mixes in (("shift_mix 6", 6), ("shift_mix 1", 1)):
            prologues = [layer.time_mix_prologue if mixes == 6 else layer.channel_mix_prologue for layer in self.layers]
            yield Case(
                f"{name} {kind}",
                tokens,
                lambda i, e=prologues: self.ops.shift_mix(x, delta, e[i], shift[:, i, 0], inputs),  # type: ignore[misc]
                2 * tokens * width * (3 + mixes) + 4 * rows * width,
            )
        projections = Projections(*(self.normal(tokens, width) for _ in range(7)))
        first = self.normal(tokens, width)
        for form in StateFormat:
            sizes = (width // 64, 64, 64)
            wkv = torch.zeros(rows + 2, COPIES, *form.sizes(sizes), device=GPU, dtype=form.dtype)
            state_bytes = 2 * rows * form.num_bytes(sizes)
            yield Case(
                f"wkv {form.display_name} {kind}",
                tokens,
                lambda i, wkv=wkv: self.ops.time_mix(self.layers[i], projections, first, wkv[:, i], inputs),  # type: ignore[misc]
                state_bytes + 2 * tokens * width * 9,
            )

    def linears(self, rows: int) -> Iterator[Case]:
        """Yield the linear layers as the forward runs them with these rows. Also yields the alternatives."""
        c = self.width
        mixed, x, hidden = self.normal(6, rows, c), self.normal(rows, c), torch.relu(self.normal(rows, 4 * c) - 1.17)
        low = 2 * sum(m.numel() for m in (self.layers[0].low_in, self.layers[0].low_out, self.layers[0].gate_in)) + (
            2 * self.layers[0].gate_out.numel()
        )
        y = torch.empty_like(x)

        def case(name: str, run: Callable[[CudaLayer], object], weights: float) -> Case:
            return Case(name, rows, lambda i: run(self.layers[i]), weights, weights * rows)

        yield case("project", lambda layer: finish_projections(self.ops.project(layer, mixed)), 6 * c * c + low)
        yield case("channel_mix", lambda layer: self.ops.channel_mix(layer, hidden[:, :c].contiguous()), 16 * c * c)
        yield case("rkv bmm", lambda layer: torch.bmm(mixed[:3], layer.rkv.transpose(1, 2)), 6 * c * c)
        yield case("low in bmm", lambda layer: torch.bmm(mixed[2:5], layer.low_in.transpose(1, 2)), low)
        yield case("gate in mm", lambda layer: torch.mm(mixed[5], layer.gate_in.T), low)
        yield case("output cublas", lambda layer: torch.mm(x, layer.output.weight.T), 2 * c * c)
        yield case("ffn key cublas", lambda layer: torch.mm(x, layer.ffn_key.weight.T), 8 * c * c)
        yield case("ffn value cublas", lambda layer: torch.mm(hidden, layer.value_rows), 8 * c * c)
        if rows <= MAX_SPARSE_ROWS:
            active = (hidden != 0).any(0).float().mean().item()
            yield case(
                "ffn value sparse",
                lambda layer: sparse_value(layer, hidden, self.ops.workspaces[hidden.device]),
                8 * c * c * active,
            )
        key_output = self.normal(rows, 4 * c)
        key = "ffn key, relu_square"
        yield case("output", lambda layer: layer.output(x), 2 * c * c)
        if rows <= MAX_SKINNY_ROWS:
            yield case("output skinny", lambda layer: skinny([Gemm(layer.output.weight, x, y)]), 2 * c * c)
        if is_grouped(rows, self.layers[0].ffn_key.weight):
            yield case(
                key,
                lambda layer: multiply([Gemm(layer.ffn_key.weight, x, key_output, Activation.RELU_SQUARED)]),
                8 * c * c,
            )
        yield case("ffn value", lambda layer: multiply_transposed(hidden, layer.value_rows), 8 * c * c)

    def head(self, rows: int) -> Iterator[Case]:
        weights = [self.ops.make_linear(self.normal(VOCAB, self.width)) for _ in range(COPIES)]
        x = self.normal(rows, self.width)
        yield Case("head", rows, lambda i: weights[i].to_fp32(x), 2 * VOCAB * self.width + 4 * rows * VOCAB)


def cases(bench: Bench) -> Iterator[Case]:
    for rows in (*FEW, *MANY):
        yield from bench.elementwise_and_wkv(decode_inputs(rows))
        yield from bench.linears(rows)
        yield from bench.head(rows)
    for rows, length in PROMPTS:
        yield from bench.elementwise_and_wkv(prefill_inputs(range(rows), length))


def launches(run: Callable[[], object]) -> list[tuple[Any, ...]]:
    """Return each launch of a run, in order.

    A launch is its kernel, median microseconds, grid, block and bytes of shared memory.
    """
    run()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(RUNS):
            run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = [event for event in json.loads(trace.read_bytes())["traceEvents"] if event.get("cat") == "kernel"]
    events.sort(key=lambda event: event["ts"])
    count = len(events) // RUNS
    found = []
    for i, event in enumerate(events[:count]):
        name = re.sub(r"\(anonymous namespace\)::|\([\w: ]+\)(?=[\w-])", "", event["name"]).partition("(")[0]
        us = statistics.median(float(same["dur"]) for same in events[i::count])
        found.append((name, round(us, 2), *(event["args"].get(key) for key in ("grid", "block", "shared memory"))))
    return found


def profiled(size: str) -> Iterator[dict[str, Any]]:
    """Yield launches by weight type and number of tokens.

    Some also have adapters. Launches of masks and penalties come last.
    """

    def forward(stage: Stage, inputs: StepInputs) -> None:
        stage.logits(stage.forward(stage.embed(inputs.tokens), None, inputs)[0], inputs)

    for is_hopper in (True, False):
        if not is_hopper:
            hopper_gemm.hopper_gemm_unavailable_reason = lambda device: "measured without"  # type: ignore[assignment]
        for dtype in PROFILED_DTYPES:
            stage = random_stage(size, GPU, StateFormat.FP16, dtype=dtype, layers=COPIES + 1)
            stage.allocate_slots(max(PROFILED_ROWS) + 2)
            steps = [decode_inputs(rows) for rows in PROFILED_ROWS]
            steps += [prefill_inputs(range(rows), length) for rows, length in PROFILED_PROMPTS]
            if dtype in ("fp16", "fp8"):
                stage.adapters.put(1, random_pairs(len(stage.layers), stage.width, 16, 1))
                for rows in (8, 320):
                    steps.append(decode_inputs(rows))
                    steps[-1].adapters = torch.ones(rows, dtype=torch.int64)
            for inputs in steps:
                about = {"dtype": dtype, "hopper": is_hopper, "tokens": len(inputs.tokens)}
                yield about | {
                    "adapters": inputs.adapters is not None,
                    "launches": launches(partial(forward, stage, inputs)),
                }
    rows = list(range(320))
    logits, masks = (
        torch.randn(len(rows), VOCAB, device=GPU),
        torch.zeros(len(rows), VOCAB // 32, dtype=torch.int32, device=GPU),
    )
    sampler = RapidSampler(len(rows), VOCAB, GPU, [])
    for row in rows:
        sampler.admit(row, SamplingParams(presence_penalty=1.0))
    runs = (lambda: sampler.apply_masks(logits, masks), lambda: sampler.append_tokens(rows, [[5, 6, 7, 8]] * len(rows)))
    yield {"rows": len(rows), "launches": [launch for run in runs for launch in launches(run)]}


@torch.inference_mode()
def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--launches", action="store_true", help="only print the launches; used by the run without it")
    args = parser.parse_args()
    if args.launches:
        size = next(size for size, (_, width, _) in SIZES.items() if width == args.width)
        for result in profiled(size):
            print(json.dumps(result), flush=True)
        return
    results: list[dict[str, Any]] = []
    for case in cases(Bench(args.width)):
        us = timed_in_graph(case)
        result = {"kernel": case.name, "rows": case.rows, "us": round(us, 2), "gb_s": round(case.bytes / us / 1e3, 1)}
        result |= {"tflops": round(case.flops / us / 1e6, 1)} if case.flops else {}
        results.append(result)
        print(json.dumps(result), flush=True)
    torch.cuda.empty_cache()
    command = [sys.executable, "-m", "bench.kernels", "--launches", "--width", str(args.width)]
    serial = os.environ | {"CUDA_LAUNCH_BLOCKING": "1"}
    lines = subprocess.run(command, env=serial, stdout=subprocess.PIPE, text=True, check=False).stdout.splitlines()
    steps = [json.loads(line) for line in lines if line.startswith("{")]
    head = {"machine": torch.cuda.get_device_name(GPU), "width": args.width}
    finish(head | {"results": results, "steps": steps}, args.out)


if __name__ == "__main__":
    main()
