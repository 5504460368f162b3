"""What a kernel backend provides: the kernel contract. `kernels/naive.py` computes the same in plain torch and is what
every backend is tested against.

Letters: T tokens of the step in all, B rows, R tokens after which logits are wanted, C width of the model, H = C / 64
heads, N = num_slots. A *row* is a sequence's part of the step, one or more tokens that follow each other; `StepInputs`
says which tokens are a row's, which slot holds the state before them and which one gets the state after them.

What holds for every operation:

* All tensors of a call are on one device. Activations (x, delta, mixed, projections) are of one type, which the
  backend chooses: fp32 for `naive` and `cpu`, fp16 for `cuda`. Sums and normalisations are taken in fp32 in each.
* A row's result depends on its own tokens and state alone, bit for bit where the backend can say so (`cpu` can; on
  `cuda` the number of tokens chooses the matrix kernels).
* States are read from `inputs.read_slots` and written to `inputs.write_slots`, no others; the two may be equal.
  Slot 0 is never written; what the dummy slot 1 holds is meaningless.
* A row without an adapter has the same bits whatever adapters the others have.
* Nothing waits for the device, and where the device has graphs nothing allocates outside of torch's allocator.
* Raises ValueError for tensors of a shape, type or stride that it cannot take; it copies none into form silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from rwkv_batch.model.adapter_table import AdapterTable, LayerAdapters
from rwkv_batch.model.layer import Layer, Norm, Projections, Prologue
from rwkv_batch.model.state_arena import StateArena
from rwkv_batch.model.step_inputs import StepInputs

Mixed = Any
"""Inputs of maps: [M, T, C] or [T, C], or a backend's own form of them, which only its own maps read."""
Delta = Any
"""What a half layer adds to the residual stream: [T, C], or a backend's own form of it, which only its own `shift_mix`
and `add` read."""


class Ops(Protocol):
    """The fused pieces a layer is made of, in the order in which `rwkv7.forward_layers` calls them."""

    name: str
    """As `--kernels` and /status have it."""

    @staticmethod
    def unavailable_reason(device: torch.device) -> str | None:
        """Why this backend cannot serve this device; None if it can."""
        ...

    def shift_mix(
        self, x: Tensor, delta: Delta | None, prologue: Prologue, shift: Tensor, inputs: StepInputs
    ) -> tuple[Tensor, Mixed]:
        """Residual add, LayerNorm, token shift and the mixes at the entrance of a half layer.

        x [T, C]: the residual stream; not changed. delta [T, C] or None: what the half layer before adds to it.
        entrance: a norm of weight and bias [C] fp32, eps 1e-5; mix [M, C], M = 6 for the time mix, 1 for the channel
        mix, fp32 in the order MIX_ORDER, or what `prepare_layer` made of it; a reader, into whose form the mixed inputs
        may be brought. shift [N, C] of the activations' type, strided over slots: the last normalised token of each
        sequence; updated.

        With h = LayerNorm(x + delta) and h' the token before (the slot's for a row's first): returns x + delta [T, C]
        and mixed [M, T, C] = h + (h' - h) * mix, both of the type of x, or mixed as this backend's own maps take it.
        """
        ...

    def project(self, layer: Layer, mixed: Mixed, adapters: LayerAdapters | None = None) -> Projections:
        """All linear maps at the entrance of the time mix, with the activations between them.

        mixed [6, T, C] as `shift_mix` returns it. Returns r, w, k, v, a, g [T, C] and v_gate [T, C] (None in layer 0),
        each of the type of mixed: w = w2 tanh(w1 x), a = a2 a1 x, g = g2 sigmoid(g1 x), v_gate = v2 v1 x; w, a and
        v_gate without their biases. `adapters` add to r, k and v.
        """
        ...

    def time_mix(
        self, layer: Layer, p: Projections, v_first: Tensor | None, wkv: Tensor, inputs: StepInputs
    ) -> tuple[Mixed, Tensor]:
        """The WKV recurrence with all that is done to its inputs and its outputs.

        p: [T, C] each. v_first [T, C]: the values of layer 0, None in layer 0 itself. wkv [N, H, 64 (value), 64 (key)]
        fp32 or fp16, or [N, H, 4224] uint8, which is int8 (state_format.py), strided over slots; updated; the arithmetic
        is fp32 in each. Returns y [T, C] in the type of p, or as the
        output map takes it, which is still to be applied, and v_first [T, C].

        S <- S diag(decay) + (S (-kk)) (kk * a)^T + v k^T and y = S r for each token, with the decays, kk, k, v, the
        group norm (eps 64e-5), the bonus and the gate as `naive.NaiveOps.time_mix` has them.
        """
        ...

    def output(self, layer: Layer, y: Mixed) -> Delta:
        """The output map of `time_mix`'s y -> [T, C], or another form if no row of the step has an adapter."""
        ...

    def channel_mix(self, layer: Layer, x: Mixed, adapters: LayerAdapters | None = None) -> Delta:
        """F_v relu(F_k x)^2 for x [T, C], or as `shift_mix` has made it, -> [T, C]; `adapters` add to both maps.

        In another form only without `adapters`.
        """
        ...

    def add(self, x: Tensor, delta: Delta) -> Tensor:
        """x + delta [T, C], as `shift_mix` has it."""
        ...


@runtime_checkable
class PreparesLayers(Protocol):
    """A backend that wants a layer's tensors in a form of its own."""

    def prepare_layer(self, layer: Layer) -> Layer:
        """Called once per layer, at load. Raises ValueError for sizes or types that it cannot take."""
        ...


@runtime_checkable
class RunsLayers(Protocol):
    """A backend that runs a stage's layers in one call instead of piece by piece."""

    def can_run_layers(self, state: StateArena) -> bool:
        """Whether it takes states of this type; else the layers are run piece by piece."""
        ...

    def run_layers(
        self,
        layers: Sequence[Layer],
        x: Tensor,
        v_first: Tensor | None,
        state: StateArena,
        inputs: StepInputs,
        adapters: AdapterTable | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As `rwkv7.forward_layers`: x [T, C] and v_first [T, C] or None -> both for the next stage.

        `adapters`: the stage's own, where `inputs` has rows with one. `state` is read and updated in place. Raises
        ValueError for states that `can_run_layers` refuses, IndexError for rows that do not fit the slots, MemoryError.
        """
        ...


@runtime_checkable
class HoldsAdapters(Protocol):
    """A backend that keeps adapters in a form of its own, and adds them by kernels; others take `AdapterTable`."""

    def make_adapter_table(self, first: int, last: int, device: torch.device, dtype: torch.dtype) -> AdapterTable:
        """For layers first .. last-1, empty."""
        ...


@runtime_checkable
class ReportsMissingKernels(Protocol):
    """A backend that serves a device, but not with all of its kernels."""

    def missing_kernels(self, device: torch.device) -> dict[str, str]:
        """Name of a kernel -> why it is done without; slower ways stand in."""
        ...


@runtime_checkable
class NormsRows(Protocol):
    """A backend with a kernel for the norm before the head."""

    def norm_rows(self, x: Tensor, rows: Tensor, norm: Norm) -> Tensor:
        """LayerNorm of rows [R] int64 of x [T, C] -> [R, C] in the type of x."""
        ...
