"""What a kernel backend provides. `naive.NaiveOps` is the definition; its docstrings hold for all."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from rwkv_batch.model.layer import Layer, Norm, Projections
from rwkv_batch.model.state_arena import StateArena
from rwkv_batch.model.step_inputs import StepInputs


class Ops(Protocol):
    """The fused pieces a layer is made of."""

    name: str

    @staticmethod
    def why_not(device: torch.device) -> str | None:
        """Why this backend cannot serve this device; None if it can."""
        ...

    def shift_mix(
        self, x: Tensor, delta: Tensor | None, norm: Norm, mix: Tensor, shift: Tensor, inputs: StepInputs
    ) -> tuple[Tensor, Tensor]: ...

    def project(self, layer: Layer, mixed: Tensor) -> Projections: ...

    def time_mix(
        self, layer: Layer, p: Projections, v_first: Tensor | None, wkv: Tensor, inputs: StepInputs
    ) -> tuple[Tensor, Tensor]: ...

    def channel_mix(self, layer: Layer, x: Tensor) -> Tensor: ...


@runtime_checkable
class PreparesLayers(Protocol):
    """A backend that wants a layer's tensors in a form of its own."""

    def prepare_layer(self, layer: Layer) -> Layer:
        """Called once per layer, at load."""
        ...


@runtime_checkable
class RunsLayers(Protocol):
    """A backend that runs a stage's layers in one call instead of piece by piece."""

    def can_run_layers(self, state: StateArena) -> bool:
        """Whether it takes states of this type; else the layers are run piece by piece."""
        ...

    def run_layers(
        self, layers: list[Layer], x: Tensor, v_first: Tensor | None, state: StateArena, inputs: StepInputs
    ) -> tuple[Tensor, Tensor | None]:
        """As rwkv7.forward_layers."""
        ...


@runtime_checkable
class DoesWithout(Protocol):
    """A backend that serves a device, but not with all of its kernels."""

    def does_without(self, device: torch.device) -> dict[str, str]:
        """Name of a kernel -> why it is done without; slower ways stand in."""
        ...


@runtime_checkable
class NormsRows(Protocol):
    """A backend with a kernel for the norm before the head."""

    def norm_rows(self, x: Tensor, rows: Tensor, norm: Norm) -> Tensor:
        """LayerNorm of rows [R] of x [T, C] -> [R, C] in the type of x."""
        ...
