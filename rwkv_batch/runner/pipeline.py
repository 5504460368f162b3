"""All stages in a row: tokens in, logits out. One device is a pipeline of one."""

from __future__ import annotations

import logging
import re
import time

import torch
from torch import Tensor

from rwkv_batch.config import EngineConfig
from rwkv_batch.kernels.registry import choose_ops
from rwkv_batch.model.adapters.per_row import ServedAdapter
from rwkv_batch.model.shape import X070
from rwkv_batch.model.step_inputs import StepInputs
from rwkv_batch.model.weights import Weights
from rwkv_batch.runner.layer_split import split_layers
from rwkv_batch.runner.links import copy_to_device
from rwkv_batch.runner.stage import Stage, precision_for

DEVICE = re.compile(r"(?P<kind>cpu|cuda)(?::(?P<number>[0-9]{1,18}))?")
"""A device by its name."""
logger = logging.getLogger(__name__)


class Pipeline:
    """The model on its devices."""

    def __init__(
        self,
        weights: Weights,
        devices: tuple[str, ...] = ("auto",),
        dtype: str = "auto",
        kernels: str = "auto",
        wkv_state: str = "auto",
        layers: tuple[float, ...] = (),
        memory_fraction: float = 0.8,
        resident: tuple[int | None, ...] = (),
    ) -> None:
        """`layers` of each device, else dealt; `resident`: see EngineConfig; `memory_fraction`: of a GPU's free memory,
        that weights may take.

        Raises ValueError for devices, types, layers or kernels that cannot serve.
        """
        self.weights = weights
        self.layers_s = 0.0
        """how long the layers of the latest step took on CPUs; to launch on GPUs"""
        self.devices = [resolve_device(name) for name in devices]
        if len(devices) > weights.shape.layers:
            raise ValueError(
                f"{len(devices)} pipeline devices were asked for, but the model has {weights.shape.layers} layers; "
                "name at most one device for each layer in --pp-devices"
            )
        self.kernel_refusals: dict[str, str] = {}
        self.stages: list[Stage] = []
        version = weights.shape.version
        precisions = [precision_for(device, dtype, wkv_state, version) for device in self.devices]
        item_bytes = [precision.weight_bytes for precision in precisions]
        places = split_layers(weights, self.devices, item_bytes, memory_fraction, layers, may_cut=not resident)
        if resident and len(resident) != len(devices):
            raise ValueError(
                f"--pp-resident speaks of {len(resident)} devices, --pp-devices of {len(devices)}; give a number or "
                "`all` for each"
            )
        residents = resident or (None,) * len(devices)
        for precision, (first, last, cuts), num_resident in zip(precisions, places, residents, strict=True):
            ops, refusals = choose_ops(kernels, precision.device, version)
            self.kernel_refusals |= refusals
            self.stages.append(Stage(weights, first, last, precision, ops, num_resident, cuts))

    @property
    def concurrency(self) -> int:
        """Stages that can work at once: each on a GPU of its own. On a CPU they would only share its cores."""
        gpus = {device for device in self.devices if device.type == "cuda"}
        return len(self.stages) if len(gpus) == len(self.stages) else max(1, len(gpus))

    @property
    def slot_bytes(self) -> int:
        """Bytes of one sequence's state over all stages."""
        return sum(stage.slot_bytes for stage in self.stages)

    def slot_bytes_on(self, device: torch.device) -> int:
        """Bytes of one sequence's state on one of the devices."""
        return sum(stage.slot_bytes for stage in self.stages if stage.precision.device == device)

    def allocate_slots(self, num_slots: int) -> None:
        """Take the slots' memory on every device."""
        for stage in self.stages:
            stage.allocate_slots(num_slots)

    def put_adapter(self, number: int, adapter: ServedAdapter) -> None:
        """Take an adapter in under a number that no running row has. Raises MemoryError or RuntimeError; then no stage
        holds it."""
        try:
            for stage in self.stages:
                stage.adapters.put(number, adapter.layers)
        except (MemoryError, RuntimeError, ValueError):
            self.drop_adapter(number)
            raise

    def is_routed(self, number: int) -> bool:
        """See `AdapterTable.is_routed`: whether that holds on any stage."""
        return any(stage.adapters.is_routed(number) for stage in self.stages)

    def adapter_bytes(self, adapter: ServedAdapter) -> int:
        """Bytes that an adapter takes on all devices together, but for padding."""
        numbers = {i: sum(p.a.numel() + p.b.numel() for p in layer.all_pairs) for i, layer in adapter.layers.items()}
        return sum(
            numbers.get(i, 0) * stage.precision.activations.itemsize
            for stage in self.stages
            for i in stage.adapters.layers
        )

    def drop_adapter(self, number: int) -> None:
        """Let go of an adapter that no running row has."""
        for stage in self.stages:
            stage.adapters.drop(number)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, out: Tensor | None = None) -> Tensor:
        """One ragged step: inputs (on the CPU) -> fp32 logits [R, V] on the last device, in `out` if that is given."""
        x, here = self.hidden(inputs)
        return self.stages[-1].logits(x, here, out)

    @torch.inference_mode()
    def hidden(self, inputs: StepInputs) -> tuple[Tensor, StepInputs]:
        """The same without the head: the residual stream [T, C] behind the last layer, and the inputs on its device."""
        started = time.perf_counter()
        here = inputs.to(self.devices[0])
        x, v_first = self.stages[0].embed(here.tokens), None
        for stage, device in zip(self.stages, self.devices, strict=True):
            if x.device != device:
                here = inputs.to(device)
                x = copy_to_device(x, device)
                v_first = None if v_first is None else copy_to_device(v_first, device)
            x, v_first = stage.forward(x, v_first, here)
        self.layers_s = time.perf_counter() - started
        return x, here


