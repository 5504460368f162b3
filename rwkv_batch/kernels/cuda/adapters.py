"""Adapters on a GPU: csrc/adapters.cu, and a device table of matrices for CUDA graphs.

Mixtures of experts (MoLE) are plain torch in fp32, in steps without graphs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from native.tensors import on_device
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
"""Tokens of one adapter per tile."""
RANK_STEP = 16
MAX_NUMBERS = 1025
"""Adapter numbers, including NO_ADAPTER; programs/settings/flags.py bounds --max-adapters by it."""
SPLIT_INPUTS = 1024
"""Inputs per CTA of the shrink with few tokens; four times this number with many."""
FEW_TOKENS = 1024
EXTRA_TILES = 12
"""Tiles in the grid beyond those that one adapter's tokens fill."""
NO_TOKEN = -1
"""Instead of a token, and number of an unused tile."""
Ints = np.ndarray[tuple[int], np.dtype[np.int32]]


def max_tiles(tokens: int, adapters: int = MAX_NUMBERS - 1) -> int:
    """Returns the largest number of tiles that so many tokens take.

    The tokens have up to `adapters` different adapters, or none.
    """
    kinds = min(tokens, adapters + 1)
    return kinds + (tokens - kinds) // TILE


def fill_tiles(numbers: np.ndarray[tuple[int], np.dtype[np.int64]], tokens: Ints, tiles: Ints) -> int:
    """Sorts tokens of adapters `numbers` [T] into tiles: `tokens` [16 n] and `tiles` [n], see AdapterTiles.

    Returns the number of tiles; the others get NO_TOKEN.
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
    """A stage's adapters in fp16, with a table of their addresses.

    Ranks are padded to 16. The table is on the device.
    """

    def __init__(self, first: int, last: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(first, last, device, dtype)
        self.device = device
        self._memory: dict[int, Tensor] = {}
        self._experts: dict[int, dict[int, Experts]] = {}
        """adapter number -> layer of the stage -> experts"""
        self._pairs: Tensor | None = None

    @property
    def table(self) -> Tensor:
        """Addresses of a, b and rank of each pair, on the device.

        [numbers, layers, targets, 3] int64; allocated on first use.
        """
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
        """See AdapterTable. Steps in flight still read it: the stream reuses its memory only after them."""
        self._memory.pop(number, None)
        self._experts.pop(number, None)

    def is_routed(self, number: int) -> bool:
        """See AdapterTable."""
        return number in self._experts

    def for_step(self, inputs: StepInputs) -> StepAdapters | None:
        """See AdapterTable."""
        tiles = inputs.adapter_tiles
        if tiles is None and inputs.adapters is not None:
            num_tiles = max_tiles(len(inputs.adapters))
            tokens, numbers = np.empty(num_tiles * TILE, dtype=np.int32), np.empty(num_tiles, dtype=np.int32)
            count = fill_tiles(inputs.adapters.numpy(), tokens, numbers)
            both = on_device([*tokens[: count * TILE].tolist(), *numbers[:count].tolist()], torch.int32, self.device)
            tiles = AdapterTiles(both[: count * TILE].view(count, TILE), both[count * TILE :])
        return None if tiles is None else CudaStepAdapters(self, tiles, self._routed(inputs))

    def _routed(self, inputs: StepInputs) -> list[tuple[dict[int, Experts], Tensor]]:
        """Adapters with experts and the tokens [N] of each, on the device; for steps without graphs."""
        if inputs.adapters is None or not self._experts:
            return []
        numbers = inputs.adapters.numpy()
        found = ((layers, np.flatnonzero(numbers == number).tolist()) for number, layers in self._experts.items())
        return [(layers, on_device(tokens, torch.int64, self.device)) for layers, tokens in found if tokens]


class CudaStepAdapters:
    """The adapters of a step."""

    def __init__(
        self, table: AdapterTable, tiles: AdapterTiles, routed: Sequence[tuple[dict[int, Experts], Tensor]] = ()
    ) -> None:
        """routed: for each adapter with experts its layers and tokens, int64 [tokens]."""
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
        """See LayerAdapters: x [T, in] and y [T, out] fp16, the same number of inputs everywhere."""
        self._launch(linears, squared_relu=False)

    @property
    def has_experts(self) -> bool:
        return bool(self._routed)

    def mix_experts(self, x: Tensor, key: Tensor, hidden: Tensor, y: Tensor) -> None:
        """See LayerAdapters: x, y [T, C], key, hidden [T, F] fp16; computed in fp32."""
        for experts, tokens in self._routed:
            own, added = mix_expert_outputs(experts, x[tokens].float(), key[tokens].float())
            hidden[tokens], y[tokens] = own.to(hidden.dtype), added.to(y.dtype)

    def sqrt_hidden(self, hidden: Tensor) -> None:
        """Takes the square root of `mix_experts`' hidden [T, F]: the next GEMM squares its input."""
        for _, tokens in self._routed:
            hidden[tokens] = hidden[tokens].sqrt()

    def finish_squares(self, one: AdaptedLinear) -> None:
        """Computes max(v + b (a x), 0)^2 in place of y.

        y [T, out] fp16 holds v |v| (SIGNED_SQUARE). Rows without an adapter become what RELU_SQUARED returns, bit for
        bit.
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
    """Whether rows of a step may have adapters. Adapters read the inputs of linear layers."""
    return inputs.adapters is not None or inputs.adapter_tiles is not None
