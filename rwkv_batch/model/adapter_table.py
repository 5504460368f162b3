"""A stage's adapters by number, and their contribution to a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rwkv_batch.model.low_rank import Experts, LayerPairs, Target
from rwkv_batch.model.step_inputs import StepInputs

NO_ADAPTER = 0
"""number of rows without an adapter"""


class AdaptedLinear(NamedTuple):
    """A linear map that adapters may extend."""

    target: Target
    x: Tensor
    """[T, in]"""
    y: Tensor
    """[T, out]: the map's output for x; adapters add to it in place"""


class LayerAdapters(Protocol):
    def add(self, *maps: AdaptedLinear) -> None:
        """Add b (a x) to the y of each map. Only for tokens whose adapter has a pair for the map."""

    def mix_experts(self, x: Tensor, key: Tensor, hidden: Tensor, y: Tensor) -> None:
        """Replace hidden and y by `mix_expert_outputs` of x and key.

        hidden is [T, F] and y is [T, C]. Only for tokens whose adapter has experts.
        """


class StepAdapters(Protocol):
    def for_layer(self, number: int) -> LayerAdapters:
        """Return the adapters' contribution in one layer.

        number: the layer's index in the stage
        """


class AdapterTable:
    """Adapters in plain torch: the definition that backends with kernels are tested against."""

    def __init__(self, first: int, last: int, device: torch.device, dtype: torch.dtype) -> None:
        """For layers first .. last-1 of the model, on `device`, in `dtype`."""
        self.layers = range(first, last)
        self._device, self._dtype = device, dtype
        self._adapters: dict[int, list[LayerPairs]] = {}

    def put(self, number: int, layers: Mapping[int, LayerPairs]) -> None:
        """Add an adapter under a number. No running row may use the number, which is above 0."""
        self._adapters[number] = [layers.get(i, LayerPairs()).to(self._device, self._dtype) for i in self.layers]

    def drop(self, number: int) -> None:
        """Remove an adapter. No running row may use the adapter."""
        self._adapters.pop(number, None)

    def pairs(self, number: int) -> list[LayerPairs]:
        """Return the adapter's pairs for each layer of the stage."""
        return self._adapters[number]

    def is_routed(self, number: int) -> bool:
        """Return whether graphs cannot run the adapter's rows: its experts are chosen per token, on the device."""
        return False

    def for_step(self, inputs: StepInputs) -> StepAdapters | None:
        """Return the adapters' contribution to a step. None: no row has an adapter."""
        if inputs.adapters is None:
            return None
        numbers = [number for number in inputs.adapters.unique().tolist() if number != NO_ADAPTER]
        token_lists = [(inputs.adapters == number).nonzero().squeeze(1).to(self._device) for number in numbers]
        groups = [(self._adapters[number], tokens) for number, tokens in zip(numbers, token_lists, strict=True)]
        return _Groups(groups)


class _Groups:
    """A step's tokens grouped by adapter."""

    def __init__(self, groups: list[tuple[list[LayerPairs], Tensor]]) -> None:
        self._groups = groups

    def for_layer(self, number: int) -> LayerAdapters:
        return _LayerGroups([(layers[number], tokens) for layers, tokens in self._groups])


class _LayerGroups:
    def __init__(self, groups: list[tuple[LayerPairs, Tensor]]) -> None:
        self._groups = groups

    def add(self, *maps: AdaptedLinear) -> None:
        for layer, tokens in self._groups:
            for target, x, y in maps:
                if (pair := layer.pairs.get(target)) is not None:
                    y[tokens] += x[tokens] @ pair.a.T @ pair.b.T

    def mix_experts(self, x: Tensor, key: Tensor, hidden: Tensor, y: Tensor) -> None:
        for layer, tokens in self._groups:
            if layer.experts is not None:
                hidden[tokens], y[tokens] = mix_expert_outputs(layer.experts, x[tokens], key[tokens])


def mix_expert_outputs(experts: Experts, x: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return hidden [N, F] and y [N, C] of tokens x.

    x is [N, C]. key [N, F] is the model's own key map of x.

    The channel mix of expert e is V h_e + b_e (a_e h_e). With gates g_e, the mixture is V hidden + y, where
    hidden = sum of g_e h_e and y = sum of g_e b_e (a_e h_e). So the large matrices multiply once.
    """
    scores = torch.cat([x.new_zeros(len(x), 1), x @ experts.router.T], dim=1)
    top = scores.topk(experts.active, dim=1)
    gates = torch.zeros_like(scores).scatter(1, top.indices, torch.softmax(top.values.float(), dim=1).to(scores.dtype))
    hidden, y = torch.zeros_like(key), torch.zeros_like(x)
    for gate, pairs in zip(
        gates.split(1, dim=1), experts.pairs, strict=True
    ):  # all tokens, because a selection would wait for the device
        expert_hidden = key
        if (pair := pairs.get(Target.FFN_KEY)) is not None:
            expert_hidden = key + x @ pair.a.T @ pair.b.T
        expert_hidden = gate * torch.relu(expert_hidden).square()
        hidden += expert_hidden
        if (pair := pairs.get(Target.FFN_VALUE)) is not None:
            y += expert_hidden @ pair.a.T @ pair.b.T
    return hidden, y
