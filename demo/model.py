"""RWKV-7 for training, in plain PyTorch, over the compact vocabulary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from demo.wkv import CHUNK, wkv_chunked

HEAD = 64
DECAY = math.exp(-0.5)


@dataclass(frozen=True, slots=True)
class Shape:
    """Model sizes. `vocab`: rows of the embedding; `ranks`: of the low-rank w, a, v and g."""

    vocab: int
    layers: int = 6
    width: int = 256
    ranks: tuple[int, int, int, int] = (32, 32, 16, 64)


def shifted(x: Tensor, begins: Tensor) -> Tensor:
    """Shift x [batch, time, width] by one token. The result is zero where `begins` [batch, time, 1] is set."""
    return F.pad(x, (0, 0, 1, -1)) * (~begins)


class TimeMix(nn.Module):
    x_r: Tensor
    x_w: Tensor
    x_k: Tensor
    x_v: Tensor
    x_a: Tensor
    x_g: Tensor

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        c, (rank_w, rank_a, rank_v, rank_g) = shape.width, shape.ranks
        self.layer, self.heads = layer, c // HEAD
        depth, shallow = layer / max(shape.layers - 1, 1), 1 - layer / shape.layers
        channel = torch.arange(c) / c

        def vector(values: Tensor) -> nn.Parameter:
            return nn.Parameter(values.reshape(1, 1, c).clone())

        def low_rank(rank: int) -> tuple[nn.Parameter, nn.Parameter]:
            second = torch.empty(rank, c)
            nn.init.orthogonal_(second, gain=0.1)
            return nn.Parameter(torch.zeros(c, rank)), nn.Parameter(second)

        for name, power in (("r", 0.2), ("w", 0.9), ("k", 0.7), ("v", 0.7), ("a", 0.9), ("g", 0.2)):
            self.register_parameter(f"x_{name}", vector(1 - channel ** (power * shallow)))
        ramp = torch.arange(c) / (c - 1)
        self.w0 = vector(-5.5 + 5 * ramp ** (0.85 + depth**0.5))
        self.w1, self.w2 = low_rank(rank_w)
        self.a0 = vector(torch.zeros(c))
        self.a1, self.a2 = low_rank(rank_a)
        self.v0 = vector(torch.ones(c))
        self.v1, self.v2 = low_rank(rank_v)
        self.g1, self.g2 = low_rank(rank_g)
        self.k_k, self.k_a = vector(torch.full((c,), 0.85)), vector(torch.ones(c))
        self.r_k = nn.Parameter(torch.zeros(self.heads, HEAD))
        self.receptance, self.key, self.value, self.output = (nn.Linear(c, c, bias=False) for _ in range(4))
        for linear, scale in ((self.receptance, 0.5), (self.key, 0.1), (self.value, 0.5)):
            nn.init.uniform_(linear.weight, -scale * c**-0.5, scale * c**-0.5)
        nn.init.zeros_(self.output.weight)
        self.ln_x = nn.GroupNorm(self.heads, c, eps=64e-5)
        nn.init.constant_(self.ln_x.weight, ((1 + layer) / shape.layers) ** 0.7)

    def forward(
        self, x: Tensor, begins: Tensor, v_first: Tensor | None, keep: Tensor, first: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the output [batch, time, width] and the first layer's values.

        `keep` [batch, chunks] is False where a document begins; `first` [heads, 64, 64] is the state before it.
        """
        batch, time, c = x.shape
        d = shifted(x, begins) - x
        r = self.receptance(x + d * self.x_r)
        k = self.key(x + d * self.x_k)
        v = self.value(x + d * self.x_v)
        w = self.w0 + torch.tanh((x + d * self.x_w) @ self.w1) @ self.w2
        a = torch.sigmoid(self.a0 + ((x + d * self.x_a) @ self.a1) @ self.a2)
        g = torch.sigmoid((x + d * self.x_g) @ self.g1) @ self.g2
        if v_first is None:
            v_first = v
        else:
            v = v + (v_first - v) * torch.sigmoid(self.v0 + ((x + d * self.x_v) @ self.v1) @ self.v2)

        def heads(t: Tensor) -> Tensor:
            return t.float().view(batch, time, self.heads, HEAD)

        kk = F.normalize(heads(k * self.k_k), dim=-1, eps=1e-12)
        k = k * (1 + (a - 1) * self.k_a)
        decay = heads(-DECAY * torch.sigmoid(w.float()))
        r_h, k_h, v_h = heads(r), heads(k), heads(v)
        with torch.autocast(x.device.type, enabled=False):
            y = wkv_chunked(r_h, decay, k_h, v_h, -kk, kk * heads(a), keep, first)
            y = self.ln_x(y.reshape(batch * time, c)).view(batch, time, self.heads, HEAD)
            y = y + (r_h * k_h * self.r_k).sum(-1, keepdim=True) * v_h
        return self.output(y.view(batch, time, c).to(g.dtype) * g), v_first


class ChannelMix(nn.Module):
    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        c = shape.width
        shallow = 1 - layer / shape.layers
        self.x_k = nn.Parameter((1 - (torch.arange(c) / c) ** shallow**4).reshape(1, 1, c))
        self.key, self.value = nn.Linear(c, 4 * c, bias=False), nn.Linear(4 * c, c, bias=False)
        nn.init.uniform_(self.key.weight, -0.5 * c**-0.5, 0.5 * c**-0.5)
        nn.init.zeros_(self.value.weight)

    def forward(self, x: Tensor, begins: Tensor) -> Tensor:
        """Return the output [batch, time, width]."""
        hidden = torch.relu(self.key(x + (shifted(x, begins) - x) * self.x_k)) ** 2
        return self.value(hidden)  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        if layer == 0:
            self.ln0 = nn.LayerNorm(shape.width)
        self.ln1, self.ln2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.att, self.ffn = TimeMix(shape, layer), ChannelMix(shape, layer)

    def forward(
        self, x: Tensor, v_first: Tensor | None, begins: Tensor, keep: Tensor, first: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return x [batch, time, width] after this layer. Also returns the values of the first layer."""
        y, v_first = self.att(self.ln1(x), begins, v_first, keep, first)
        x = x + y
        return x + self.ffn(self.ln2(x), begins), v_first


class Rwkv7(nn.Module):
    """The model. Parameter names are those of public RWKV-7 files."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.emb = nn.Embedding(shape.vocab, shape.width)
        self.blocks = nn.ModuleList(Block(shape, layer) for layer in range(shape.layers))
        self.ln_out = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        nn.init.normal_(self.emb.weight, std=0.05)
        nn.init.normal_(self.head.weight, std=0.5 * shape.width**-0.5)

    def forward(self, tokens: Tensor, begins: Tensor, first: Sequence[Tensor] | None = None) -> Tensor:
        """Logits [batch, time, vocab] of packed documents. `begins` marks first tokens, at multiples of CHUNK only.

        `first`: per layer the state [heads, 64 values, 64 keys] before a document; zero if None.
        """
        keep = ~begins[:, ::CHUNK]
        mark = begins[:, :, None]
        x = self.blocks[0].get_submodule("ln0")(self.emb(tokens))
        v_first = None
        for block, state in zip(self.blocks, first or repeat(None), strict=False):
            x, v_first = block(x, v_first, mark, keep, state)
        return self.head(self.ln_out(x))  # type: ignore[no-any-return]
