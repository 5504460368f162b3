"""The interface of a kernel backend. `kernels/naive.py` is its definition in plain torch.

Letters: T tokens of the step, B rows, R tokens with logits, C width, H = C / 64 heads, N = num_slots. A row is a
sequence's part of the step: one or more consecutive tokens. `StepInputs` has the tokens of each row and its slots.

For every operation:

* All tensors of a call are on one device. The backend chooses the dtype of activations (x, delta, mixed, projections):
  fp32 for `naive` and `cpu`, fp16 for `cuda`. Sums and normalisations are in fp32.
* A row's result depends on its own tokens and state only. `cpu` guarantees this bit for bit, `cuda` once it is
  deterministic. Else the number of tokens selects the matrix kernels.
* States are read from `inputs.read_slots` and written to `inputs.write_slots` only. A row's two slots may be equal.
  Slot 0 is never written. The content of the dummy slot 1 is meaningless.
* The bits of a row without an adapter do not depend on other rows' adapters.
* Nothing waits for the device. On a device with graphs, all allocations use torch's allocator.
* Raises ValueError for an unsupported shape, dtype or stride. Never copies a tensor into another layout silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from rwkv_batch.model.adapter_table import AdapterTable, LayerAdapters
from rwkv_batch.model.layer import WHOLE, Cuts, Layer, Linear, Norm, Projections, Prologue
from rwkv_batch.model.state import ModelShape, StateArena
from rwkv_batch.model.step_inputs import StepInputs

Mixed = Any
"""Inputs of linear maps: [M, T, C] or [T, C], or a format that only the backend's own maps read."""
Delta = Any
"""Output of a half layer: [T, C], or a format that only the backend's `shift_mix` and `add` read."""


class Ops(Protocol):
    """The fused operations of a layer, in the order of `rwkv7.forward_layers`."""

    name: str
    """in `--kernels` and /status"""

    @staticmethod
    def unavailable_reason(device: torch.device) -> str | None:
        """Return why this backend cannot run on the device; None if it can."""

    def shift_mix(
        self, x: Tensor, delta: Delta | None, prologue: Prologue, shift: Tensor, inputs: StepInputs
    ) -> tuple[Tensor, Mixed]:
        """Compute the start of a half layer: residual add, LayerNorm, token shift, mixes.

            x_out    = x + delta
            h        = LayerNorm(x_out)              eps 1e-5
            mixed[m] = h + (h_prev - h) * mix[m]     h_prev: h of the previous token, from the slot for a row's first

        x         [T, C]  the residual stream, unchanged
        delta     [T, C]  output of the previous half layer, or None
        prologue  norm    [C] fp32
                  mix     [M, C] fp32 in MIX_ORDER, or as `prepare_layer` made it; M = 6 (time mix) or 1 (channel mix)
                  consumer  the map whose input format `mixed` may take
        shift     [N, C]  dtype of the activations, strided over slots; last h of each sequence; updated

        Returns x_out [T, C] and mixed [M, T, C] in the dtype of x, or `mixed` in the backend's format.
        """

    def project(self, layer: Layer, mixed: Mixed, adapters: LayerAdapters | None = None) -> Projections:
        """Compute all input projections of the time mix, with their activations.

            w = w2 tanh(w1 x)      a = a2 a1 x      g = g2 sigmoid(g1 x)      v_gate = v2 v1 x

        mixed [6, T, C] as `shift_mix` returns it. Returns r, w, k, v, a, g [T, C] and v_gate [T, C] (None in layer 0)
        in the dtype of mixed; w, a and v_gate without bias. `adapters` add to r, k and v.
        """

    def time_mix(
        self, layer: Layer, p: Projections, v_first: Tensor | None, wkv: Tensor, inputs: StepInputs
    ) -> tuple[Mixed, Tensor]:
        """Compute the WKV recurrence with the preparation of its inputs and outputs.

            S <- S diag(decay) + (S (-kk)) (kk * a)^T + v k^T        y = S r        for each token

        Decay, kk, group norm (eps 64e-5), bonus and gate: see `naive.NaiveOps.time_mix`. The arithmetic is fp32.

        p        [T, C] each
        v_first  [T, C]  values of layer 0; None in layer 0
        wkv      [N, H, 64 (value), 64 (key)] fp32 or fp16, or [N, H, 4224] uint8 for int8 (state.py);
                 strided over slots; updated

        Returns y [T, C] before the output map, in the dtype of p or in that map's format, and v_first [T, C].
        """

    def output(self, layer: Layer, y: Mixed) -> Delta:
        """Apply the output map to `time_mix`'s y -> [T, C]; another format only without adapters."""

    def channel_mix(self, layer: Layer, x: Mixed, adapters: LayerAdapters | None = None) -> Delta:
        """Return F_v relu(F_k x)^2 [T, C].

        x is [T, C] or in the format of `shift_mix`. `adapters` add to both maps. Another output format is possible only
        without `adapters`.
        """

    def add(self, x: Tensor, delta: Delta) -> Tensor:
        """Return x + delta [T, C], as in `shift_mix`."""


