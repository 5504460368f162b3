"""Adapters as csrc/layers.cpp finds them: an array of pairs for each, and its address for each token of a step."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch
from torch import Tensor

from rwkv_batch.kernels.cpu_library import PairArgs
from rwkv_batch.model.adapter_table import NO_ADAPTER, AdapterTable
from rwkv_batch.model.low_rank import LayerPairs, Target
from rwkv_batch.model.step_inputs import StepInputs


class CpuAdapterTable(AdapterTable):
    """A stage's adapters, each with an array [layers, targets] of where its pairs are, b transposed."""

    def __init__(self, first: int, last: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(first, last, device, dtype)
        self._arrays: dict[int, ctypes.Array[PairArgs]] = {}
        self._kept: dict[int, list[Tensor]] = {}

    def put(self, number: int, layers: Mapping[int, LayerPairs]) -> None:
        """See AdapterTable."""
        super().put(number, layers)
        array, kept = (PairArgs * (len(self.layers) * len(Target)))(), []
        for i, pairs in enumerate(self.pairs(number)):
            for target, pair in pairs.items():
                exit_ = pair.b.T.contiguous()
                array[i * len(Target) + target] = PairArgs(pair.a.data_ptr(), exit_.data_ptr(), pair.rank)
                kept.append(exit_)
        self._arrays[number], self._kept[number] = array, kept

    def drop(self, number: int) -> None:
        """See AdapterTable."""
        super().drop(number)
        self._arrays.pop(number, None)
        self._kept.pop(number, None)

    def addresses(self, inputs: StepInputs) -> Tensor | None:
        """[T] int64: where the pairs of each token's adapter begin, 0 for none; None: no row has one."""
        if inputs.adapters is None:
            return None
        places = [0 if n == NO_ADAPTER else ctypes.addressof(self._arrays[n]) for n in inputs.adapters.tolist()]
        return torch.tensor(places, dtype=torch.int64).repeat_interleave(inputs.cu_seqlens.diff())