def resolve_backends(version: str, devices: tuple[str, ...], config: EngineConfig) -> dict[str, str]:
    """What a model of that version has on devices of those names as "kernels" and as "wkv_state".

    Those of `EngineConfig.auto_fallback_fields` are "auto" where they cannot be had (the log tells it); others are as asked.
    """
    kinds = {resolve_device(name).type for name in devices}
    is_older = version != X070
    of_others = config.kernels in ("cuda", "cpu") and kinds != {config.kernels}
    chosen = {}
    for name, is_refused in (
        ("kernels", of_others or (is_older and config.kernels == "cuda")),
        ("wkv_state", is_older and config.wkv_state != "fp32"),
    ):
        wanted: str = getattr(config, name)
        chosen[name] = "auto" if is_refused and name in config.auto_fallback_fields else wanted
        if chosen[name] != wanted:
            logger.info("%s: %s is not for %s on %s; it is auto", name, wanted, version, ", ".join(sorted(kinds)))
    return chosen


def replica_devices(names: tuple[str, ...], replica: int) -> tuple[str, ...]:
    """Names of an engine's devices: of those that serve one model, each takes a GPU of its own where none is named.

    Raises ValueError if there are fewer GPUs than engines.
    """
    if names != ("auto",):  # before any GPU is looked for: that wakes the driver, in each engine of a CPU's
        return names
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not found:
        return names
    if replica >= found:
        raise ValueError(
            f"--replicas asks for {replica + 1} engines or more, but this machine has {found} CUDA device(s); "
            "ask for fewer, or name the devices of each, like --pp-devices '0;0'"
        )
    return (f"cuda:{replica}",)


def resolve_device(name: str) -> torch.device:
    """The device of a name ("auto", "cpu", "0", "cuda:0"). Raises ValueError for one not of this machine."""
    if name == "auto":
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    known = DEVICE.fullmatch(f"cuda:{name}" if name.isdecimal() else name)
    if known is None:
        raise ValueError(
            f"device {name!r} is not auto, cpu, cuda, cuda:N or a GPU's number; name another in --pp-devices"
        )
    if known["kind"] == "cpu":
        return torch.device("cpu")
    number, found = int(known["number"] or 0), torch.cuda.device_count()
    if number >= found:  # torch.device takes numbers modulo 256
        raise ValueError(
            f"device {name} was asked for, but this machine has {found} CUDA device(s); "
            "name another in --pp-devices, like cpu"
        )
    return torch.device("cuda", number)
