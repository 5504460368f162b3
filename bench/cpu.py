"""RWKV-7 on a CPU against the `rwkv` package: decode and prefill of a random model of the 0.1B shape.

    python -m bench.cpu [--out bench/results/cpu.json] [--seconds 240] [--no-peer]

Measures, in rounds, in which everything runs once, one after the other:
- decode: generated tokens per second of one step loop over B rows (B = 1, 8, 32, 128), each row one token a step,
  logits of every row made; without sampling. The peer decodes one stream, which is all it can.
- prefill: prompt tokens per second for 1 x 512 (one call on both sides) and 16 x 128 (ours one ragged step; the
  peer one call a prompt), from the zero state, logits of each prompt's last token made.
The peer runs as "cpu fp32" and as "cpu bf16"; its better figure of a round counts. Ours runs as --dtype fp32, bf16
and int8, which is also held against bf16. A ratio is ours over the peer's best in the same round, and the figure is the
median over the rounds; on a shared machine, ratios hold where absolute figures do not. `--no-peer` leaves the peer out,
whose rounds take minutes on a processor that has no products of bf16: what our own types are to each other is then the
median of many rounds.

What bounds it: decoding one row reads every matrix once, so tokens/s <= bandwidth / bytes of the matrices; both
are printed (bandwidth: torch's sum over 512 MiB on the same threads, in the same rounds). fp32 keeps matrices that
hold bf16 numbers, as all public files do, in bf16: the same bytes as bf16, three times the multiplications with
AMX. Large batches and prefill are bound by multiplications.

With other work on the same cores, waiting threads that spin stall both sides for whole time slices: set
OMP_WAIT_POLICY=PASSIVE there.

Prints the machine, the versions and the commit; the last line is JSON. Some 5 minutes on 2 cores, longer where the
peer's bf16 is slow.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from demo.random_weights import write_random_model
from rwkv_batch.kernels.cpu import library as cpu_library
from rwkv_batch.model.step_inputs import step_inputs
from rwkv_batch.model.weights import open_weights
from rwkv_batch.runner.pipeline import Pipeline

LAYERS, WIDTH, VOCAB = 12, 768, 65536
BATCHES = (1, 8, 32, 128)
STEPS = {1: 15, 8: 7, 32: 5, 128: 3}
"""Rows -> steps in a row, of which the median counts."""
DTYPES = ("fp32", "bf16")
OURS = (*DTYPES, "int8")
FIRST_SLOT = 2
TARGETS = {"decode_1": 1.5, "decode_32": 10.0, "prefill_1x512": 1.5, "prefill_16x128": 1.5}

Task = Callable[[], float]
"""Runs once; returns its rate (tokens/s, or GB/s)."""


def rate(amount: float, work: Callable[[], Any], times: int = 1) -> float:
    """amount / seconds that `work` takes, the median of some times in a row."""
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return amount / statistics.median(seconds)


def prompt(length: int) -> list[int]:
    """Token ids spread over the vocabulary."""
    return [(7919 * i) % 65000 + 1 for i in range(length)]


def our_tasks(model: Pipeline, dtype: str) -> dict[str, Task]:
    """Decode and prefill of our pipeline."""

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
    """The same of the `rwkv` package."""
    os.environ |= {"RWKV_V7_ON": "1", "RWKV_JIT_ON": "1", "RWKV_CUDA_ON": "0"}
    with contextlib.redirect_stdout(io.StringIO()):
        from rwkv.model import RWKV

        model = RWKV(model=str(path.with_suffix("")), strategy=f"cpu {dtype}")
    _, state = model.forward(prompt(8), None)

    def decode() -> float:
        return rate(1, lambda: model.forward([7], state), STEPS[1])

    def prefill(rows: int, length: int) -> float:
        return rate(rows * length, lambda: [model.forward(prompt(length), None) for _ in range(rows)])

    # Its prompts follow each other, so a few of the 16 tell its rate.
    return {
        f"decode peer {dtype}": decode,
        f"prefill_1x512 peer {dtype}": lambda: prefill(1, 512),
        f"prefill_16x128 peer {dtype}": lambda: prefill(3, 128),
    }


def measure(tasks: dict[str, Task], seconds: float) -> list[dict[str, float]]:
    """Rounds of all tasks, as many as fit into the time, after one to warm up that tells how long a round takes."""
    rounds: list[dict[str, float]] = []
    started = time.monotonic()
    with torch.inference_mode():
        while True:
            before = time.monotonic()
            rounds.append({name: task() for name, task in tasks.items()})
            now = time.monotonic()
            if len(rounds) > 1 and now - started + (now - before) > seconds:
                return rounds[1:]


def ratios(one: dict[str, float]) -> dict[str, float]:
    """Ours over the better of the peer's two, for one round; none where the peer did not run."""
    found = {}
    for name, ours in one.items():
        what, _, dtype = name.partition(" ")
        peer = what if what.startswith("prefill") else "decode"
        if dtype in OURS and f"{peer} peer {DTYPES[0]}" in one:
            found[name] = ours / max(one[f"{peer} peer {d}"] for d in DTYPES)
    return found


