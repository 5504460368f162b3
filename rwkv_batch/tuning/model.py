"""RWKV-7's forward for training, in plain PyTorch.

It works on the tensors of a weight file.

The formulas are those of `kernels/naive.py`; gradients come from autograd. The residual stream and the WKV state are
fp32 (or wider); autocast may compute the products in bf16.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rwkv_batch.model.quant.formats import Quantised
from rwkv_batch.model.state import HEAD_SIZE, ModelShape
from rwkv_batch.model.weights import TABLES, UNUSED_TENSORS, Weights, expected_shapes
from rwkv_batch.tuning.pacing import Pacer
from rwkv_batch.tuning.products import CompactProduct, product
from rwkv_batch.tuning.wkv import CHUNK, wkv_chunked

_DECAY = math.exp(-0.5)
_LOSS_LOGITS = 1 << 24
"""Logits in memory at once."""
LORA_TARGETS = ("att.receptance", "att.key", "att.value", "att.output", "ffn.key", "ffn.value")


def shifted(x: Tensor, begins: Tensor) -> Tensor:
    """Shift x [rows, time, C] by one token. The result is zero where `begins` [rows, time, 1] is set."""
    return F.pad(x, (0, 0, 1, -1)) * ~begins


@dataclass(slots=True)
class Tunables:
    """What is added to the weights: initial states and low-rank pairs."""

    states: list[Tensor] = field(default_factory=list)
    """per layer [H, 64 values, 64 keys]; empty: zero"""
    pairs: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """weight's name without `.weight` -> A [rank, in], B [out, rank]: W + B A"""

    @property
    def parameters(self) -> list[Tensor]:
        """All of them, [H, 64, 64], [rank, in] and [out, rank]."""
        return [*self.states, *(one for pair in self.pairs.values() for one in pair)]


