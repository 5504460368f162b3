"""Decode and prefill speed of a whole forward on one GPU.

The weights are random and have a released shape.

    python -m bench.gpu --size 7.2b --wkv-state fp16
    python -m bench.gpu --dtype fp16 fp8 --seconds 5     # one dtype after the other

A decode step is the service's own CUDA graph: embedding, layers, head, and sampling with mixed parameters and
penalties; the token is fed back on the device. Prompts are read by graphs, too, if the service has one of their size.
Prints one JSON line per measurement; the last line has all.

Bounds: below about 200 rows the bytes of weights and states; above, the GEMMs and the power limit of the card
(`watts`, `sm_mhz`). Run `pytest -m gpu test/gpu/test_gpu_quant.py` first to check that the kernels are correct.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench.tools.gpu_model import SIZES, VOCAB, active_share, random_stage
from bench.tools.record import Arguments, commit, finish
from bench.tools.timers import device_ms, nvidia_smi
from rwkv_batch.model.quant.formats import Format
from rwkv_batch.model.state import StateFormat
from rwkv_batch.model.step_inputs import StepInputs, step_inputs
from rwkv_batch.runner.graphs.capture import make_graph_stages
from rwkv_batch.runner.graphs.decode import DecodeGraphs, DeviceSampler
from rwkv_batch.runner.graphs.prefill import PrefillGraphs
from rwkv_batch.runner.graphs.prefill_inputs import LONG_ROWS, smallest_fitting, usable_sizes
from rwkv_batch.runner.pipeline import Stage
from state_pool.layout import FIRST_FREE_SLOT, ZERO_SLOT

BATCHES = (1, 8, 32, 64, 128, 256, 320, 512, 960)
PREFILLS = ((1, 512), (1, 4096), (8, 512), (32, 512))
SECONDS = 0.6
BYTES: dict[Format | None, float] = {None: 2, Format.FP8: 1, Format.INT4: 0.5 + 4 / 128, Format.W8A8: 1}
"""Bytes per element of a large matrix."""
GPU = torch.device("cuda", 0)


@dataclass(slots=True)
class Ceilings:
    """Bandwidth and GEMM rate that this GPU reaches in this run."""

    copy_tb_s: float
    gemm_tflops: float


def timed(work: Callable[[], object], seconds: float) -> float:
    """Return milliseconds per call, over the calls that fit into `seconds`. Two untimed calls come first."""
    for _ in range(2):
        work()
    return device_ms(work, max(3, int(seconds * 1e3 / device_ms(work))))


@contextmanager
def sample_power() -> Iterator[dict[str, float | None]]:
    """Sample power and clock of the GPU 20 times per second.

    When the block ends, the figures have the median of the later half of the samples; None without nvidia-smi.
    """
    figures: dict[str, float | None] = {"watts": None, "sm_mhz": None}
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    with nvidia_smi("power.draw,clocks.sm", 50, "-i", card) as samples:
        yield figures
    if late := samples[len(samples) // 2 :]:
        watts, sm_mhz = zip(*late, strict=True)
        figures |= {"watts": statistics.median(map(float, watts)), "sm_mhz": statistics.median(map(float, sm_mhz))}


def measure_ceilings() -> Ceilings:
    """Measure a copy of 4 GiB and a square GEMM.

    The copy counts read and write. The GEMM multiplies random fp16 matrices.
    """
    source = torch.randn(1 << 30, device=GPU)
    target = torch.empty_like(source)
    copy_ms = timed(lambda: target.copy_(source), 0.2)
    a, b = (torch.randn(8192, 8192, device=GPU, dtype=torch.float16) for _ in range(2))
    gemm_ms = timed(lambda: a @ b, 0.2)
    return Ceilings(8 * (1 << 30) / copy_ms / 1e9, 2 * 8192**3 / gemm_ms / 1e9)


def mixed_sampler(rows: int) -> tuple[DeviceSampler | None, str]:
    """Return the service's sampler with different parameters per row; None (greedy) if it is not available."""
    try:
        from sampling.params import SamplingParams
        from sampling.registry import choose_sampler

        sampler, _ = choose_sampler(("rapid",), GPU, rows, VOCAB, [])
    except (ImportError, RuntimeError) as error:
        return None, f"argmax, as rapid is not available ({error})"
    for req_slot in range(rows):
        params = SamplingParams(
            temperature=0.6 + 0.1 * (req_slot % 8),
            top_k=(0, 50, 200)[req_slot % 3],
            top_p=(0.3, 0.5, 0.9, 1.0)[req_slot % 4],
            presence_penalty=0.5 * (req_slot % 5),
            frequency_penalty=0.1 * (req_slot % 3),
            penalty_decay=0.99,
            seed=req_slot,
        )
        sampler.admit(req_slot, params)
    assert isinstance(sampler, DeviceSampler)
    return sampler, sampler.name


def decode(stage: Stage, batch: int, seconds: float) -> dict[str, Any]:
    """Measure a whole decode step, and the same step without sampling."""
    stage.allocate_slots(batch + 2)
    sampler, name = mixed_sampler(batch + 1)
    graphs = DecodeGraphs(make_graph_stages([stage], batch, 2), batch, sampler)
    graphs.sizes[-1] = batch  # exactly these rows, without padding
    req_slots, slots = list(range(batch)), list(range(2, batch + 2))
    graphs.tokens.store(req_slots, torch.randint(VOCAB, (batch,)))
    with sample_power() as power:
        ms = timed(lambda: graphs.run(req_slots, slots, slots), seconds)
    bare_ms = timed(lambda: graphs.run_logits(req_slots, slots, slots), seconds / 2)
    return {
        "kind": "decode",
        "B": batch,
        "T": 1,
        "ms": ms,
        "tok_s": batch / ms * 1e3,
        "sampler": name,
        "sampling_share": 1 - bare_ms / ms,
        **power,
    }


