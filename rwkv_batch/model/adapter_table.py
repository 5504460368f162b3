"""The adapters that a stage holds beside its weights, by number; and what they add to one step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from rwkv_batch.model.low_rank import LayerPairs, Pair, Target
from rwkv_batch.model.step_inputs import StepInputs

NO_ADAPTER = 0
"""Number of rows without one."""


class LayerAdapters(Protocol):
    """What the rows' adapters add in one layer of a step."""

    def add(self, target: Target, x: Tensor, y: Tensor) -> None:
        """y [T, out] += b (a x) for tokens x [T, in] of rows that have an adapter with such a pair; others stay."""
        ...


class StepAdapters(Protocol):
    """What the rows' adapters add in one step."""

    def of_layer(self, number: int) -> LayerAdapters:
        """Of the stage's layer of this number, from 0."""
        ...


class AdapterTable:
    """Plain torch: the definition that backends with kernels are tested against."""

    def __init__(self, first: int, last: int, device: torch.device, dtype: torch.dtype) -> None:
        """Of layers first .. last-1 of the model; on `device`, in `dtype`."""
        self.layers = range(first, last)
        self._device, self._dtype = device, dtype
        self._held: dict[int, list[LayerPairs]] = {}

    def put(self, number: int, layers: Mapping[int, LayerPairs]) -> None:
        """Take an adapter in under a number above 0 that no running row has."""
        self._held[number] = [
            {target: self._moved(pair) for target, pair in layers.get(i, {}).items()} for i in self.layers
        ]

    def drop(self, number: int) -> None:
        """Let go of an adapter that no running row has."""
        self._held.pop(number, None)

    def pairs(self, number: int) -> list[LayerPairs]:
        """Of each layer of the stage."""
        return self._held[number]

    def of_step(self, inputs: StepInputs) -> StepAdapters | None:
        """What the step's rows add; None: no row has an adapter."""
        if inputs.adapters is None:
            return None
        tokens = inputs.adapters.repeat_interleave(inputs.cu_seqlens.diff())
        numbers = [number for number in tokens.unique().tolist() if number != NO_ADAPTER]
        return _Groups([(self._held[number], (tokens == number).nonzero().squeeze(1)) for number in numbers])

    def _moved(self, pair: Pair) -> Pair:
        return Pair(*(one.to(self._device, self._dtype).contiguous() for one in (pair.a, pair.b)))


class _Groups:
    """The step's tokens by adapter."""

    def __init__(self, groups: list[tuple[list[LayerPairs], Tensor]]) -> None:
        self._groups = groups

    def of_layer(self, number: int) -> LayerAdapters:
        """See StepAdapters."""
        return _LayerGroups([(layers[number], tokens) for layers, tokens in self._groups])


class _LayerGroups:
    """Those of one layer."""

    def __init__(self, groups: list[tuple[LayerPairs, Tensor]]) -> None:
        self._groups = groups

    def add(self, target: Target, x: Tensor, y: Tensor) -> None:
        """See LayerAdapters."""
        for pairs, tokens in self._groups:
            if (pair := pairs.get(target)) is not None:
                y[tokens] += (x[tokens] @ pair.a.T) @ pair.b.T
