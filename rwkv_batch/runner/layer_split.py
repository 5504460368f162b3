"""Which layers go to which device: so that all stages take equal time, and none more memory than it has."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from rwkv_batch.model.rwkv7 import WHOLE, Cuts
from rwkv_batch.model.shape import X070
from rwkv_batch.model.weights import Weights

HEAD_FACTOR, HEAD_FACTOR_TWO_STAGES = 0.88, 0.6
"""What a weight of the head costs beside one of a layer, drawing included: of several stages, and of two. A layer has
states to read and write too, the more the larger a group of rows is: by the times of four stages the head of 7.2B is
1.14 layers for groups of 80 rows and 1.09 for 240 (`h200-7.2b-stage-times-entrance.json`); by traces 0.9 for 960, and
by one of two stages 0.7 for 480, which tokens/s do not show (docs/notebook.md). 0.88 is 1.1 layers of it."""
CUT_GAIN = 0.04
"""How much less the slowest stage must have to do for a layer to be cut: two halves take a little longer than a whole
one, and a stage more keeps its weights."""
PROBE_MATRIX = 2048
PROBE_S = 0.02


class LayerRange(NamedTuple):
    """Layers first .. last-1 of a stage."""

    first: int
    last: int
    cuts: Cuts = WHOLE
    """whether its first or last layer is cut in half, between time mix and channel mix"""


def split_layers(
    weights: Weights,
    devices: Sequence[torch.device],
    item_bytes: Sequence[float],
    memory_fraction: float,
    given: Sequence[float],
    may_cut: bool = False,
) -> list[LayerRange]:
    """The layers of each stage: as `given`, or so that stages take equal time within the devices' memory.

    `item_bytes` of a weight on each device; `memory_fraction` of a GPU's free memory that weights may take. `may_cut`: on
    GPUs layers of RWKV-7 may be cut in half. Raises ValueError when it cannot be done.
    """
    layers = weights.shape.layers
    sizes = {name: tensor.numel() for name, tensor in weights.tensors.items()}
    layer = sum(size for name, size in sizes.items() if name.startswith(f"blocks.{layers - 1}."))
    counts: Sequence[float]
    if given:
        counts = check_layers(given, layers, len(devices))
        if weights.shape.version != X070 and any(count % 1 for count in counts):
            raise ValueError(
                f"--pp-layers {_joined(given)} cuts a layer in half, which {weights.shape.version} is not served with; "
                "give whole numbers"
            )
    elif len(devices) == 1:
        counts = [layers]
    else:
        most = [
            _layers_that_fit(device, layer * item, memory_fraction / devices.count(device), layers)
            for device, item in zip(devices, item_bytes, strict=True)
        ]
        head = head_cost(sizes["head.weight"] / layer, len(devices))
        speeds = relative_speeds(devices)
        counts = balance_layers(layers, head, speeds, most)
        if may_cut and weights.shape.version == X070 and {device.type for device in devices} == {"cuda"}:
            counts = balance_half_layers(counts, head, speeds, most)
    return to_layer_ranges(counts)


def to_layer_ranges(counts: Sequence[float]) -> list[LayerRange]:
    """Counts of layers, in halves, one behind the other."""
    ends = [0, *(round(2 * end) for end in itertools.accumulate(counts))]
    return [
        LayerRange(first // 2, -(-last // 2), Cuts(first % 2 == 1, last % 2 == 1))
        for first, last in itertools.pairwise(ends)
    ]


def head_cost(size: float, stages: int) -> float:
    """Of head and sampler, in layers; `size`: of the head's weights beside a layer's."""
    return size * (HEAD_FACTOR_TWO_STAGES if stages == 2 else HEAD_FACTOR)


def _layers_that_fit(device: torch.device, layer_bytes: float, share: float, layers: int) -> int:
    if device.type != "cuda":
        return layers  # from a mapped file; what is too much for the host shows when it is read
    free, _ = torch.cuda.mem_get_info(device)
    return int(min(layers, free * share // layer_bytes))


def balance_layers(
    layers: int, head: float, speeds: Sequence[float], most: Sequence[int], unit: float = 1.0
) -> list[float]:
    """Layers of each stage, in order: the slowest stage is as fast as can be, the later ones take what is over, since
    the first one also waits for the tokens that the last one draws.

    `head`: cost of head and sampler in layers, borne by the last stage; `speeds` of the devices, relative to each
    other; `most` layers that each has memory for; `unit`: in which they are dealt, whole or in halves. Raises
    ValueError if they do not fit.
    """
    stages = len(speeds)
    if sum(most) < layers or min(most) < 1:
        raise ValueError(
            f"the devices have memory for {', '.join(map(str, most))} layers, together {sum(most)}, of the model's "
            f"{layers}: name more devices in --pp-devices, or use a smaller --dtype"
        )
    extra_cost = [0.0] * (stages - 1) + [head]
    counts = [1.0] * stages
    for _ in range(round((layers - stages) / unit)):
        # Each further one goes where the stage is done first with it.
        free = [i for i in range(stages) if counts[i] < most[i]]
        counts[min(free, key=lambda i: ((counts[i] + unit + extra_cost[i]) / speeds[i], -i))] += unit
    return counts


def balance_half_layers(
    whole: Sequence[float], head: float, speeds: Sequence[float], most: Sequence[int]
) -> Sequence[float]:
    """The deal with layers cut in half where the slowest stage has `CUT_GAIN` less to do then; else the `whole` ones.

    `head`, `speeds` and `most` as in `balance_layers`; stages on both sides of a cut keep that layer's weights.
    """
    halves = balance_layers(round(sum(whole)), head, speeds, most, unit=0.5)
    extra_cost = [0.0] * (len(speeds) - 1) + [head]

    def slowest(counts: Sequence[float]) -> float:
        return max((count + more) / speed for count, more, speed in zip(counts, extra_cost, speeds, strict=True))

    fits = all(run.last - run.first <= fitting for run, fitting in zip(to_layer_ranges(halves), most, strict=True))
    return halves if fits and slowest(halves) <= (1 - CUT_GAIN) * slowest(whole) else whole


def check_layers(given: Sequence[float], layers: int, stages: int) -> list[float]:
    """`--pp-layers` as given. Raises ValueError unless it has a count for each device and they make up the model.

    A 0, from `--strategy`, is what the others leave.
    """
    counts = [layers - sum(given) if count == 0 else count for count in given]
    if len(counts) != stages or sum(counts) != layers or min(counts) < 1 or any(2 * count % 1 for count in counts):
        raise ValueError(
            f"--pp-layers or --strategy gives {_joined(given)} layers, together {sum(given):g}, to {len(given)} "
            f"device(s); the model has {layers} layers: give a number for each device ({stages} here), one at least, "
            f"{layers} together"
        )
    return counts


def _joined(counts: Sequence[float]) -> str:
    return ",".join(f"{count:g}" if count else "the rest" for count in counts)


def relative_speeds(devices: Sequence[torch.device]) -> list[float]:
    """Speeds of the devices relative to each other: equal for equal ones, else measured on a product of matrices."""
    names = {_name(device) for device in devices}
    if len(names) == 1:
        return [1.0] * len(devices)
    measured = {device: _matmuls_per_s(device) for device in set(devices)}
    return [measured[device] / devices.count(device) for device in devices]


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _matmuls_per_s(device: torch.device) -> float:
    """Vectors through a matrix per second: bound by memory, as decoding is."""
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
