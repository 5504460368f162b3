"""The command `plan`: how much memory a model needs with a number of rows, and what fits on a GPU or a CPU."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from programs.settings import CommandParser, reports_errors
from programs.settings.model_source import resolve
from programs.tools.inspect_file import BYTES_PER_NUMBER, GPUS_GB, OVERHEAD, slot_bytes, weight_bytes
from rwkv_batch.errors import StartupError
from rwkv_batch.model.state import RWKV7, StateFormat
from rwkv_batch.model.weights import Weights, open_weights
from state_pool.config import PoolConfig
from state_pool.layout import FIRST_FREE_SLOT

MEASURED_ROWS = (1, 8, 32, 128, 320, 960)
MEASURED = {
    ("fp16", "fp16"): (342, 2229, 7202, 20504, 27363, 30838),
    ("fp8", "fp16"): (585, 3406, 11202, 28407, 36636, 43254),
    ("fp8", "int8"): (596, 3730, 12121, 31434, 42822, 49760),
    ("w8a8", "int8"): (375, 2939, 10827, 28759, 40467, 47385),
}
"""Tokens/s of the 7.2B shape on one H200 by (weights, states), from docs/performance.md."""
_MEASURED_PARAMETERS = 7.2e9
MEASURED_CPU = {1: 89, 32: 1309}
"""Tokens/s by rows of the 0.1B shape with bf16 weights, on two threads of a Xeon with AMX."""
_MEASURED_CPU_PARAMETERS = 0.19e9
_ON_CPU = {"fp8": "bf16", "int4": "int8"}
"""`--dtype` -> the type in which a CPU keeps the weights."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:GB|GiB|G)?", re.IGNORECASE)
_MAX_GB, _MAX_ROWS = 10_000, 1_000_000


@reports_errors(StartupError, OSError)
def main(arguments: Sequence[str]) -> int:
    """Print the memory by part. Returns the exit code: 2 for a wrong flag, 1 if it does not fit."""
    given, _ = build_parser().parse(arguments)
    weights = open_weights(Path(resolve(given.model)))
    is_cpu = given.cpu is not None
    dtype = given.dtype or ("fp32" if is_cpu else "fp16")
    form = StateFormat(given.wkv_state) if given.wkv_state else None
    lines, fits = plan(weights, given.cpu if is_cpu else given.gpu, given.rows, dtype, form, is_cpu=is_cpu)
    sys.stdout.writelines(f"{name:<12}{text}\n" for name, text in lines)
    return 0 if fits else 1


def build_parser() -> CommandParser:
    """Returns the parser of `plan`."""
    parser = CommandParser(
        "plan",
        "Says how much memory a model needs, and what fits on a GPU or a CPU. No GPU is needed.",
        "--model model.pth --gpu 24GB --rows 320 --dtype fp8 --wkv-state int8\n--model model.pth --cpu 16GB --rows 32",
    )
    parser.add_argument("--model", required=True, metavar="FILE", help="a model, as --model-path of serve")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--gpu", type=_gigabytes, default=24.0, metavar="SIZE", help="memory, as 24GB; default: 24GB")
    where.add_argument("--cpu", type=_gigabytes, metavar="SIZE", help="no GPU: the machine's free memory, as 16GB")
    parser.add_argument("--rows", type=_rows, default=320, metavar="N", help="--max-running; default: 320")
    parser.add_argument("--dtype", choices=[*BYTES_PER_NUMBER], help="default: fp16, on a CPU fp32")
    parser.add_argument("--wkv-state", choices=["fp32", "fp16", "int8"], help="default: fp16, on a CPU fp32")
    return parser


