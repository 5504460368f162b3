"""All stages of the model in order: tokens in, logits out. A stage is consecutive layers on one device."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from rwkv_batch.config import EngineConfig
from rwkv_batch.kernels.registry import choose_ops, make_deterministic
from rwkv_batch.model.adapter_table import AdapterTable
from rwkv_batch.model.layer import WHOLE, Cuts, Layer, LayerBase, Linear, layer_norm, linears_of
from rwkv_batch.model.loader import LargestInputs, LayerLoader, Precision, load_layers, precision_for
from rwkv_batch.model.low_rank import LayerPairs
from rwkv_batch.model.older.layer import OlderLayer
from rwkv_batch.model.older.layer import forward_layers as forward_older_layers
from rwkv_batch.model.ops import HoldsAdapters, NormsRows, Ops, PreparesLayers, RunsLayers
from rwkv_batch.model.quant_linear import plain_quantised
from rwkv_batch.model.rwkv7 import forward_layers
from rwkv_batch.model.state import RWKV7, StateArena
from rwkv_batch.model.step_inputs import StepInputs
from rwkv_batch.model.weights import Weights
from rwkv_batch.runner.calibration import MeasuredInputs
from rwkv_batch.runner.layer_split import split_layers
from rwkv_batch.runner.layer_stream import StreamedLayers
from rwkv_batch.runner.links import copy_to_device

DEVICE = re.compile(r"(?P<kind>cpu|cuda)(?::(?P<number>[0-9]{1,18}))?")
logger = logging.getLogger(__name__)


class Stage:
    """Layers first .. last-1 on one device. The first stage embeds, the last computes logits."""

    def __init__(
        self,
        weights: Weights,
        first: int,
        last: int,
        precision: Precision,
        ops: Ops,
        resident: int | None = None,
        cuts: Cuts = WHOLE,
        largest_inputs: LargestInputs | None = None,
    ) -> None:
        """resident: layers that stay on a GPU while the others are streamed for every step; None: all stay.

        Both stages of a cut layer keep all its weights, and each has the state of its half.
        largest_inputs: see LayerLoader.
        """
        self.cuts = cuts
        shape = weights.shape
        make_linear = getattr(ops, "make_linear", Linear)
        make_quantised = getattr(ops, "make_quantised", plain_quantised)
        loader = LayerLoader(
            weights, precision, make_linear, make_quantised=make_quantised, largest_inputs=largest_inputs
        )
        self.precision = precision
        self._device = torch.cuda.device(precision.device if precision.device.type == "cuda" else -1)
        """The device context of kernel launches, which go to the current device's stream. -1: does nothing."""
        self.ops = ops
        # Such a check takes 10 us.
        self._layer_runner = ops if isinstance(ops, RunsLayers) else None
        self._row_norms = ops if isinstance(ops, NormsRows) else None
        self.shape = shape
        self.width = shape.width
        layers: Iterator[LayerBase]
        if shape.version != RWKV7:
            layers = load_layers(loader.older_layer, weights, first, last)
        elif isinstance(ops, PreparesLayers):
            # Prepare layers on the host: memory freed on the device would leave gaps between the layers.
            host_layer = loader.on_host().layer
            layers = (ops.prepare_layer(layer) for layer in load_layers(host_layer, weights, first, last))
        else:
            layers = load_layers(loader.layer, weights, first, last)
        streams = resident is not None and precision.device.type == "cuda"
        self.layers: Sequence[LayerBase] = (
            StreamedLayers(layers, resident or 0, precision.device) if streams else [*layers]
        )
        self.embedding = loader.embedding() if first == 0 else None
        if self.embedding is not None and precision.device.type == "cuda":
            self.embedding = self.embedding.fold(precision.activations)
        make_table = ops.make_adapter_table if isinstance(ops, HoldsAdapters) else AdapterTable
        self.adapters = make_table(first, last, precision.device, precision.activations)
        self.head = loader.head() if last == shape.layers else None
        self.state: StateArena | None = None

    @property
    def slot_bytes(self) -> int:
        shift = self.precision.activations.itemsize
        return self.shape.slot_bytes(len(self.layers), self.precision.wkv_state, shift, int(self.cuts.begins_within))

    @property
    def share(self) -> float:
        """Return the number of layers that it runs; a cut layer counts half."""
        return len(self.layers) - sum(self.cuts) / 2 if any(self.cuts) else len(self.layers)

    @property
    def num_streamed(self) -> int:
        """Return the number of layers that every step copies to the device."""
        return self.layers.num_streamed if isinstance(self.layers, StreamedLayers) else 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices on the stage's device and of the embedding."""
        layers = self.layers.on_device if isinstance(self.layers, StreamedLayers) else self.layers
        linears = [linear for layer in layers for linear in linears_of(layer)]
        linears += [] if self.head is None else [self.head.linear]
        table = 0 if self.embedding is None else self.embedding.table.nbytes
        return sum(linear.num_bytes for linear in linears) + table

    def allocate_slots(self, num_slots: int) -> None:
        self.state = StateArena(
            num_slots,
            len(self.layers),
            self.shape,
            self.precision.device,
            self.precision.wkv_state,
            self.precision.activations,
            int(self.cuts.begins_within),
        )

    def reserve(self, tokens: int) -> None:
        """See `Pipeline.reserve`."""
        if self.shape.version == RWKV7 and self._layer_runner is not None:
            self._layer_runner.reserve(cast(Sequence[Layer], self.layers), self.width, tokens)

    def embed(self, tokens: Tensor) -> Tensor:
        """Map token ids [T] to the residual stream [T, C]."""
        assert self.embedding is not None, "only the first stage embeds"
        rows = self.embedding.table[tokens]
        if self.embedding.ln0 is None:
            return rows
        return layer_norm(rows, self.embedding.ln0).to(self.precision.activations)

    def run_part(self, part: range, x: Tensor, v_first: Tensor | None, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Run some layers for rows without an adapter: x [T, C] and v_first [T, C] as in `forward`."""
        assert self.state is not None and self.shape.version == RWKV7, "see `pieces.piece_layers`"
        with self._device:
            layers = cast(Sequence[Layer], self.layers[part.start : part.stop])
            x, v_first = forward_layers(layers, x, v_first, self.state, inputs, self.ops, first=part.start)
            assert v_first is not None
            return x, v_first

    def forward(self, x: Tensor, v_first: Tensor | None, inputs: StepInputs) -> tuple[Tensor, Tensor | None]:
        """Run the layers on the previous stage's `x` and `v_first`. Both are [T, C]."""
        assert self.state is not None, "call allocate_slots first"
        with self._device:
            if self.shape.version != RWKV7:
                return forward_older_layers(cast(Sequence[OlderLayer], self.layers), x, self.state, inputs), None
            layers = cast(Sequence[Layer], self.layers)
            if self._layer_runner is not None:
                return self._layer_runner.run_layers(layers, x, v_first, self.state, inputs, self.adapters, self.cuts)
            added = self.adapters.for_step(inputs)
            return forward_layers(layers, x, v_first, self.state, inputs, self.ops, added, cuts=self.cuts)

    def logits(self, x: Tensor, inputs: StepInputs, out: Tensor | None = None) -> Tensor:
        """Return logits [R, V] fp32 at the step's logit tokens.

        x: [T, C]; out: receives the logits in its first rows, if given
        """
        return self.logits_of(x, inputs.logit_tokens, out)

    def logits_of(self, x: Tensor, tokens: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits [R, V] fp32 of x [T, C] at `tokens`.

        tokens: [R] int64; out: receives the logits in its first rows, if given
        """
        assert self.head is not None, "only the last stage computes logits"
        with self._device:
            if self._row_norms is not None:
                rows = self._row_norms.norm_rows(x, tokens, self.head.ln_out)
            else:
                rows = layer_norm(x[tokens], self.head.ln_out).to(self.precision.activations)
            return self.head.linear.to_fp32(rows, None if out is None else out[: len(rows)])


class Pipeline:
    """The model on its devices: one stage per device."""

    def __init__(
        self,
        weights: Weights,
        devices: tuple[str, ...] = ("auto",),
        dtype: str = "auto",
        kernels: str = "auto",
        wkv_state: str = "auto",
        layers: tuple[float, ...] = (),
        resident: tuple[int | None, ...] = (),
        activation_bits: int = 8,
        deterministic: bool = False,
    ) -> None:
        """layers: of each device, in halves (0.5: only the layer's time mix); empty: split automatically
        resident: per device, layers that stay on it; the others are copied in for every step. None: all stay
        deterministic: see `EngineConfig`
        Raises ValueError for devices, dtypes, layers or kernels that cannot be used.
        """
        self.weights = weights
        self.layers_s = 0.0
        """seconds that the latest step's layers took: to run on CPUs, to launch on GPUs"""
        self.devices = [resolve_device(name) for name in devices]
        if len(devices) > weights.shape.layers:
            raise ValueError(
                f"{len(devices)} pipeline devices for a model of {weights.shape.layers} layers; "
                "give at most one device per layer in --pp-devices"
            )
        self.kernel_refusals: dict[str, str] = {}
        """why a faster kernel backend was not chosen, by name"""
        self.stages: list[Stage] = []
        version = weights.shape.version
        precisions = [precision_for(device, dtype, wkv_state, version, activation_bits) for device in self.devices]
        item_bytes = [precision.weight_bytes for precision in precisions]
        ranges = split_layers(weights, self.devices, item_bytes, layers, may_cut=not resident)
        if resident and len(resident) != len(devices):
            raise ValueError(
                f"--pp-resident has {len(resident)} values for {len(devices)} devices; give a number or `all` for each"
            )
        residents = resident or (None,) * len(devices)
        largest_inputs = MeasuredInputs(weights, self.devices[0])
        for precision, (first, last, cuts), num_resident in zip(precisions, ranges, residents, strict=True):
            ops, refusals = choose_ops(kernels, precision.device, version)
            if deterministic and precision.device.type == "cuda":
                make_deterministic(ops, precision)
            self.kernel_refusals |= refusals
            self.stages.append(Stage(weights, first, last, precision, ops, num_resident, cuts, largest_inputs))

    @property
    def concurrency(self) -> int:
        """Return the number of stages that can work at the same time: the number of GPUs, at least one.

        Stages on a CPU share its cores.
        """
        gpus = {device for device in self.devices if device.type == "cuda"}
        return max(1, len(gpus))

    @property
    def slot_bytes(self) -> int:
        """Return the bytes of one sequence's state over all stages."""
        return sum(stage.slot_bytes for stage in self.stages)

    def slot_bytes_on(self, device: torch.device) -> int:
        """Return the bytes of one sequence's state on one device."""
        return sum(stage.slot_bytes for stage in self.stages if stage.precision.device == device)

    def allocate_slots(self, num_slots: int) -> None:
        for stage in self.stages:
            stage.allocate_slots(num_slots)

    def put_adapter(self, number: int, layers: Mapping[int, LayerPairs]) -> None:
        """Load an adapter under a number that no running row uses.

        Raises MemoryError, RuntimeError or ValueError; then no stage has the adapter.
        """
        try:
            for stage in self.stages:
                stage.adapters.put(number, layers)
        except (MemoryError, RuntimeError, ValueError):
            self.drop_adapter(number)
            raise

    def is_routed(self, number: int) -> bool:
        """Return whether a router chooses the adapter's experts for each token. A router in any stage counts."""
        return any(stage.adapters.is_routed(number) for stage in self.stages)

    def adapter_bytes(self, layers: Mapping[int, LayerPairs]) -> int:
        """Return the bytes of an adapter on all devices, without padding."""
        values = {i: sum(p.a.numel() + p.b.numel() for p in layer.all_pairs) for i, layer in layers.items()}
        return sum(
            values.get(i, 0) * stage.precision.activations.itemsize
            for stage in self.stages
            for i in stage.adapters.layers
        )

    def drop_adapter(self, number: int) -> None:
        """Remove an adapter that no running row uses."""
        for stage in self.stages:
            stage.adapters.drop(number)

    def reserve(self, tokens: int) -> None:
        """Allocate the calling thread's work memory on a CPU, for steps of up to so many tokens. Raises MemoryError."""
        for stage in self.stages:
            stage.reserve(tokens)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, out: Tensor | None = None) -> Tensor:
        """Run one step of rows of different lengths: inputs on the CPU -> logits fp32 on the last device.

        Logits are [R, V]: R rows with logits, V the vocabulary. They are written to `out` if given.
        """
        x, inputs = self.run_layers(inputs)
        return self.stages[-1].logits(x, inputs, out)

    @torch.inference_mode()
    def run_layers(self, inputs: StepInputs) -> tuple[Tensor, StepInputs]:
        """Run one step without the head.

        Returns the residual stream [T, C] (T tokens, C width) and the inputs on its device.
        """
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
    """Return "kernels" and "wkv_state" for this model version and these devices.

    If a configured value is not supported and its field is in `EngineConfig.auto_fallback_fields`, it becomes "auto",
    with a log line. Otherwise it stays.

    version: "RWKV-7", ...
    """
    device_types = {resolve_device(name).type for name in devices}
    is_older = version != RWKV7
    is_for_other_device = config.kernels in ("cuda", "cpu") and device_types != {config.kernels}
    chosen = {}
    for name, is_refused in (
        ("kernels", is_for_other_device or (is_older and config.kernels == "cuda")),
        ("wkv_state", is_older and config.wkv_state != "fp32"),
    ):
        configured: str = getattr(config, name)
        chosen[name] = "auto" if is_refused and name in config.auto_fallback_fields else configured
        if chosen[name] != configured:
            logger.info(
                "%s %s is not supported for %s on %s; using auto",
                name,
                configured,
                version,
                ", ".join(sorted(device_types)),
            )
    return chosen


def replica_devices(names: tuple[str, ...], replica: int) -> tuple[str, ...]:
    """Return the devices of one engine. With "auto", each engine of a model gets a GPU of its own.

    Raises ValueError if there are fewer GPUs than engines.
    """
    if names != ("auto",):  # before GPUs are counted: that starts the driver, which an engine on a CPU does not need
        return names
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not found:
        return names
    if replica >= found:
        raise ValueError(
            f"--replicas needs {replica + 1} or more CUDA devices, this machine has {found}; "
            "lower it, or give the devices of each engine, like --pp-devices '0;0'"
        )
    return (f"cuda:{replica}",)


def resolve_device(name: str) -> torch.device:
    """Return the device of a name ("auto", "cpu", "0", "cuda:0").

    Raises ValueError for an unknown name or a missing device.
    """
    if name == "auto":
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    known = DEVICE.fullmatch(f"cuda:{name}" if name.isdecimal() else name)
    if known is None:
        raise ValueError(f"device {name!r} is not auto, cpu, cuda, cuda:N or a GPU's number; change --pp-devices")
    if known["kind"] == "cpu":
        return torch.device("cpu")
    number, found = int(known["number"] or 0), torch.cuda.device_count()
    if number >= found:  # torch.device takes numbers modulo 256
        raise ValueError(
            f"there is no device {name}: this machine has {found} CUDA device(s); "
            "change --pp-devices, for example to cpu"
        )
    return torch.device("cuda", number)
