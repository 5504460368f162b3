"""RWKV-7 on a CPU compared with the `rwkv` package: decode and prefill of a random 0.1B model.

    python -m bench.cpu [--out bench/results/cpu.json] [--seconds 240] [--no-peer]
    python -m bench.cpu --no-peer --llama-cpp BUILD     # a folder with bin/llama-batched-bench and bin/llama-quantize
    python -m bench.cpu --no-peer --llama-cpp BUILD --cells "decode_1 bf16,decode_1 int4"     # some alone
    ATEN_CPU_CAPABILITY=avx2 python -m bench.cpu --instructions avx2 --no-peer --llama-cpp BUILD_FOR_AVX2

Each round runs every measurement once:
- decode: tokens/s of a step loop over B rows (B = 1, 8, 32, 128), one token per row and step, logits of every row, no
  sampling. The peer decodes one stream; it cannot batch.
- prefill: prompt tokens/s of 1 x 512 (one call for both) and 16 x 128 (one ragged step here, one call per prompt for
  the peer), from the zero state, with the logits of each prompt's last token.

The peer runs as "cpu fp32" and "cpu bf16"; the faster one of a round counts. This project runs with --dtype fp32, bf16,
int8 and w8a8; the last two are also compared with its own bf16. A ratio compares results of one round, and its median
over the rounds is the figure: on a shared machine ratios are stable, absolute figures are not. `--no-peer` skips the
peer. Its rounds take minutes on a processor without bf16 instructions.

`--llama-cpp` compares with llama.cpp instead: the same model as a GGUF file of F32, BF16, Q8_0 and Q4_0, next to our
fp32, bf16, int8 and int4. Its rounds need no warm-up: each process has one. It decodes 16 tokens of one row five times,
and 8 tokens of more rows.

Bounds: a decode step of one row reads every matrix once, so tokens/s <= bandwidth / bytes of the matrices. Bandwidth is
that of reading (torch's sum over 512 MiB) and of copying 512 MiB (reads plus writes), in the same rounds; the report
has decode_1's share of both. With --dtype fp32, matrices whose values fit bf16 (all public files) are stored as bf16:
the same bytes, three times the multiplications with AMX. Large batches and prefill are compute bound.

On shared cores, spinning threads stall both sides for whole time slices. Set OMP_WAIT_POLICY=PASSIVE there.

Prints machine, versions and commit; the last line is JSON. Takes about 5 minutes on 2 cores.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import io
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.tools.llama_cpp import LlamaCpp
from bench.tools.record import Arguments, finish, origin
from bench.tools.timers import host_s
from demo.random_weights import write_random_model
from native.instruction_sets import INSTRUCTION_SETS
from rwkv_batch.kernels.cpu import library as cpu_library
from rwkv_batch.model.step_inputs import step_inputs
from rwkv_batch.model.weights import open_weights
from rwkv_batch.runner.pipeline import Pipeline

LAYERS, WIDTH, VOCAB = 12, 768, 65536
BATCHES = (1, 8, 32, 128)
STEPS = {1: 15, 8: 7, 32: 5, 128: 3}
"""Rows -> timed steps; the median counts."""
DTYPES = ("fp32", "bf16")
SMALL = ("int8",)
"""Compared with bf16."""
OURS = (*DTYPES, *SMALL)
FIRST_SLOT = 2

Task = Callable[[], float]
"""Runs once; returns its rate (tokens/s or GB/s)."""


def rate(amount: float, work: Callable[[], Any], times: int = 1) -> float:
    """Return amount / median seconds of `work` over `times` runs."""
    return amount / statistics.median(host_s(work) for _ in range(times))


def prompt(length: int) -> list[int]:
    """Return `length` token ids spread over the vocabulary."""
    return [(7919 * i) % 65000 + 1 for i in range(length)]


def our_tasks(model: Pipeline, dtype: str) -> dict[str, Task]:
    """Return decode and prefill tasks of this project's pipeline."""

    def decode(rows: int) -> float:
        slots = list(range(FIRST_SLOT, FIRST_SLOT + rows))
        inputs = step_inputs([[100 + i] for i in range(rows)], slots, slots, list(range(rows)))
        return rate(rows, lambda: model.forward(inputs), STEPS[rows])

    def prefill(rows: int, length: int) -> float:
        slots = list(range(FIRST_SLOT, FIRST_SLOT + rows))
        inputs = step_inputs([prompt(length)] * rows, [0] * rows, slots, list(range(rows)))
        return rate(rows * length, lambda: model.forward(inputs))

    tasks: dict[str, Task] = {f"decode_{rows} {dtype}": functools.partial(decode, rows) for rows in BATCHES}
    tasks[f"prefill_1x512 {dtype}"] = lambda: prefill(1, 512)
    tasks[f"prefill_16x128 {dtype}"] = lambda: prefill(16, 128)
    return tasks


