"""Milliseconds per sampling step, by sampler, rows and parameters.

Also the time to read the logits once.

    python -m bench.sampling [--device cuda|cpu] [--samplers rapid,flashinfer] [--rows 1,320] [--out FILE]
    python -m bench.sampling --model-path FILE --dtype int8 --rows 320     # whole steps of an engine, too

Prints one JSON line per measurement; the last line has all. On CUDA, steps rotate over several sets of logits, larger
in total than the cache. `rapid` without filters is timed in CUDA graph replays, as the engine runs it; the others are
timed as called.

`--model-path` adds an engine's steps with the last number of rows, by the parameters of `--cases`: `ratio` is a step's
time over that of `open`, the median over the rounds. The cases alternate. Each row samples `--tokens`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from bench.tools.record import Arguments, finish, origin
from bench.tools.timers import median_s
from bench.traffic import PENALTIES
from demo.engine_client import open_engine, run_jobs
from rwkv_batch.engine import Engine
from rwkv_batch.request import GenerateRequest
from sampling.cpu import CpuSampler
from sampling.filtered_sampler import FilteredSampler
from sampling.params import Filters, Method, SamplingParams
from sampling.rapid import RapidSampler
from sampling.registry import SAMPLERS, sampler_class
from sampling.row_context import RowContext
from sampling.sampler import Sampler

VOCAB = 65536
CASES = {
    "greedy": [SamplingParams(temperature=0.0)],
    "open": [SamplingParams()],
    "noise": [SamplingParams(method=Method.NOISE, noise=2.0)],
    "top_k50_top_p0.6": [SamplingParams(top_k=50, top_p=0.6)],
    "all_parameters": [msgspec.structs.replace(PENALTIES, logit_bias={5: 1.0, 77: -2.0})],
    "top_k500": [SamplingParams(top_k=500)],
    "top_p0.9": [SamplingParams(top_p=0.9)],
    "top_p0.9_flat": [SamplingParams(top_p=0.9, temperature=5.0)],
    "all_samplers": [
        msgspec.structs.replace(
            PENALTIES,
            temperature=0.9,
            filters=Filters(
                min_p=0.02,
                typical_p=0.95,
                top_n_sigma=3.0,
                xtc_probability=0.3,
                repetition_penalty=1.1,
                dry_multiplier=0.8,
                dynatemp_range=0.2,
                epsilon_cutoff=1e-4,
                eta_cutoff=1e-4,
            ),
        )
    ],
    "typical_p": [SamplingParams(filters=Filters(typical_p=0.95))],
    "mirostat1": [SamplingParams(filters=Filters(mirostat=1))],
    "mirostat2": [SamplingParams(filters=Filters(mirostat=2))],
    "mixed": [PENALTIES, SamplingParams(temperature=0.0), SamplingParams(top_p=0.9), SamplingParams()],
}
REPEATS = 5
"""Measurements that are not of a graph."""
HISTORY = 300
"""Steps before the measurement, so that penalties have tokens to act on."""


@dataclass(frozen=True)
class Setting:
    """Properties shared by all measurements of a run."""

    device: torch.device
    bandwidth: float
    """bytes/s of a large copy, read and write"""


def copy_bandwidth(device: torch.device) -> float:
    """Return bytes/s of a copy much larger than the cache. Counts read and write."""
    source = torch.ones(2**29 if device.type == "cuda" else 2**26, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_s(device, lambda: target.copy_(source), 5)


def logits_sets(rows: int, device: torch.device) -> list[Tensor]:
    """Return several fp32 logits [rows, V].

    Their distribution is peaked like a model's. On CUDA they have at least 256 MB in total.
    """
    count = min(64, max(2, 2**28 // (rows * VOCAB * 4))) if device.type == "cuda" else 2
    generator = torch.Generator(device).manual_seed(rows)
    return [torch.randn(rows, VOCAB, generator=generator, device=device) * 3 for _ in range(count)]


def graphed(sampler: Sampler, sets: list[Tensor], rows: int) -> Callable[[], object]:
    """Return the replay of a CUDA graph. It has one step per set of logits [rows, V]."""
    req_slots = torch.arange(rows, dtype=torch.int32, device=sets[0].device)
    out = torch.empty(rows, dtype=torch.int64, device=sets[0].device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for logits in sets:
            sampler.sample_on_device(logits, req_slots, out)  # type: ignore[attr-defined]
    return graph.replay


def measure(setting: Setting, name: str, rows: int, case: str) -> dict[str, object]:
    device, choice = setting.device, CASES[case]
    plain = sampler_class(name)(rows, VOCAB, device, [])
    has_filters = any(params.filters is not None for params in choice)
    sampler: Sampler | FilteredSampler = plain
    if has_filters and not isinstance(plain, CpuSampler | RapidSampler):
        sampler = FilteredSampler(plain, rows, VOCAB, device, [])
    for req_slot in range(rows):
        params = msgspec.structs.replace(choice[req_slot % len(choice)], seed=req_slot)
        if isinstance(sampler, FilteredSampler):
            sampler.admit(req_slot, params, RowContext())
        else:
            sampler.admit(req_slot, params)
    sets, req_slots = logits_sets(rows, device), list(range(rows))
    history = HISTORY if any(params.has_penalties for params in choice) and device.type == "cuda" else 2
    for step in range(history):
        sampler.sample(sets[step % len(sets)].clone(), req_slots)
    if name == "rapid" and not has_filters:
        seconds = median_s(device, graphed(plain, sets, rows), 20) / len(sets)
    else:
        # Samplers overwrite the logits: each step gets a copy of its own, made before, and freed after all steps.
        fresh = [logits.clone() for _ in range(REPEATS + 1) for logits in sets[:2]]
        copies = iter(fresh)
        steps = lambda: [sampler.sample(next(copies), req_slots) for _ in sets[:2]]  # noqa: E731
        seconds = median_s(device, steps, REPEATS) / len(sets[:2])
    moved = sets[0].nbytes
    floor = moved / setting.bandwidth
    return {
        "kind": "sampling",
        "sampler": name,
        "B": rows,
        "params": case,
        "dtype": "float32",
        "ms": round(seconds * 1e3, 4),
        "read_once_ms": round(floor * 1e3, 4),
        "share_of_read_once": round(floor / seconds, 3),
    }


def measurements(setting: Setting, args: argparse.Namespace) -> Iterable[dict[str, object]]:
    """Yield all requested measurements; reports an unavailable sampler with its reason."""
    for name in args.samplers.split(","):
        reason = refusal(name, setting.device)
        if reason is not None:
            yield {"kind": "refused", "sampler": name, "why": reason}
            continue
        for rows in (int(number) for number in args.rows.split(",")):
            for case in args.cases.split(","):
                yield measure(setting, name, rows, case)


def engine_steps(args: argparse.Namespace, rows: int) -> Iterable[dict[str, object]]:
    """Yield for each case an engine's milliseconds per step of `rows` rows, and its ratio to the case `open`."""
    times: dict[str, list[float]] = {case: [] for case in dict.fromkeys(("open", *args.cases.split(",")))}
    with open_engine(args.model_path, device=args.device, dtype=args.dtype, wkv_state=args.wkv_state) as client:
        for number in range(args.rounds + 1):  # the first one warms up
            for case in list(times)[:: -1 if number % 2 else 1]:
                choice = CASES[case]
                seconds = engine_seconds(client.engine, [choice[row % len(choice)] for row in range(rows)], args.tokens)
                if number:
                    times[case].append(seconds)
    for case, seconds in times.items():
        ratios = [one / plain for one, plain in zip(seconds, times["open"], strict=True)]
        yield {
            "kind": "engine",
            "B": rows,
            "params": case,
            "dtype": args.dtype,
            "ms": round(statistics.median(seconds) * 1e3, 3),
            "ratio": round(statistics.median(ratios), 4),
            "range": [round(min(ratios), 4), round(max(ratios), 4)],
        }