def new_tunables(shape: ModelShape, method: str, rank: int, device: torch.device, seed: int) -> Tunables:
    """Return zero states and pairs whose product is zero. `method` names `state` and `lora`; others add nothing."""
    random = torch.Generator().manual_seed(seed)
    tunables = Tunables()
    if "state" in method:
        tunables.states = [torch.zeros(shape.wkv, device=device, requires_grad=True) for _ in range(shape.layers)]
    if "lora" in method:
        sizes = expected_shapes(shape)
        for name in (f"blocks.{i}.{target}" for i in range(shape.layers) for target in LORA_TARGETS):
            out, inner = sizes[f"{name}.weight"]
            a = (torch.randn(rank, inner, generator=random) * inner**-0.5).to(device).requires_grad_()
            tunables.pairs[name] = a, torch.zeros(out, rank, device=device, requires_grad=True)
    return tunables


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How a batch is trained in the memory that is free."""

    needed_bytes: int = 0
    piece_rows: int = 0
    """Rows that are trained on at once; 0: all."""
    recomputed_layers: int = 0
    """The backward computes the first layers again."""


class TrainingModel:
    """Weights by their names in files, and the tunables."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        shape: ModelShape,
        tunables: Tunables | None = None,
        head_bias: Tensor | None = None,
    ) -> None:
        """`head_bias` [rows of the head]: is added to the logits: the log of how many ids share a row."""
        self.weights = weights
        self.shape = shape
        self.tunables = tunables or Tunables()
        self.head_bias = head_bias
        self.row_of_id: Tensor | None = None
        """[V]: each id's row of the head; None: the id itself"""
        self.compact: Mapping[str, Quantised] = {}
        """weights that stay quantised; they are not in `weights`"""
        self.plan = MemoryPlan()
        self.pacer: Pacer | None = None
        """of a GPU that others use too"""

    @property
    def device(self) -> torch.device:
        return self.weights["emb.weight"].device

    def hidden(self, tokens: Tensor, begins: Tensor) -> Tensor:
        """Return the head's inputs [rows, time, C] of packed documents.

        tokens [rows, time]. `begins` [rows, time] marks first tokens, at multiples of CHUNK only.
        """
        keep, mark = ~begins[:, ::CHUNK], begins[:, :, None]
        x = self._norm(F.embedding(tokens, self.weights["emb.weight"]).to(self._wide), "blocks.0.ln0")
        v_first = None
        for layer in range(self.shape.layers):
            if layer < self.plan.recomputed_layers and torch.is_grad_enabled():
                x, v_first = checkpoint(self._layer, layer, x, v_first, mark, keep, use_reentrant=False)
            else:
                x, v_first = self._layer(layer, x, v_first, mark, keep)
        return self._norm(x, "ln_out")

    def loss(self, hidden: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted mean cross-entropy of hidden [N, C].

        targets, weights: [N]

        A row that several ids share counts once per id.
        """
        if self.row_of_id is not None:
            targets = self.row_of_id[targets]
        head = self.weights["head.weight"]
        loss: Tensor = _HeadLoss.apply(hidden, head, self.head_bias, targets, weights, self.pacer)
        return loss

    @torch.no_grad()
    def scores(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return losses [N] and whether targets are most likely [N].

        hidden: [N, C]
        """
        if self.row_of_id is not None:
            targets = self.row_of_id[targets]
        found, head = [], self.weights["head.weight"]
        for h, t in zip(hidden.split(_loss_rows(head)), targets.split(_loss_rows(head)), strict=True):
            if self.pacer is not None:
                self.pacer.wait("scores", len(h))
            logits = _logits(h, head, None)
            is_best = logits.argmax(-1) == t
            if self.head_bias is not None:
                logits += self.head_bias
            losses = F.cross_entropy(logits, t, reduction="none")
            found.append((losses if self.head_bias is None else losses + self.head_bias[t], is_best))
        return torch.cat([loss for loss, _ in found]), torch.cat([one for _, one in found])

    @property
    def _wide(self) -> torch.dtype:
        """Dtype of the residual stream."""
        return torch.promote_types(self.weights["blocks.0.ln1.weight"].dtype, torch.float32)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _linear(self, x: Tensor, name: str) -> Tensor:
        y = self._base_product(x, f"{name}.weight")
        if name in self.tunables.pairs:
            a, b = self.tunables.pairs[name]
            with torch.autocast(x.device.type, enabled=False):
                y = y + x @ a.t() @ b.t()
        return y

    def _base_product(self, x: Tensor, name: str) -> Tensor:
        """Return x @ W.T of the untuned weight [out, in]."""
        if name not in self.compact:
            return product(x, self.weights[name].t())
        y: Tensor = CompactProduct.apply(x, self.compact[name])
        return y

    def _layer(
        self, layer: int, x: Tensor, v_first: Tensor | None, begins: Tensor, keep: Tensor
    ) -> tuple[Tensor, Tensor]:
        y, v_first = self._time_mix(layer, self._norm(x, f"blocks.{layer}.ln1"), v_first, begins, keep)
        x = x + y
        h, ffn = self._norm(x, f"blocks.{layer}.ln2"), f"blocks.{layer}.ffn"
        mixed = h + (shifted(h, begins) - h) * self.weights[f"{ffn}.x_k"]
        return x + self._linear(torch.relu(self._linear(mixed, f"{ffn}.key")) ** 2, f"{ffn}.value"), v_first

    def _time_mix(
        self, layer: int, x: Tensor, v_first: Tensor | None, begins: Tensor, keep: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the output [rows, time, C] and layer 0's values. The letters are those of `model/layer.py`."""
        att = f"blocks.{layer}.att"
        p = {name: self.weights[f"{att}.{name}"] for name in _VECTORS}
        d = shifted(x, begins) - x

        def low_rank(letter: str, between: Any = None) -> Tensor:
            down, up = (self.weights[f"{att}.{letter}{half}"] for half in "12")
            with torch.autocast(x.device.type, enabled=False):  # little work, to which the gradients are sensitive
                first = (x + d * self.weights[f"{att}.x_{letter}"]) @ down.to(x.dtype)
                return (first if between is None else between(first)) @ up.to(x.dtype)

        def heads(t: Tensor) -> Tensor:
            return t.to(self._wide).view(*t.shape[:-1], -1, HEAD_SIZE)

        r, k, v = (self._linear(x + d * p[f"x_{letter}"], f"{att}.{name}") for letter, name in _PROJECTIONS)
        w = p["w0"] + low_rank("w", torch.tanh)
        a = torch.sigmoid(p["a0"] + low_rank("a"))
        g = low_rank("g", torch.sigmoid)
        if v_first is None:
            v_first = v
        else:
            v = v + (v_first - v) * torch.sigmoid(self.weights[f"{att}.v0"] + low_rank("v"))
        kk = F.normalize(heads(k * p["k_k"]), dim=-1, eps=1e-12)
        k = k * (1 + (a - 1) * p["k_a"])
        with torch.autocast(x.device.type, enabled=False):
            decay = -_DECAY * torch.sigmoid(heads(w))
            r, k, v_heads = heads(r), heads(k), heads(v)
            first = self.tunables.states[layer] if self.tunables.states else None
            y = wkv_chunked(r, decay, k, v_heads, -kk, kk * heads(a), keep, first)
            norm = self.weights[f"{att}.ln_x.weight"], self.weights[f"{att}.ln_x.bias"]
            y = F.group_norm(y.flatten(2).flatten(0, 1), y.shape[2], *norm, eps=64e-5).view(y.shape)
            y = y + (r * k * self.weights[f"{att}.r_k"]).sum(-1, keepdim=True) * v_heads
        return self._linear(y.flatten(2) * g, f"{att}.output"), v_first


_PROJECTIONS = (("r", "receptance"), ("k", "key"), ("v", "value"))
_VECTORS = ("x_r", "x_k", "x_v", "w0", "a0", "k_k", "k_a")


def _logits(hidden: Tensor, head: Tensor, bias: Tensor | None) -> Tensor:
    """Return fp32 (or wider) logits [N, V]."""
    logits = F.linear(hidden.to(head.dtype), head)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if bias is None else logits + bias


def _loss_rows(head: Tensor) -> int:
    return max(1, _LOSS_LOGITS // len(head))


class _HeadLoss(torch.autograd.Function):
    """The head and the weighted mean cross-entropy. Keeps gradients of hidden [N, C] and head, but no logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, bias: Tensor | None, targets: Tensor, weights: Tensor,
        pacer: Pacer | None,
    ) -> Tensor:  # fmt: skip
        weights = weights / weights.sum().clamp_min(1e-9)
        hidden_grad = torch.empty_like(hidden)
        head_grad = torch.zeros_like(head) if head.requires_grad else None
        loss = hidden.new_zeros(())
        for start in range(0, len(hidden), _loss_rows(head)):
            rows = slice(start, start + _loss_rows(head))
            if pacer is not None:
                pacer.wait("loss" if start else "last layer", 0)
            logs = F.log_softmax(_logits(hidden[rows], head, bias), -1)
            of_targets = logs.gather(1, targets[rows, None])[:, 0]
            loss -= ((of_targets if bias is None else of_targets - bias[targets[rows]]) * weights[rows]).sum()
            grad = logs.exp_()
            grad.scatter_add_(1, targets[rows, None], grad.new_full((len(grad), 1), -1.0))
            grad = (grad * weights[rows, None]).to(head.dtype)
            hidden_grad[rows] = grad @ head
            if head_grad is not None:
                head_grad.addmm_(grad.T, hidden[rows].to(head.dtype))
        ctx.save_for_backward(hidden_grad, head_grad)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, head_grad = ctx.saved_tensors
        return hidden_grad * grads[0], None if head_grad is None else head_grad * grads[0], None, None, None, None


def load_model(
    weights: Weights, device: torch.device, dtype: torch.dtype, is_full: bool, kind: type[TrainingModel],
    compact: Mapping[str, Quantised],
) -> TrainingModel:  # fmt: skip
    """Return a training model of a weight file. Matrices get `dtype`; vectors, and all that `is_full` tunes, fp32.

    compact: matrices that stay quantised

    Rows of the head that are equal to its last row, as those of ids without a token, become one row.
    """

    def loaded(name: str) -> Tensor:
        tensor = weights.tensor(name)
        is_matrix = tensor.dim() == 2 and not name.endswith("r_k")
        tensor = tensor if is_matrix else tensor.reshape(-1, HEAD_SIZE) if name.endswith("r_k") else tensor.flatten()
        copy = torch.empty(tensor.shape, dtype=dtype if is_matrix and not is_full else torch.float32, device=device)
        return copy.copy_(tensor).requires_grad_(is_full)

    tensors = {name: loaded(name) for name in weights.tensors if name not in UNUSED_TENSORS and name not in compact}
    model = kind(tensors, weights.shape)
    model.compact = compact
    if not is_full:
        share_equal_rows(model, tensors)
    return model


def share_equal_rows(model: TrainingModel, tensors: dict[str, Tensor]) -> None:
    """Keep one of the head's equal rows [V, C]. They equal its last row; `tensors` are the model's weights."""
    head = tensors[TABLES[1]]
    is_last = torch.cat([(part == head[-1]).all(1) for part in head.split(1 << 13)])
    count = int(is_last.sum())
    if count == 1:
        return
    rows = torch.where(is_last, len(head) - count, (~is_last).cumsum(0) - 1)
    tensors[TABLES[1]] = torch.cat([head[~is_last], head[-1:]])
    model.row_of_id = rows
    model.head_bias = torch.zeros(len(head) - count + 1, device=head.device)
    model.head_bias[-1] = math.log(count)


def activation_bytes(shape: ModelShape, recomputes: bool, itemsize: int) -> int:
    """Estimate the bytes that a training step keeps per token."""
    one_layer = shape.width * (_FLOATS_PER_CHANNEL * 4 + 12 * itemsize)
    return one_layer + shape.layers * shape.width * 8 if recomputes else one_layer * shape.layers


_FLOATS_PER_CHANNEL = 90
"""fp32 numbers per channel and token that a layer keeps for its gradients, as measured; most belong to the WKV."""


FUSED_BYTES = (((90, 12, 240), (126, 12, 280)), ((32, 6, 120), (50, 6, 140)))
"""Bytes per channel and token of the fused functions, in fp32 and in bf16, without and with a LoRA: a layer that is
kept, one that is computed again, and what one layer needs while it runs."""


def parameters_of(model: TrainingModel, is_full: bool) -> Iterable[Tensor]:
    """Return what training changes: weights [out, in] and [C], or the tunables."""
    return model.weights.values() if is_full else model.tunables.parameters