def peer_tasks(path: Path, dtype: str) -> dict[str, Task]:
    """Return the same tasks of the `rwkv` package."""
    os.environ |= {"RWKV_V7_ON": "1", "RWKV_JIT_ON": "1", "RWKV_CUDA_ON": "0"}
    with contextlib.redirect_stdout(io.StringIO()):
        from rwkv.model import RWKV

        model = RWKV(model=str(path.with_suffix("")), strategy=f"cpu {dtype}")
    _, state = model.forward(prompt(8), None)

    def decode() -> float:
        return rate(1, lambda: model.forward([7], state), STEPS[1])

    def prefill(rows: int, length: int) -> float:
        return rate(rows * length, lambda: [model.forward(prompt(length), None) for _ in range(rows)])

    # The peer runs one prompt at a time, so 3 of the 16 are enough for its rate.
    return {
        f"decode peer {dtype}": decode,
        f"prefill_1x512 peer {dtype}": lambda: prefill(1, 512),
        f"prefill_16x128 peer {dtype}": lambda: prefill(3, 128),
    }


def measure(tasks: dict[str, Task], seconds: float) -> list[dict[str, float]]:
    """Run rounds of all tasks until the time is used up, after a warm-up of those in this process."""
    rounds: list[dict[str, float]] = []
    started = time.monotonic()
    with torch.inference_mode():
        for name, task in tasks.items():
            if "llama.cpp" not in name:
                task()
        while True:
            before = time.monotonic()
            rounds.append({name: task() for name, task in tasks.items()})
            now = time.monotonic()
            if now - started + (now - before) > seconds:
                return rounds


def ratios(one: dict[str, float]) -> dict[str, float]:
    """Return this project's rates over the peer's better dtype, for one round; {} without the peer."""
    found = {}
    for name, ours in one.items():
        what, _, dtype = name.partition(" ")
        peer = what if what.startswith("prefill") else "decode"
        if dtype in OURS and f"{peer} peer {DTYPES[0]}" in one:
            found[name] = ours / max(one[f"{peer} peer {d}"] for d in DTYPES)
    return found


def ratios_to_llama_cpp(one: dict[str, float]) -> dict[str, float]:
    """Return this project's rates over llama.cpp's with as many bits, for one round; {} without it."""
    pairs = ((name, name.replace(" ", " llama.cpp ")) for name in one if "peer" not in name)
    return {name: one[name] / one[theirs] for name, theirs in pairs if theirs in one}


def limit_to(name: str) -> None:
    """Compile the kernels for a CPU with fewer instructions."""
    one = next(one for one in INSTRUCTION_SETS[platform.machine()] if one.name == name)
    cpu_library.LIBRARY = dataclasses.replace(cpu_library.LIBRARY, flags=(*cpu_library.LIBRARY.flags, *one.flags))


def machine(given_commit: str, has_peer: bool) -> dict[str, Any]:
    return {
        **origin(given_commit),
        "threads": torch.get_num_threads(),
        "amx": bool(cpu_library.library().rwkv_has_amx()),
        "load": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "rwkv": importlib.metadata.version("rwkv") if has_peer else None,
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
    }


def median_by_name(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: float(f"{statistics.median(row[name] for row in rows):.4g}") for name in rows[0]}