def machine() -> dict[str, Any]:
    """What ran this, for the record."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": names[0].partition(": ")[2] if names else platform.processor(),
        "threads": torch.get_num_threads(),
        "amx": bool(cpu_library.library().rwkv_has_amx()),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rwkv": importlib.metadata.version("rwkv"),
        "commit": commit.stdout.strip(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
    }


def ratios_of_bests(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Ours over the peer's, each in its own best round: what other work on the machine disturbs least."""
    best = {name: max(one[name] for one in rounds) for name in rounds[0]}
    return {name: float(f"{ratio:.4g}") for name, ratio in ratios(best).items()}


def median_by_name(rows: list[dict[str, float]]) -> dict[str, float]:
    """Median of each name over rounds."""
    return {name: float(f"{statistics.median(row[name] for row in rows):.4g}") for name in rows[0]}


def run(seconds: float, has_peer: bool = True) -> dict[str, Any]:
    """All of it; returns what the last line says."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_random_model(Path(folder) / "random-0.1B.pth", LAYERS, WIDTH, VOCAB)
        weights = open_weights(path)
        block = torch.ones(128 << 20)
        tasks: dict[str, Task] = {"bandwidth GB/s": lambda: rate(block.numel() * 4e-9, block.sum)}
        for dtype in DTYPES if has_peer else ():
            tasks |= peer_tasks(path, dtype)
        for dtype in OURS:
            model = Pipeline(weights, devices=("cpu",), dtype=dtype, kernels="cpu")
            model.allocate_slots(FIRST_SLOT + max(BATCHES))
            tasks |= our_tasks(model, dtype)
        rounds = measure(tasks, seconds)
        small = [{name: one[f"{name} int8"] / one[f"{name} bf16"] for name in TARGETS} for one in rounds]
    matrices = weights.num_bytes - weights.tensors["emb.weight"].numel() * 2
    return {
        "bench": "cpu",
        "model": f"{weights.shape.describe()}, random",
        **machine(),
        "command": f"python -m bench.cpu{'' if has_peer else ' --no-peer'}",
        "rounds": len(rounds),
        "medians": median_by_name(rounds),
        "ratios": median_by_name([ratios(one) for one in rounds]),
        "ratios_of_bests": ratios_of_bests(rounds),
        "int8_over_bf16": median_by_name(small),
        "targets": TARGETS,
        "matrix_mb_per_step": round(matrices / 1e6, 1),
    }


def report(result: dict[str, Any]) -> None:
    """For people, then the JSON line."""
    print(f"{result['cpu']}, {result['threads']} threads, AMX {result['amx']}, load {result['load']}")
    print(f"torch {result['torch']}, rwkv {result['rwkv']}, commit {result['commit']}")
    print(f"{result['rounds']} rounds, OMP_WAIT_POLICY {result['omp_wait_policy']}")
    medians, found, bests = result["medians"], result["ratios"], result["ratios_of_bests"]
    for name, value in medians.items():
        times = f"{found[name]:8.2f} x the peer's best ({bests[name]:.2f} best to best)" if name in found else ""
        print(f"{name:28} {value:10.1f}{'' if 'GB' in name else ' tokens/s'} {times}")
    bound = medians["bandwidth GB/s"] * 1e3 / result["matrix_mb_per_step"]
    print(f"bound of decode_1 by memory: {bound:.0f} tokens/s ({result['matrix_mb_per_step']} MB a step)")
    told = ", ".join(f"{name} {times:.2f}" for name, times in result["int8_over_bf16"].items())
    print(f"int8 over bf16: {told}")
    for name, target in result["targets"].items() if found else ():
        best = max(found[f"{name} {dtype}"] for dtype in OURS)
        print(f"{name}: {best:.2f} of {target} wanted: {'reached' if best >= target else 'NOT reached'}")
    print(json.dumps(result))


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--seconds", type=float, default=200.0, help="for the measuring rounds")
    parser.add_argument("--no-peer", action="store_true", help="our own types alone, in more rounds")
    options = parser.parse_args()
    if problem := cpu_library.build_unavailable_reason():
        print(problem, file=sys.stderr)
        return 1
    result = run(options.seconds, has_peer=not options.no_peer)
    report(result)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
