"""A pipeline stage: consecutive layers on one device, with their state slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from rwkv_batch.model.adapter_table import AdapterTable
from rwkv_batch.model.layer import Layer, LayerBase, Linear, layer_norm, linears_of
from rwkv_batch.model.loader import LargestInputs, LayerLoader, Precision, load_layers
from rwkv_batch.model.older.layer import OlderLayer
from rwkv_batch.model.older.layer import forward_layers as forward_older_layers
from rwkv_batch.model.ops import HoldsAdapters, NormsRows, Ops, PreparesLayers, RunsLayers
from rwkv_batch.model.quant.formats import Format, format_of
from rwkv_batch.model.quant_linear import plain_quantised
from rwkv_batch.model.rwkv7 import WHOLE, Cuts, forward_layers
from rwkv_batch.model.state import RWKV7, StateArena, StateFormat
from rwkv_batch.model.step_inputs import StepInputs
from rwkv_batch.model.weights import Weights
from rwkv_batch.runner.layer_stream import StreamedLayers


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
        """Return the bytes of one slot of this stage."""
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
        """Return the bytes of the matrices on the stage's device and of the embedding."""
        layers = self.layers.on_device if isinstance(self.layers, StreamedLayers) else self.layers
        linears = [linear for layer in layers for linear in linears_of(layer)]
        linears += [] if self.head is None else [self.head.linear]
        table = 0 if self.embedding is None else self.embedding.table.nbytes
        return sum(linear.num_bytes for linear in linears) + table

    def allocate_slots(self, num_slots: int) -> None:
        """Allocate all slots, once."""
        self.state = StateArena(
            num_slots,
            len(self.layers),
            self.shape,
            self.precision.device,
            self.precision.wkv_state,
            self.precision.activations,
            int(self.cuts.begins_within),
        )

    def embed(self, tokens: Tensor) -> Tensor:
        """Map token ids [T] to the residual stream [T, C]."""
        assert self.embedding is not None, "only the first stage embeds"
        rows = self.embedding.table[tokens]
        if self.embedding.ln0 is None:
            return rows
        return layer_norm(rows, self.embedding.ln0).to(self.precision.activations)

    def run_part(self, part: range, x: Tensor, v_first: Tensor | None, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Run some layers for rows without an adapter: x [T, C] and v_first [T, C] as in `forward`."""
        assert self.state is not None and self.shape.version == RWKV7, "see `graph_pieces.piece_layers`"
        with self._device:
            layers = cast(Sequence[Layer], self.layers[part.start : part.stop])
            x, v_first = forward_layers(layers, x, v_first, self.state, inputs, self.ops, first=part.start)
            assert v_first is not None
            return x, v_first

    def forward(self, x: Tensor, v_first: Tensor | None, inputs: StepInputs) -> tuple[Tensor, Tensor | None]:
        """Run the layers on x [T, C] and v_first [T, C] from the previous stage."""
        assert self.state is not None, "call allocate_slots first"
        with self._device:
            if self.shape.version != RWKV7:
                return forward_older_layers(cast(Sequence[OlderLayer], self.layers), x, self.state, inputs), None
            layers = cast(Sequence[Layer], self.layers)
            is_whole = not any(self.cuts)
            if is_whole and isinstance(self.ops, RunsLayers) and self.ops.can_run_layers(self.state):
                return self.ops.run_layers(layers, x, v_first, self.state, inputs, self.adapters)
            added = self.adapters.for_step(inputs)
            return forward_layers(layers, x, v_first, self.state, inputs, self.ops, added, cuts=self.cuts)

    def logits(self, x: Tensor, inputs: StepInputs, out: Tensor | None = None) -> Tensor:
        """Return logits [R, V] fp32 of x [T, C] at the step's logit tokens; in the first rows of `out` if given."""
        return self.logits_of(x, inputs.logit_tokens, out)

    def logits_of(self, x: Tensor, tokens: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits [R, V] fp32 of x [T, C] at tokens [R] int64; in the first rows of `out` if given."""
        assert self.head is not None, "only the last stage computes logits"
        with self._device:
            if isinstance(self.ops, NormsRows):
                rows = self.ops.norm_rows(x, tokens, self.head.ln_out)
            else:
                rows = layer_norm(x[tokens], self.head.ln_out).to(self.precision.activations)
            return self.head.linear.to_fp32(rows, None if out is None else out[: len(rows)])


def precision_for(device: torch.device, dtype: str, wkv_state: str, version: str = RWKV7) -> Precision:
    """Return the dtypes of a stage.

    "auto" weights and states: fp16 on a GPU, fp32 on a CPU. CPU activations are fp32. "fp8", "int8", "int4" and "w8a8"
    quantise the large matrices; everything else is as with "auto". Versions before RWKV-7 use bf16 weights on a GPU,
    and fp32 activations and states, because their sums exceed fp16. Raises ValueError for a dtype that the version does
    not have.
    """
    by_name = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    storage = format_of(dtype)
    dtype = "auto" if storage is not None else dtype
    on_gpu = device.type == "cuda"
    if version != RWKV7:
        if storage is Format.W8A8:
            raise ValueError(f"w8a8 quantises RWKV-7 only, not {version}; use --dtype int8")
        if wkv_state not in ("auto", "fp32"):
            raise ValueError(
                f"states of {version} must be fp32, not {wkv_state}; omit --wkv-state (in a request: the field "
                "wkv_state)"
            )
        weights = by_name[dtype] if dtype != "auto" else (torch.bfloat16 if on_gpu else torch.float32)
        return Precision(device, weights, torch.float32, StateFormat.FP32, storage)
    weights = by_name[dtype] if dtype != "auto" else (torch.float16 if on_gpu else torch.float32)
    activations = weights if on_gpu else torch.float32
    if wkv_state == "auto":  # bf16's eight bits of mantissa are too few for sums
        wkv_state = "fp16" if on_gpu and weights is torch.float16 else "fp32"
    state = StateFormat(wkv_state)
    return Precision(device, weights, activations, state, storage)
