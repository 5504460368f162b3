"""Adapters on a GPU: a table of where their pairs are, which graphs read, and the launches of csrc/adapters.cu.

Mixtures of experts (MoLE) are plain torch in fp32 beside the kernels, in steps that are no graphs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from native.transfer import on_device
from rwkv_batch.kernels.cuda.library import AdapterArgs, cuda_pointer, library
from rwkv_batch.model.adapter_table import (
    NO_ADAPTER,
    AdaptedLinear,
    AdapterTable,
    LayerAdapters,
    StepAdapters,
    mix_expert_outputs,
)
from rwkv_batch.model.low_rank import MAX_RANK, Experts, LayerPairs, Target, padded
from rwkv_batch.model.step_inputs import AdapterTiles, StepInputs

TILE = 16
"""Tokens of one adapter that are multiplied together."""
RANK_STEP = 16
MAX_NUMBERS = 1025
"""Of adapters, NO_ADAPTER among them; programs/settings/flags.py bounds --max-adapters by it."""
SPLIT_INPUTS = 1024
"""Inputs that a block of the shrink sums in a step of few tokens; of many, four times as many."""
FEW_TOKENS = 1024
EXTRA_TILES = 12
"""Tiles at once beyond those that tokens of one adapter fill."""
NO_TOKEN = -1
"""In the slot of a token, and as the number of a tile that is not there."""
Ints = np.ndarray[tuple[int], np.dtype[np.int32]]


def max_tiles(tokens: int, adapters: int = MAX_NUMBERS - 1) -> int:
    """Tiles that so many tokens of at most so many adapters, and of none, may take."""
    kinds = min(tokens, adapters + 1)
    return kinds + (tokens - kinds) // TILE


def fill_tiles(numbers: np.ndarray[tuple[int], np.dtype[np.int64]], tokens: Ints, tiles: Ints) -> int:
    """Sort tokens of adapters `numbers` [T] into tiles: `tokens` [16 n] and `tiles` [n], see AdapterTiles.

    Returns how many there are; the others' numbers become NOBODY.
    """
    order = np.argsort(np.where(numbers == NO_ADAPTER, MAX_NUMBERS, numbers), kind="stable")
    sorted_numbers = numbers[order]
    starts = (
        np.flatnonzero(np.concatenate([[True], sorted_numbers[1:] != sorted_numbers[:-1]])) if len(numbers) else order
    )
    lengths = np.diff(np.append(starts, len(numbers)))
    counts = -(-lengths // TILE)
    firsts = np.cumsum(counts) - counts
    count = int(counts.sum())
    within = np.arange(len(numbers)) - np.repeat(starts, lengths)
    tokens[: count * TILE] = NO_TOKEN
    tokens[np.repeat(firsts * TILE, lengths) + within] = order
    tiles[:count] = np.repeat(sorted_numbers[starts], counts)
    tiles[count:] = NO_TOKEN
    return count


class CudaAdapterTable(AdapterTable):
    """A stage's adapters in fp16, ranks padded to 16; of each the addresses stand in a table on the device."""

    def __init__(self, first: int, last: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(first, last, device, dtype)
        self.device = device
        self._memory: dict[int, Tensor] = {}
        self._experts: dict[int, dict[int, Experts]] = {}
        """of an adapter's number, by the stage's layer"""
        self._pairs: Tensor | None = None

    @property
    def table(self) -> Tensor:
        """[numbers, layers, targets, 3] int64 on the device: a, b and rank of each pair; made when first asked for."""
        if self._pairs is None:
            sizes = MAX_NUMBERS, len(self.layers), len(Target), 3
            with torch.inference_mode(False):  # it is made in a step, perhaps, and written to outside of steps
                self._pairs = torch.zeros(sizes, dtype=torch.int64, device=self.device)
        return self._pairs

    def put(self, number: int, layers: Mapping[int, LayerPairs]) -> None:
        """See AdapterTable."""
        entries = torch.zeros(len(self.layers), len(Target), 3, dtype=torch.int64)
        pieces: list[Tensor] = []
        at = 0
        for i, layer in enumerate(self.layers):
            for target, pair in layers.get(layer, LayerPairs()).pairs.items():
                a, b = (one.half().contiguous().view(-1) for one in padded(pair, RANK_STEP))
                rank = -(-pair.rank // RANK_STEP) * RANK_STEP
                entries[i, target] = torch.tensor([at, at + a.nbytes, rank])
                at += a.nbytes + b.nbytes
                pieces += [a, b]
        memory = torch.cat(pieces or [torch.zeros(RANK_STEP, dtype=torch.float16)]).to(self.device)
        entries[..., :2] += memory.data_ptr()
        experts = {i: layers[layer].experts for i, layer in enumerate(self.layers) if layer in layers}
        routed = {i: one.to(self.device, torch.float32) for i, one in experts.items() if one is not None}
        self._memory[number] = memory
        if routed:
            self._experts[number] = routed
        self.table[number].copy_(entries)

    def drop(self, number: int) -> None:
        """See AdapterTable. Steps on their way have it still: memory goes to those behind them on the stream."""
        self._memory.pop(number, None)
        self._experts.pop(number, None)

    def is_routed(self, number: int) -> bool:
        """See AdapterTable."""
        return number in self._experts

    def for_step(self, inputs: StepInputs) -> StepAdapters | None:
        """See AdapterTable."""
        tiles = inputs.adapter_tiles
        if tiles is None and inputs.adapters is not None:
            most = max_tiles(len(inputs.adapters))
            tokens, numbers = np.empty(most * TILE, dtype=np.int32), np.empty(most, dtype=np.int32)
            count = fill_tiles(inputs.adapters.numpy(), tokens, numbers)
            both = on_device([*tokens[: count * TILE].tolist(), *numbers[:count].tolist()], torch.int32, self.device)
            tiles = AdapterTiles(both[: count * TILE].view(count, TILE), both[count * TILE :])
        return None if tiles is None else CudaStepAdapters(self, tiles, self._routed(inputs))

    def _routed(self, inputs: StepInputs) -> list[tuple[dict[int, Experts], Tensor]]:
        """Of a step that is no graph, adapters with experts and the tokens [N] of each, on the device."""
        if inputs.adapters is None or not self._experts:
            return []
        numbers = inputs.adapters.numpy()
        found = ((layers, np.flatnonzero(numbers == number).tolist()) for number, layers in self._experts.items())
        return [(layers, on_device(tokens, torch.int64, self.device)) for layers, tokens in found if tokens]


class CudaStepAdapters:
    """What a step's tiles add."""

    def __init__(
        self, table: AdapterTable, tiles: AdapterTiles, routed: Sequence[tuple[dict[int, Experts], Tensor]] = ()
    ) -> None:
        """`routed`: of each adapter of experts its layers and the tokens of its rows, int64 [tokens]."""
        assert isinstance(table, CudaAdapterTable), "the cuda kernels have a table of their own"
        self.table, self.tiles, self.routed = table, tiles, routed

    def for_layer(self, number: int) -> LayerAdapters:
        """See StepAdapters."""
        return CudaLayerAdapters(self, number)


class CudaLayerAdapters:
    """The launches of one layer."""

    def __init__(self, step: CudaStepAdapters, layer: int) -> None:
        self._step, self._layer = step, layer
        self._routed = [(layers[layer], tokens) for layers, tokens in step.routed if layer in layers]

    def add(self, *linears: AdaptedLinear) -> None:
        """See LayerAdapters: x [T, in] and y [T, out] fp16, all linears of as many inputs."""
        self._launch(linears, squared_relu=False)

    @property
    def has_experts(self) -> bool:
        """Whether `mix_experts` changes anything."""
        return bool(self._routed)

    def mix_experts(self, x: Tensor, key: Tensor, hidden: Tensor, y: Tensor) -> None:
        """See LayerAdapters: x, y [T, C], key, hidden [T, F] fp16; computed in fp32."""
        for experts, tokens in self._routed:
            own, added = mix_expert_outputs(experts, x[tokens].float(), key[tokens].float())
            hidden[tokens], y[tokens] = own.to(hidden.dtype), added.to(y.dtype)

    def sqrt_hidden(self, hidden: Tensor) -> None:
        """Of what `mix_experts` has left in hidden [T, F], for a product that squared_relu what it is given."""
        for _, tokens in self._routed:
            hidden[tokens] = hidden[tokens].sqrt()

    def finish_squares(self, one: AdaptedLinear) -> None:
        """max(v + b (a x), 0)^2 in slot of y [T, out] fp16, which holds v |v| (SIGNED_SQUARE) of each output v.

        Of rows without an adapter what RELU_SQUARED would have left, bit for bit.
        """
        self._launch((one,), squared_relu=True)

    def _launch(self, linears: tuple[AdaptedLinear, ...], squared_relu: bool) -> None:
        tiles, table = self._step.tiles, self._step.table
        count, inputs = len(tiles.numbers), linears[0].x.shape[1]
        splits = -(-inputs // (SPLIT_INPUTS if len(linears[0].x) <= FEW_TOKENS else 4 * SPLIT_INPUTS))
        partials = torch.empty(len(linears), splits, count, TILE, MAX_RANK, dtype=torch.float32, device=table.device)
        args = AdapterArgs(
            pairs=cuda_pointer(table.table, torch.int64),
            tokens=cuda_pointer(tiles.tokens, torch.int32),
            numbers=cuda_pointer(tiles.numbers, torch.int32),
            partials=cuda_pointer(partials, torch.float32),
            count=len(linears), tiles=count, layers=len(table.layers), layer=self._layer, targets=len(Target),
            splits=splits, squared_relu=squared_relu, tiles_in_grid=min(count, len(linears[0].x) // TILE + EXTRA_TILES),
        )  # fmt: skip
        for slot, one in zip(args.gemms, linears, strict=False):
            if one.x.shape[1] != inputs or len(one.x) != len(one.y):
                raise ValueError(f"x {tuple(one.x.shape)} and y {tuple(one.y.shape)} do not fit {inputs} inputs")
            slot.x, slot.y = cuda_pointer(one.x), cuda_pointer(one.y)
            slot.k, slot.n, slot.target = inputs, one.y.shape[1], one.target
        library().call("rwkv_adapters", ctypes.byref(args))


def has_adapters(inputs: StepInputs) -> bool:
    """Whether a step's rows may have adapters, which read what linears are given."""
    return inputs.adapters is not None or inputs.adapter_tiles is not None
