"""Splits layers between devices: stages take equal time and fit into memory."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from rwkv_batch.model.layer import WHOLE, Cuts
from rwkv_batch.model.state import RWKV7
from rwkv_batch.model.weights import Weights

HEAD_FACTOR, HEAD_FACTOR_TWO_STAGES = 0.88, 0.6
"""Cost of a head weight, including sampling, relative to a layer's: for several stages and for two.

A layer also reads and writes states, which cost more in larger groups of rows. Measured for 7.2B, the head costs 1.14
layers in groups of 80 rows and 1.09 in groups of 240 (four stages). Traces show
0.9 for 960 rows, and 0.7 for 480 rows with two stages. 0.88 corresponds to 1.1 layers.
"""
CUT_GAIN = 0.04
"""A layer is cut only if the slowest stage's cost falls by this share.

Two halves take a little longer than a layer, and both stages keep its weights.
"""
WEIGHTS_MEMORY_FRACTION = 0.8
PROBE_MATRIX = 2048
PROBE_S = 0.02


class LayerRange(NamedTuple):
    """Layers first .. last-1 of a stage."""

    first: int
    last: int
    cuts: Cuts = WHOLE
    """whether the first or last layer is cut in half, between time mix and channel mix"""


def split_layers(
    weights: Weights,
    devices: Sequence[torch.device],
    item_bytes: Sequence[float],
    given: Sequence[float],
    may_cut: bool = False,
) -> list[LayerRange]:
    """Return the layers of each stage: as given, or so that stages take equal time.

    item_bytes: bytes per weight on each device.
    may_cut: on GPUs, layers of RWKV-7 may be cut in half.
    Raises ValueError if the layers do not fit.
    """
    layers = weights.shape.layers
    sizes = {name: tensor.numel() for name, tensor in weights.tensors.items()}
    layer_size = sum(size for name, size in sizes.items() if name.startswith(f"blocks.{layers - 1}."))
    counts: Sequence[float]
    if given:
        counts = check_layers(given, layers, len(devices))
        if weights.shape.version != RWKV7 and any(count % 1 for count in counts):
            raise ValueError(
                f"--pp-layers {_joined(given)} cuts a layer in half, which {weights.shape.version} does not support; "
                "give whole numbers"
            )
    elif len(devices) == 1:
        counts = [layers]
    else:
        max_layers = [
            _layers_that_fit(device, layer_size * item, WEIGHTS_MEMORY_FRACTION / devices.count(device), layers)
            for device, item in zip(devices, item_bytes, strict=True)
        ]
        head = head_cost(sizes["head.weight"] / layer_size, len(devices))
        speeds = relative_speeds(devices)
        counts = balance_layers(layers, head, speeds, max_layers)
        if may_cut and weights.shape.version == RWKV7 and {device.type for device in devices} == {"cuda"}:
            counts = balance_half_layers(counts, head, speeds, max_layers)
    return to_layer_ranges(counts)


def to_layer_ranges(counts: Sequence[float]) -> list[LayerRange]:
    """Convert counts of layers to consecutive ranges.

    counts: in halves
    """
    ends = [0, *(round(2 * end) for end in itertools.accumulate(counts))]
    return [
        LayerRange(first // 2, -(-last // 2), Cuts(first % 2 == 1, last % 2 == 1))
        for first, last in itertools.pairwise(ends)
    ]


def head_cost(size: float, stages: int) -> float:
    """Return the cost of head and sampler in layers.

    size: number of the head's weights relative to a layer's.
    """
    return size * (HEAD_FACTOR_TWO_STAGES if stages == 2 else HEAD_FACTOR)


def _layers_that_fit(device: torch.device, layer_bytes: float, share: float, layers: int) -> int:
    if device.type != "cuda":
        return layers  # layers are read from a mapped file, so the limit is unknown
    free, _ = torch.cuda.mem_get_info(device)
    return int(min(layers, free * share // layer_bytes))


def balance_layers(
    layers: int, head: float, speeds: Sequence[float], max_layers: Sequence[int], unit: float = 1.0
) -> list[float]:
    """Balance layers between stages, in order: the slowest stage is as fast as possible.

    On a tie, later stages get more: the first one also waits for the tokens that the last one samples.
    head: cost of head and sampler in layers, for the last stage.
    speeds: of the devices, relative to each other.
    max_layers: layers that fit into each device's memory.
    unit: whole layers (1) or halves (0.5).
    Raises ValueError if they do not fit.
    """
    stages = len(speeds)
    if sum(max_layers) < layers or min(max_layers) < 1:
        raise ValueError(
            f"the devices have memory for {', '.join(map(str, max_layers))} layers, in total {sum(max_layers)}; the "
            f"model has {layers}: add devices in --pp-devices, or use a smaller --dtype"
        )
    extra_cost = [0.0] * (stages - 1) + [head]
    counts = [1.0] * stages
    for _ in range(round((layers - stages) / unit)):
        # Add each layer to the stage that remains the fastest with it.
        free = [i for i in range(stages) if counts[i] < max_layers[i]]
        counts[min(free, key=lambda i: ((counts[i] + unit + extra_cost[i]) / speeds[i], -i))] += unit
    return counts


def balance_half_layers(
    whole: Sequence[float], head: float, speeds: Sequence[float], max_layers: Sequence[int]
) -> Sequence[float]:
    """Return counts in half layers if they gain enough, else `whole`.

    They must make the slowest stage `CUT_GAIN` faster. Arguments: see `balance_layers`. Stages on both sides of a
    cut keep that layer's weights.
    """
    halves = balance_layers(round(sum(whole)), head, speeds, max_layers, unit=0.5)
    extra_cost = [0.0] * (len(speeds) - 1) + [head]

    def slowest(counts: Sequence[float]) -> float:
        return max((count + more) / speed for count, more, speed in zip(counts, extra_cost, speeds, strict=True))

    fits = all(
        layers.last - layers.first <= limit for layers, limit in zip(to_layer_ranges(halves), max_layers, strict=True)
    )
    return halves if fits and slowest(halves) <= (1 - CUT_GAIN) * slowest(whole) else whole


def check_layers(given: Sequence[float], layers: int, stages: int) -> list[float]:
    """Check `--pp-layers`. Raises ValueError unless the counts match the devices and the model.

    A 0, from `--strategy`, means the remaining layers.
    """
    if len(given) != stages:
        raise ValueError(
            f"--pp-layers {_joined(given)} has {len(given)} number{'s' * (len(given) > 1)} for {stages} "
            f"device{'s' * (stages > 1)}; give one number per device, or other devices with --pp-devices"
        )
    counts = [layers - sum(given) if count == 0 else count for count in given]
    if sum(counts) != layers or min(counts) < 1 or any(2 * count % 1 for count in counts):
        raise ValueError(
            f"the layers per device, {_joined(given)}, are {sum(given):g} in total; the model has {layers} layers: "
            f"give whole numbers or halves of at least 1, {layers} in total"
        )
    return counts


def _joined(counts: Sequence[float]) -> str:
    return ",".join(f"{count:g}" if count else "the rest" for count in counts)


def relative_speeds(devices: Sequence[torch.device]) -> list[float]:
    """Return the devices' relative speeds: equal for equal devices, else measured with a GEMV."""
    names = {_name(device) for device in devices}
    if len(names) == 1:
        return [1.0] * len(devices)
    measured = {device: _matmuls_per_s(device) for device in set(devices)}
    return [measured[device] / devices.count(device) for device in devices]


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _matmuls_per_s(device: torch.device) -> float:
    """Return matrix-vector products per second. Memory bound, like decoding."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    matrix = torch.ones(PROBE_MATRIX, PROBE_MATRIX, dtype=dtype, device=device)
    x = torch.ones(PROBE_MATRIX, 8, dtype=dtype, device=device)

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(3):
        matrix @ x
    finish()
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < PROBE_S:
        for _ in range(8):
            matrix @ x
        finish()
        count += 8
    return count / (time.perf_counter() - started)
