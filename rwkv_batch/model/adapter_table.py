"""The adapters that a stage holds beside its weights, by number; and what they add to one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rwkv_batch.model.low_rank import Experts, LayerPairs, Target
from rwkv_batch.model.step_inputs import StepInputs

Multiply = Callable[[Tensor, Tensor], Tensor]
"""x [N, in], weight [out, in] -> [N, out]"""
NO_ADAPTER = 0
"""Number of rows without one."""


class AdaptedLinear(NamedTuple):
    """A map that adapters may stand beside."""

    target: Target
    x: Tensor
    """[T, in]"""
    y: Tensor
    """[T, out]: what it made of x; added to in place"""


class LayerAdapters(Protocol):
    """What the rows' adapters add in one layer of a step."""

    def add(self, *maps: AdaptedLinear) -> None:
        """y += b (a x) beside each map, for tokens of rows that have an adapter with such a pair; others stay."""
        ...

    def mix_experts(self, x: Tensor, key: Tensor, hidden: Tensor, y: Tensor) -> None:
        """For tokens whose adapter has experts: hidden [T, F] and y [T, C] become what `mixed` says of x and key."""
        ...


class StepAdapters(Protocol):
    """What the rows' adapters add in one step."""

    def for_layer(self, number: int) -> LayerAdapters:
        """Of the stage's layer of this number, from 0."""
        ...


class AdapterTable:
    """Plain torch: the definition that backends with kernels are tested against."""

    def __init__(self, first: int, last: int, device: torch.device, dtype: torch.dtype) -> None:
        """Of layers first .. last-1 of the model; on `device`, in `dtype`."""
        self.layers = range(first, last)
        self._device, self._dtype = device, dtype
        self._adapters: dict[int, list[LayerPairs]] = {}

    def put(self, number: int, layers: Mapping[int, LayerPairs]) -> None:
        """Take an adapter in under a number above 0 that no running row has."""
        self._adapters[number] = [layers.get(i, LayerPairs()).to(self._device, self._dtype) for i in self.layers]

    def drop(self, number: int) -> None:
        """Let go of an adapter that no running row has."""
        self._adapters.pop(number, None)

    def pairs(self, number: int) -> list[LayerPairs]:
        """Of each layer of the stage."""
        return self._adapters[number]

    def is_routed(self, number: int) -> bool:
        """Whether graphs cannot hold steps of its rows: what a token meets is known on the device alone."""
        return False

    def for_step(self, inputs: StepInputs) -> StepAdapters | None:
        """What the step's rows add; None: no row has an adapter."""
        if inputs.adapters is None:
            return None
        numbers = [number for number in inputs.adapters.unique().tolist() if number != NO_ADAPTER]
        places = [(inputs.adapters == number).nonzero().squeeze(1).to(self._device) for number in numbers]
        groups = [(self._adapters[number], place) for number, place in zip(numbers, places, strict=True)]
        return _Groups(groups, self.multiply)

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [N, in] by weight [out, in], which is of an adapter that is held: [N, out]."""
        return plain(x, weight)


class _Groups:
    """The step's tokens by adapter."""

    def __init__(self, groups: list[tuple[list[LayerPairs], Tensor]], multiply: Multiply) -> None:
        self._groups, self._multiply = groups, multiply

    def for_layer(self, number: int) -> LayerAdapters:
        """See StepAdapters."""
        return _LayerGroups([(layers[number], tokens) for layers, tokens in self._groups], self._multiply)


class _LayerGroups:
    """Those of one layer."""

    def __init__(self, groups: list[tuple[LayerPairs, Tensor]], multiply: Multiply) -> None:
        self._groups, self._multiply = groups, multiply

    def add(self, *maps: AdaptedLinear) -> None:
        """See LayerAdapters."""
        for layer, tokens in self._groups:
            for target, x, y in maps:
                if (pair := layer.pairs.get(target)) is not None:
                    y[tokens] += self._multiply(self._multiply(x[tokens], pair.a), pair.b)

    def mix_experts(self, x: Tensor, key: Tensor, hidden: Tensor, y: Tensor) -> None:
        """See LayerAdapters."""
        for layer, tokens in self._groups:
            if layer.experts is not None:
                hidden[tokens], y[tokens] = mixed(layer.experts, x[tokens], key[tokens], self._multiply)


def plain(x: Tensor, weight: Tensor) -> Tensor:
    """x [N, in] by weight [out, in]: [N, out]."""
    return x @ weight.T


def mixed(experts: Experts, x: Tensor, key: Tensor, multiply: Multiply = plain) -> tuple[Tensor, Tensor]:
    """(hidden [N, F], y [N, C]) of tokens x [N, C] for which the model's own key map gives key [N, F].

    The channel mix of an expert e is V h_e + b_e (a_e h_e), so that of the mixture is V hidden + y with hidden the sum
    of g_e h_e and y that of g_e b_e (a_e h_e): the large matrices multiply once.
    """
    scores = torch.cat([x.new_zeros(len(x), 1), multiply(x, experts.router)], dim=1)
    top = scores.topk(experts.active, dim=1)
    gates = torch.zeros_like(scores).scatter(1, top.indices, torch.softmax(top.values.float(), dim=1).to(scores.dtype))
    hidden, y = torch.zeros_like(key), torch.zeros_like(x)
    for gate, pairs in zip(gates.split(1, dim=1), experts.pairs, strict=True):  # all tokens: to choose is to wait
        of_expert = key
        if (pair := pairs.get(Target.FFN_KEY)) is not None:
            of_expert = key + multiply(multiply(x, pair.a), pair.b)
        of_expert = gate * torch.relu(of_expert).square()
        hidden += of_expert
        if (pair := pairs.get(Target.FFN_VALUE)) is not None:
            y += multiply(multiply(of_expert, pair.a), pair.b)
    return hidden, y