@runtime_checkable
class PreparesLayers(Protocol):
    """A backend with its own layout of a layer's tensors."""

    def prepare_layer(self, layer: Layer) -> Layer:
        """Convert a layer, once, at load. Raises ValueError for unsupported sizes or dtypes."""


@runtime_checkable
class RunsLayers(Protocol):
    """A backend that can run a stage's layers in one call."""

    def reserve(self, layers: Sequence[Layer], width: int, tokens: int) -> None:
        """Allocate the calling thread's work memory for steps of up to so many tokens.

        Otherwise the process grows with each step that is larger than all earlier ones. Raises MemoryError.
        """

    def run_layers(
        self,
        layers: Sequence[Layer],
        x: Tensor,
        v_first: Tensor | None,
        state: StateArena,
        inputs: StepInputs,
        adapters: AdapterTable | None = None,
        cuts: Cuts = WHOLE,
    ) -> tuple[Tensor, Tensor | None]:
        """Run layers as `rwkv7.forward_layers`: x [T, C] and v_first [T, C] or None -> both.

        adapters: the stage's own, used if `inputs` has rows with one.

        Updates `state` in place. Raises IndexError for rows that do not fit the slots, MemoryError.
        """


@runtime_checkable
class HoldsAdapters(Protocol):
    """A backend with its own adapter layout and kernels; others use `AdapterTable`."""

    def make_adapter_table(self, first: int, last: int, device: torch.device, dtype: torch.dtype) -> AdapterTable:
        """Return an empty table for layers first .. last-1."""


@runtime_checkable
class ReportsMissingKernels(Protocol):
    """A backend that may lack some of its kernels on a device."""

    def missing_kernels(self, device: torch.device) -> dict[str, str]:
        """Return name of a kernel -> why it is missing; slower code replaces it."""


@runtime_checkable
class NormsRows(Protocol):
    """A backend with a kernel for the norm before the head."""

    def norm_rows(self, x: Tensor, rows: Tensor, norm: Norm) -> Tensor:
        """LayerNorm of rows [R] of x [T, C] -> [R, C].

        rows: int64. The result has the dtype of x.
        """


class DraftStep(Protocol):
    """A model's decode step, with the likeliest tokens, in one launch."""

    max_rows: int

    def launch(self, rows: int, table: Tensor, step: Tensor, chosen: Tensor, guesses: Tensor) -> None:
        """Run a step over rows 0 .. rows-1, and count it. A graph may capture it.

        table [steps, 3, R] int64: the slots that each row reads and writes, which differ, and its token; a negative
        token: the one in `chosen`. step [1] int64: the line of the table; counted up. chosen [R], guesses [steps, R]
        int64 get the likeliest tokens.
        """


class HasLateTokens(Protocol):
    """A backend that handles tokens of drafts on the device, before the host knows them. It waits for nothing."""

    def place_tokens(self, to: Tensor, places: Tensor, tokens: Tensor, sources: Tensor) -> None:
        """Set to[places] to tokens[sources]: all int64 on one device, places and sources [n]."""

    def fill_guess_table(
        self, table: Tensor, rows: Tensor, num_rows: int, padded_rows: int, last: Tensor, after: Tensor, num_slots: int
    ) -> None:
        """Fill in a draft model's steps after the accepted guesses of rows.

        table: [steps, 3, R] int64, see `DraftStep`; rows beyond `num_rows` are padding up to `padded_rows`
        rows: [R, 6 + k] int64 on the device: ring of slots, tokens before the drafted ones, guesses (the model has
            read all but the last), request slot, index of its first token in `after`, number of drafted tokens, tokens
        last: [request slots] int64: the token after the known ones
        after: [n] int64: the tokens after each drafted one, row by row
        num_slots: of a ring
        """


@runtime_checkable
class MakesDraftSteps(Protocol):
    """A backend with a `DraftStep` for small models."""

    def fits_draft_step(self, shape: ModelShape, device: torch.device) -> bool:
        """Return whether there is one for models of this shape with weights and states in fp16."""

    def make_draft_step(
        self, layers: Sequence[Layer], embedding: Tensor, ln_out: Norm, head: Linear, state: StateArena
    ) -> DraftStep:
        """Return the step of a model. layers: all, of `prepare_layer`; embedding: [V, C], normalised"""