@torch.inference_mode()
def prefill(stage: Stage, batch: int, length: int, seconds: float) -> dict[str, Any]:
    """Measure whole prompts, from the zero state to the last token's logits."""
    stage.allocate_slots(batch + 2)
    inputs = prefill_inputs(batch, length)
    on_gpu, size = inputs.to(GPU), smallest_fitting(usable_sizes(max(*LONG_ROWS, batch)), inputs)

    def run() -> None:
        x, _ = stage.forward(stage.embed(on_gpu.tokens), None, on_gpu)
        stage.logits(x, on_gpu)

    work = run
    if size is not None:
        logits = torch.empty(size.rows, VOCAB, device=GPU)
        graphs = PrefillGraphs(make_graph_stages([stage], size.tokens, 2), logits, sizes=[size])
        graphs.warm_up()
        work = partial(graphs.run, inputs, size) if graphs.sizes else run
    with sample_power() as power:
        ms = timed(work, seconds)
    return {
        "kind": "prefill",
        "B": batch,
        "T": length,
        "graph": work is not run,
        "ms": ms,
        "tok_s": batch * length / ms * 1e3,
        **power,
    }


def prefill_inputs(rows: int, length: int) -> StepInputs:
    """Return random prompts of one length."""
    prompts = torch.randint(VOCAB, (rows, length)).tolist()
    return step_inputs(prompts, [ZERO_SLOT] * rows, [*range(FIRST_FREE_SLOT, FIRST_FREE_SLOT + rows)], [*range(rows)])


def ceiling_shares(stage: Stage, result: dict[str, Any], ceilings: Ceilings) -> dict[str, float]:
    """Return the shares of both ceilings: bytes to move (weights once, states in and out) and products."""
    layer = stage.layers[-1]
    width, rows = stage.width, result["B"]
    low = sum(m.weight.numel() for m in (layer.w1, layer.w2, layer.a1, layer.a2, layer.g1, layer.g2)) + 2 * 96 * width
    large = len(stage.layers) * 12 * width * width
    head = VOCAB * width
    storage = stage.precision.storage
    moved = BYTES[storage] * (large + head) + 2 * len(stage.layers) * low + 2 * rows * stage.slot_bytes
    flops = 2 * rows * (result["T"] * (large + len(stage.layers) * low) + head)
    seconds = result["ms"] / 1e3
    return {
        "of_bandwidth": moved / seconds / (ceilings.copy_tb_s * 1e12),
        "of_compute": flops / seconds / (ceilings.gemm_tflops * 1e12),
    }


def parse_arguments() -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.add_argument("--size", choices=SIZES, default="7.2b")
    parser.add_argument("--dtype", nargs="+", choices=("fp16", "fp8", "int8", "int4"), default=["fp16"])
    parser.add_argument("--wkv-state", type=StateFormat, choices=list(StateFormat), default=StateFormat.FP16)
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES)
    parser.add_argument("--no-prefill", action="store_true")
    parser.add_argument("--deterministic", action="store_true", help="as the service with --deterministic")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="per measurement; use at least 1 to reach the power limit"
    )
    return parser.parse_args()


def measure(dtype: str, args: argparse.Namespace, ceilings: Ceilings) -> Iterator[dict[str, Any]]:
    before = torch.cuda.memory_allocated(GPU)
    stage = random_stage(args.size, GPU, args.wkv_state, dtype=dtype, deterministic=args.deterministic)
    weights_gb = (torch.cuda.memory_allocated(GPU) - before) / 1e9
    stage.allocate_slots(12)
    active = {b: round(share, 4) for b, share in active_share(stage, (1, 8)).items()}
    yield {"kind": "weights", "dtype": dtype, "weights_gb": round(weights_gb, 3), "active_share": active}
    works: list[Callable[[], dict[str, Any]]] = [lambda b=b: decode(stage, b, args.seconds) for b in args.batches]  # type: ignore[misc]
    if not args.no_prefill:
        works += [lambda b=b, t=t: prefill(stage, b, t, args.seconds) for b, t in PREFILLS]  # type: ignore[misc]
    for work in works:
        result = work()
        result |= ceiling_shares(stage, result, ceilings) | {
            "size": args.size,
            "dtype": dtype,
            "wkv_state": args.wkv_state,
        }
        yield {k: round(v, 4) if isinstance(v, float) else v for k, v in result.items()}
        release_memory()


def release_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    args = parse_arguments()
    ceilings = measure_ceilings()
    head = {
        "machine": torch.cuda.get_device_name(GPU),
        "torch": torch.__version__,
        "commit": commit(args.commit),
        "seconds": args.seconds,
        "copy_tb_s": round(ceilings.copy_tb_s, 3),
        "gemm_tflops": round(ceilings.gemm_tflops, 1),
    }
    print(json.dumps(head), flush=True)
    results: list[dict[str, Any]] = []
    for dtype in args.dtype:
        for result in measure(dtype, args, ceilings):
            results.append(result)
            print(json.dumps(result), flush=True)
        release_memory()
    finish({**head, "results": results}, args.out)


if __name__ == "__main__":
    main()