def run(seconds: float, has_peer: bool, llama_cpp: Path | None, cells: list[str], given_commit: str) -> dict[str, Any]:
    """Run the measurements and return the record. `llama_cpp`: a build of it; cells: names of tasks, empty for all."""
    dtypes = OURS if llama_cpp is None else (*OURS, "int4")
    with tempfile.TemporaryDirectory() as folder:
        path = write_random_model(Path(folder) / "random-0.1B.pth", LAYERS, WIDTH, VOCAB)
        weights = open_weights(path)
        block = torch.ones(128 << 20)
        copied = torch.empty_like(block)
        tasks: dict[str, Task] = {
            "bandwidth GB/s": lambda: rate(block.numel() * 4e-9, block.sum),
            "copy GB/s": lambda: rate(block.numel() * 8e-9, lambda: copied.copy_(block)),
        }
        for dtype in DTYPES if has_peer else ():
            tasks |= peer_tasks(path, dtype)
        other = None if llama_cpp is None else LlamaCpp(llama_cpp, weights, Path(folder), torch.get_num_threads())
        for dtype in dtypes:
            if cells and not any(cell.endswith(f" {dtype}") for cell in cells):
                continue
            model = Pipeline(weights, devices=("cpu",), dtype=dtype, kernels="cpu")
            model.allocate_slots(FIRST_SLOT + max(BATCHES))
            tasks |= our_tasks(model, dtype)
            if other is not None:
                tasks |= other.tasks(dtype, BATCHES)
        if cells:
            tasks = {
                name: task for name, task in tasks.items() if "GB" in name or name.replace(" llama.cpp", "") in cells
            }
        rounds = measure(tasks, seconds)
        names = [name.removesuffix(" bf16") for name in rounds[0] if name.endswith(" bf16") and name.count(" ") == 1]
        small = {
            d: [{n: one[f"{n} {d}"] / one[f"{n} bf16"] for n in names if f"{n} {d}" in one} for one in rounds]
            for d in SMALL
        }
    matrices = weights.num_bytes - weights.tensors["emb.weight"].numel() * 2
    return {
        "bench": "cpu",
        "model": f"{weights.shape.describe()}, random",
        **machine(given_commit, has_peer),
        "command": " ".join(["python -m bench.cpu", *sys.argv[1:]]),
        "rounds": len(rounds),
        "medians": median_by_name(rounds),
        "ratios": median_by_name([ratios(one) for one in rounds]),
        "over_llama_cpp": median_by_name(over := [ratios_to_llama_cpp(one) for one in rounds]),
        "over_llama_cpp_range": {
            name: [float(f"{end(one[name] for one in over):.4g}") for end in (min, max)] for name in over[0]
        },
        **{f"{dtype}_over_bf16": median_by_name(found) for dtype, found in small.items()},
        "matrix_mb_per_step": round(matrices / 1e6, 1),
    }


def report(result: dict[str, Any]) -> None:
    print(f"{result['cpu']}, {result['threads']} threads, AMX {result['amx']}, load {result['load']}")
    print(f"torch {result['torch']}, rwkv {result['rwkv']}, commit {result['commit']}")
    print(f"{result['rounds']} rounds, OMP_WAIT_POLICY {result['omp_wait_policy']}")
    medians, found = result["medians"], result["ratios"]
    for name, value in medians.items():
        times = f"{found[name]:8.2f} x the peer's best" if name in found else ""
        print(f"{name:28} {value:10.1f}{'' if 'GB' in name else ' tokens/s'} {times}")
    for name, times in result["over_llama_cpp"].items():
        low, high = result["over_llama_cpp_range"][name]
        print(f"{name}: {times:.2f} ({low:.2f} to {high:.2f}) x llama.cpp")
    for dtype in (one for one in DTYPES if f"decode_1 {one}" in medians):
        read = medians[f"decode_1 {dtype}"] * result["matrix_mb_per_step"] / 1e3
        limits = (f"{read / medians[name]:.0%} of {name.split()[0]}" for name in ("bandwidth GB/s", "copy GB/s"))
        print(f"decode_1 {dtype} reads {read:.1f} GB/s: {', '.join(limits)}")
    for dtype in SMALL:
        shares = ", ".join(f"{name} {times:.2f}" for name, times in result[f"{dtype}_over_bf16"].items())
        print(f"{dtype} over bf16: {shares}")


def main() -> int:
    parser = Arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=200.0, help="for the measuring rounds")
    parser.add_argument("--no-peer", action="store_true", help="our own types alone, in more rounds")
    sets = [one.name for one in INSTRUCTION_SETS[platform.machine()]]
    parser.add_argument("--instructions", choices=sets, help="that our kernels may use; without it the CPU's")
    parser.add_argument("--cells", default="", help='"prefill_16x128 fp32,decode_1 bf16" measures these alone')
    parser.add_argument("--llama-cpp", type=Path, help="a build of llama.cpp to compare with")
    options = parser.parse_args()
    if options.instructions:
        limit_to(options.instructions)
    if problem := cpu_library.library_unavailable_reason():
        print(problem, file=sys.stderr)
        return 1
    result = run(
        options.seconds,
        not options.no_peer,
        options.llama_cpp,
        list(filter(None, options.cells.split(","))),
        options.commit,
    )
    report(result)
    finish(result, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
