"""The command `plan`: how much memory a model needs with a number of rows, and what fits on a GPU or a CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from native import machine
from programs.settings import reports_errors
from programs.settings.model_source import resolve
from programs.tools.inspect_file import GPUS_GB, OVERHEAD, slot_bytes, weight_bytes
from programs.tools.parsers import BYTES_PER_NUMBER, plan_parser
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
    ("int8", "int8"): (610, 3619, 11825, 31683, 42608, 50465),
}
"""Tokens/s of the 7.2B shape on one H200 by (weights, states), from docs/performance.md."""
_MEASURED_PARAMETERS = 7.2e9
MEASURED_CPU = {1: 89, 32: 1309}
"""Tokens/s by rows of the 0.1B shape with bf16 weights, on two threads of a Xeon with AMX."""
_MEASURED_CPU_PARAMETERS = 0.19e9
_ON_CPU = {"fp8": "bf16"}
"""`--dtype` -> the type in which a CPU keeps the weights."""


@reports_errors(StartupError, OSError)
def main(arguments: Sequence[str]) -> int:
    """Print the memory by part. Returns the exit code: 2 for a wrong flag, 1 if it does not fit."""
    given, _ = plan_parser().parse(arguments)
    weights = open_weights(Path(resolve(given.model)))
    is_cpu, memory_gb, where = _this_machine() if given.cpu is given.gpu is None else _given(given.cpu, given.gpu)
    dtype = given.dtype or ("fp32" if is_cpu else "fp16")
    form = StateFormat(given.wkv_state) if given.wkv_state else None
    lines, fits = plan(weights, memory_gb, given.rows, dtype, form, is_cpu=is_cpu)
    sys.stdout.writelines(f"{name:<12}{text}\n" for name, text in [("on", where), *lines])
    return 0 if fits else 1


def _given(cpu: float | None, gpu: float | None) -> tuple[bool, float, str]:
    if gpu is not None:
        return False, gpu, f"a GPU of {gpu:g} GB"
    assert cpu is not None, "one of them is given"
    return True, cpu, f"a CPU with {cpu:g} GB of free memory"


def _this_machine() -> tuple[bool, float, str]:
    """Return whether the CPU is used, the memory in GB, and a description. Raises StartupError."""
    others = "--gpu SIZE or --cpu SIZE plans for another one"
    if gpu := machine.first_gpu():
        name, size = gpu
        return False, size / 1e9, f"this machine's {name}; {others}"
    free = machine.free_memory()
    if free is None:
        raise StartupError("the free memory of this machine is unknown; give --cpu SIZE or --gpu SIZE")
    return True, free / 1e9, f"this machine's CPU, {free / 1e9:.1f} GB of memory are free; {others}"


def plan(
    weights: Weights, memory_gb: float, rows: int, dtype: str, form: StateFormat | None, *, is_cpu: bool = False
) -> tuple[list[tuple[str, str]], bool]:
    """Return lines (name, text), and whether the model fits with these rows."""
    pool = PoolConfig()
    dtype = _ON_CPU.get(dtype, dtype) if is_cpu else dtype
    form = form if weights.shape.version == RWKV7 else None
    slot = slot_bytes(weights.shape, "fp32" if is_cpu else dtype, form)  # a CPU's activations are fp32
    size = weight_bytes(weights, dtype, is_cpu)
    parked = pool.l1_sessions + pool.prefix_cache_slots + FIRST_FREE_SLOT
    slots = rows + max(4, rows // 8) + parked
    work = (OVERHEAD - 1) * (size + slots * slot)
    needed = (size + slots * slot + work) / 1e9
    most = int(((memory_gb * 1e9 / OVERHEAD - size) / slot - parked) * 8 / 9)
    fits = needed <= memory_gb
    lines = [
        ("model", f"{weights.shape.describe()}, {weights.num_parameters / 1e6:,.0f} million parameters"),
        ("weights", f"{size / 1e9:.2f} GB in {dtype}"),
        ("states", f"{slots * slot / 1e9:.2f} GB: {slots:,} slots of {slot / 1e6:.2f} MB, {rows} rows at once"),
        ("work space", f"{work / 1e9:.2f} GB, estimated as {OVERHEAD - 1:.0%}"),
        ("needed", f"{needed:.2f} GB of {memory_gb:.4g} GB: {'fits' if fits else 'does not fit'}"),
        ("most rows", f"{most:,}" if most >= 1 else "none"),
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


def _counted(rows: int) -> str:
    return f"{rows} row{'s' * (rows != 1)}"


def _cpu_speed(weights: Weights, rows: int) -> Iterator[tuple[str, str]]:
    nearest = min(MEASURED_CPU, key=lambda count: abs(count - rows))
    yield (
        "speed",
        f"not measured for this case. The nearest one: {MEASURED_CPU[nearest]:,} tokens/s with {_counted(nearest)} of "
        "a 0.1B model, bf16 weights, two threads of a Xeon with AMX",
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
        f"{_counted(nearest)} of a 7.2B model, {key[0]} weights, {key[1]} states, on one H200",
    )
    yield "", f"this model has {weights.num_parameters / _MEASURED_PARAMETERS:.2g} times its parameters"
