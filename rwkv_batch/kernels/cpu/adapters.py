"""Adapters for csrc/layers.cpp: an array of layers per adapter, and its address for each token."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rwkv_batch.kernels.cpu.library import AdapterLayerArgs, PairArgs
from rwkv_batch.model.adapter_table import NO_ADAPTER, AdapterTable
from rwkv_batch.model.low_rank import LayerPairs, Pair, Target
from rwkv_batch.model.step_inputs import StepInputs


class CpuAdapterTable(AdapterTable):
    """A stage's adapters, each with an array [layers] of its pairs' addresses, b transposed.

    If plain torch runs the layers (fp16 or int8 states), products use packed matrices: torch's own results depend on
    the
    other tokens. A matrix is packed on first use.
    """

    def __init__(
        self,
        first: int,
        last: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        make_linear: Callable[[Tensor], Callable[[Tensor], Tensor]],
    ) -> None:
        """make_linear: packs a weight [out, in] fp32; its results [N, out] do not depend on N, bit for bit."""
        super().__init__(first, last, device, dtype)
        self._make_linear = make_linear
        self._packed: dict[int, Callable[[Tensor], Tensor]] = {}
        """by id of the weight, which is kept alive"""
        self._arrays: dict[int, ctypes.Array[AdapterLayerArgs]] = {}
        self._kept: dict[int, list[object]] = {}

    def put(self, number: int, layers: Mapping[int, LayerPairs]) -> None:
        """See AdapterTable."""
        self.drop(number)
        super().put(number, layers)
        array = (AdapterLayerArgs * len(self.layers))()
        kept: list[object] = []
        for place, layer in zip(array, self.pairs(number), strict=True):
            for target, pair in layer.pairs.items():
                place.pairs[target] = _pair_args(pair, kept)
            if (experts := layer.experts) is not None:
                of_experts = (PairArgs * (2 * len(experts.pairs)))()
                for e, pairs in enumerate(experts.pairs):
                    for at, target in enumerate((Target.FFN_KEY, Target.FFN_VALUE)):
                        if target in pairs:
                            of_experts[2 * e + at] = _pair_args(pairs[target], kept)
                place.router, place.experts = experts.router.data_ptr(), ctypes.addressof(of_experts)
                place.num_experts, place.active = len(experts.pairs), experts.active
                kept.append(of_experts)
        self._arrays[number], self._kept[number] = array, kept

    def drop(self, number: int) -> None:
        """See AdapterTable."""
        for layer in self.pairs(number) if number in self._arrays else ():
            routers = [] if layer.experts is None else [layer.experts.router]
            for weight in (*routers, *(weight for pair in layer.all_pairs for weight in (pair.a, pair.b))):
                self._packed.pop(id(weight), None)
        super().drop(number)
        self._arrays.pop(number, None)
        self._kept.pop(number, None)

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """See AdapterTable: [N, in] -> [N, out], bit-identical for a token in any batch."""
        if (linear := self._packed.get(id(weight))) is None:
            linear = self._packed[id(weight)] = self._make_linear(weight)
        return linear(x)

    def addresses(self, inputs: StepInputs) -> Tensor | None:
        """[T] int64: address of each token's adapter, 0: none; None: no row has one."""
        if inputs.adapters is None:
            return None
        places = {number: ctypes.addressof(array) for number, array in self._arrays.items()} | {NO_ADAPTER: 0}
        return torch.tensor([places[number] for number in inputs.adapters.tolist()], dtype=torch.int64)


def _pair_args(pair: Pair, kept: list[object]) -> PairArgs:
    """Returns a pair's addresses; appends the tensors to keep alive to `kept`."""
    b_transposed = pair.b.T.contiguous()
    kept.append(b_transposed)
    return PairArgs(pair.a.data_ptr(), b_transposed.data_ptr(), pair.rank)