def plan(
    weights: Weights, memory_gb: float, rows: int, dtype: str, form: StateFormat | None, *, is_cpu: bool = False
) -> tuple[list[tuple[str, str]], bool]:
    """Return lines (name, text), and whether the model fits with these rows."""
    pool = PoolConfig()
    dtype = _ON_CPU.get(dtype, dtype) if is_cpu else dtype
    form = form if weights.shape.version == RWKV7 else None
    slot = slot_bytes(weights.shape, "fp32" if is_cpu else dtype, form)  # a CPU's activations are fp32
    size = weight_bytes(weights, dtype)
    parked = pool.l1_sessions + pool.prefix_cache_slots + FIRST_FREE_SLOT
    slots = rows + max(4, rows // 8) + parked
    work = (OVERHEAD - 1) * (size + slots * slot)
    needed = (size + slots * slot + work) / 1e9
    most = int(((memory_gb * 1e9 / OVERHEAD - size) / slot - parked) * 8 / 9)
    fits = needed <= memory_gb
    lines = [
        ("model", f"{weights.shape.describe()}, {weights.num_parameters / 1e6:,.0f} million parameters"),
        ("weights", f"{size / 1e9:.2f} GB in {dtype}"),
        ("states", f"{slots * slot / 1e9:.2f} GB: {slots} slots of {slot / 1e6:.2f} MB, {rows} rows at once"),
        ("work space", f"{work / 1e9:.2f} GB, estimated as {OVERHEAD - 1:.0%}"),
        ("needed", f"{needed:.2f} GB of {memory_gb:g} GB: {'fits' if fits else 'does not fit'}"),
        ("most rows", f"{most}" if most >= 1 else "none"),
    ]
    advice = () if fits else _advice(weights, memory_gb, most, dtype, is_cpu)
    speed = _cpu_speed(weights, rows) if is_cpu else _speed(weights, rows, dtype, form)
    return [*lines, *advice, *speed], fits


def _advice(weights: Weights, memory_gb: float, most: int, dtype: str, is_cpu: bool) -> Iterator[tuple[str, str]]:
    names = [name for name in BYTES_PER_NUMBER if not is_cpu or name not in ("fp16", *_ON_CPU)]
    smaller = [name for name in names if BYTES_PER_NUMBER[name] < BYTES_PER_NUMBER[dtype]]
    fitting = [name for name in smaller if weight_bytes(weights, name) * OVERHEAD / 1e9 < memory_gb]
    gpus = [f"a GPU of {size} GB ({names})" for size, names in GPUS_GB.items() if size > memory_gb]
    remedies = [
        *(["fewer --rows"] if most >= 1 else []),
        *(f"--dtype {name}" for name in fitting[:1]),
        *(["a machine with more memory"] if is_cpu else [*gpus[:1], "several GPUs with --pp-devices"]),
    ]
    yield "remedy", ", or ".join(remedies)


def _cpu_speed(weights: Weights, rows: int) -> Iterator[tuple[str, str]]:
    nearest = min(MEASURED_CPU, key=lambda count: abs(count - rows))
    yield (
        "speed",
        f"not measured for this case. The nearest one: {MEASURED_CPU[nearest]:,} tokens/s with {nearest} rows of a "
        "0.1B model, bf16 weights, two threads of a Xeon with AMX",
    )
    yield "", f"this model has {weights.num_parameters / _MEASURED_CPU_PARAMETERS:.2g} times its parameters"


def _speed(weights: Weights, rows: int, dtype: str, form: StateFormat | None) -> Iterator[tuple[str, str]]:
    """Yield the nearest measured speed."""
    form = form or StateFormat.FP16
    measured = MEASURED.get((dtype, form.value)) or next(
        (figures for (name, _), figures in MEASURED.items() if name == dtype), MEASURED["fp16", "fp16"]
    )
    key = next(key for key, figures in MEASURED.items() if figures is measured)
    nearest = min(MEASURED_ROWS, key=lambda count: abs(count - rows))
    yield (
        "speed",
        f"not measured for this case. The nearest one: {measured[MEASURED_ROWS.index(nearest)]:,} tokens/s with "
        f"{nearest} rows of a 7.2B model, {key[0]} weights, {key[1]} states, on one H200",
    )
    yield "", f"this model has {weights.num_parameters / _MEASURED_PARAMETERS:.2g} times its parameters"


def _gigabytes(text: str) -> float:
    found = _SIZE.fullmatch(text.strip())
    if found is None or not 0 < float(found[1]) <= _MAX_GB:
        raise argparse.ArgumentTypeError(f"takes a size as 24GB, up to {_MAX_GB} GB, got {text!r}")
    return float(found[1])


def _rows(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MAX_ROWS:
        raise argparse.ArgumentTypeError(f"takes a number of rows from 1 to {_MAX_ROWS}, got {text!r}")
    return int(text)