def engine_seconds(engine: Engine, choice: list[SamplingParams], tokens: int) -> float:
    """Return the median seconds of a step while all rows sample; one row per element of `choice`."""
    prompt = [(7919 * i * i) % 600 + 300 for i in range(tokens * 2 // 3)]
    requests = [
        GenerateRequest(
            prompt=prompt,
            max_tokens=tokens,
            sampling=msgspec.structs.replace(params, seed=row),
            ignore_eos=True,
            chunk_size=1,
            use_prefix_cache=False,
        )
        for row, params in enumerate(choice)
    ]
    times = run_jobs(engine, [requests])[0].times
    return statistics.median(after - before for before, after in itertools.pairwise(times[tokens // 6 : -2]))


def refusal(name: str, device: torch.device) -> str | None:
    """Return why a sampler cannot be measured, or None."""
    try:
        return sampler_class(name).unavailable_reason(device)
    except ImportError as error:
        return str(error)


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--samplers", default=",".join(SAMPLERS))
    parser.add_argument("--rows", default="1,32,320")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--model-path", type=Path, help="also measures steps of an engine with this model")
    parser.add_argument("--dtype", default="auto", help="of the engine's weights")
    parser.add_argument("--wkv-state", default="fp32")
    parser.add_argument("--tokens", type=int, default=96, help="of each of the engine's rows")
    parser.add_argument("--rounds", type=int, default=5, help="of the engine's steps")
    args = parser.parse_args()
    device = torch.device(args.device)
    setting = Setting(device, copy_bandwidth(device))
    results = []
    steps = engine_steps(args, int(args.rows.split(",")[-1])) if args.model_path else ()
    for result in itertools.chain(measurements(setting, args), steps):
        print(json.dumps(result), flush=True)
        results.append(result)
    report: dict[str, object] = origin(args.commit, "torch") | {"copy_gb_s": round(setting.bandwidth / 1e9)}
    report |= {"device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU", "results": results}
    finish(report, args.out)


if __name__ == "__main__":
    main()
