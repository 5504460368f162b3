"""int8 products on Hopper: ctypes bindings, and the reference of the whole definition in plain PyTorch.

Definition. K channels are permuted so that the 128 largest come first (segment 1). The rest is segment 0.

    x'[t, c] = x[t, c] * factors[c]                   factors: 1 / s, folded into norms and mixes where possible
    W'[n, c] = W[n, c] * s[c]
    qx, sx, rx = x' rounded to int8 (u8 for relu^2); a step is sx[t] in segment 0, sx[t] * (rx[t] / 16) in segment 1, rx whole
    qw, sw, rw = W' rounded to int8 likewise, a scale and a ratio per output
    S[t, n]  = floor((rx[t] / 16 * rw[n] / 16) * (sum over segment 1 of qx * qw)) + (sum over segment 0 of qx * qw)   in s32
    y[t, n]  = fp16(float(S) * (sx[t] * sw[n]))

Every fp32 operation rounds on its own; nothing is contracted.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_int, c_longlong, c_void_p
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

LARGE_CHANNELS = 128
MAX_WEIGHT_RATIO, MAX_RATIO, MAX_UNSIGNED_RATIO = 256, 511, 255
"""In 16ths. S stays below 2^31: 32 * 16 * 128 * 127 * 127 and 16 * 16 * 128 * 255 * 127 are below 2^30."""
MAX_MAPS = 3
FOLDER = Path(__file__).parent
MAX_TILE_ROWS = 320
EXCHANGE_BYTES, MAX_EXCHANGED_TILES = 132 * 128 * MAX_TILE_ROWS * 4, 132
"""Each CTA gives away at most its whole tile, of 128 outputs and 320 rows."""


# Reference --------------------------------------------------------------------------------------------------------


def smoothing_factors(x_max: Tensor, weight_max: Tensor, alpha: float = 0.5) -> Tensor:
    """s [K]: inputs are divided by it, weights multiplied. From the largest absolute input and weight of each channel."""
    s = x_max.float().clamp(min=1e-5).pow(alpha) / weight_max.float().clamp(min=1e-5).pow(1 - alpha)
    return s.clamp(min=1e-5)


def permutation(x_max: Tensor) -> Tensor:
    """positions [K]: where channel c's code is stored. The 128 channels with the largest x_max come first.

    Both groups keep their order; ties go to the lower channel.
    """
    k = x_max.numel()
    large = torch.zeros(k, dtype=torch.bool, device=x_max.device)
    large[torch.sort(x_max, descending=True, stable=True).indices[:LARGE_CHANNELS]] = True
    order = torch.cat([large.nonzero().flatten(), (~large).nonzero().flatten()])
    positions = torch.empty(k, dtype=torch.int64, device=x_max.device)
    positions[order] = torch.arange(k, device=x_max.device)
    return positions


class Codes(NamedTuple):
    """Quantised rows, of inputs or of a weight."""

    codes: Tensor
    """[R, K] s8 or u8"""
    scales: Tensor
    """[R] fp32"""
    ratios: Tensor
    """[R] int32: segment 1's scale is so many 16ths of segment 0's"""


def quantise(v: Tensor, max_ratio: int, unsigned: bool = False) -> Codes:
    """fp32 [R, K], permuted."""
    largest, lowest = (255.0, 0.0) if unsigned else (127.0, -128.0)
    large, rest = v[:, :LARGE_CHANNELS], v[:, LARGE_CHANNELS:]
    of_large, zeros = large.abs().amax(1), torch.zeros(len(v), device=v.device)
    unit = torch.maximum(
        rest.abs().amax(1), of_large * torch.tensor(16.0 / max_ratio, dtype=torch.float32, device=v.device)
    )
    ratio = torch.where(unit > 0, ((of_large / unit) * 16).ceil().nan_to_num(16.0).clamp(16, max_ratio), zeros + 16)
    codes = []
    for part, step in ((large, unit * (ratio / 16)), (rest, unit)):
        inverse = torch.where(unit > 0, (zeros + largest) / step, zeros).clamp(max=3e38)
        codes.append((part * inverse[:, None]).nan_to_num(0.0).round().clamp(lowest, largest))
    scales = unit * torch.tensor(1.0 / largest, dtype=torch.float32, device=v.device)
    return Codes(torch.cat(codes, 1).to(torch.uint8 if unsigned else torch.int8), scales, ratio.to(torch.int32))


def quantise_weight(weight: Tensor, s: Tensor, positions: Tensor) -> Codes:
    """W [n, K] -> codes with permuted columns."""
    permuted = torch.empty_like(weight, dtype=torch.float32)
    permuted[:, positions] = weight.float() * s
    return quantise(permuted, MAX_WEIGHT_RATIO)


def quantise_rows(x: Tensor, factors: Tensor | None, positions: Tensor | None, relu_squared: bool = False) -> Codes:
    """Rows [T, K] fp16 or fp32 -> codes."""
    v = x.float()
    if relu_squared:
        v = torch.where(v <= 0, torch.zeros_like(v), v)
        v = v * v
    if factors is not None:
        v = v * factors
    if positions is not None:
        permuted = torch.empty_like(v)
        permuted[:, positions] = v
        v = permuted
    return quantise(v, MAX_UNSIGNED_RATIO if relu_squared else MAX_RATIO, relu_squared)


def product(x: Codes, w: Codes) -> Tensor:
    """[T, K] and [n, K] -> y [T, n] fp16. Sums are whole numbers in fp64, below 2^53."""
    a, b = x.codes.double(), w.codes.double()
    large, rest = a[:, :LARGE_CHANNELS] @ b[:, :LARGE_CHANNELS].T, a[:, LARGE_CHANNELS:] @ b[:, LARGE_CHANNELS:].T
    sums = (large * (x.ratios.double()[:, None] * w.ratios.double()) / 256).floor() + rest
    assert not sums.numel() or sums.abs().max() < 2**31
    return (sums.to(torch.int32).float() * (x.scales[:, None] * w.scales)).half()


# Kernels ----------------------------------------------------------------------------------------------------------


class MapArgs(Structure):
    """Mirrors Int8MapArgs in int8_product.cuh."""

    _fields_ = [
        *[
            (name, c_void_p)
            for name in ("weights", "x", "weight_scales", "weight_ratios", "input_scales", "input_ratios", "y")
        ],
        ("n", c_int),
        ("unused", c_int),
    ]


class Args(Structure):
    """Mirrors Int8Args in int8_product.cuh."""

    _fields_ = [
        ("maps", MapArgs * MAX_MAPS),
        *[
            (name, c_int)
            for name in ("count", "rows", "k", "pitch", "warpgroups", "blocks", "tile_rows", "splits", "pair")
        ],
        *[(name, c_void_p) for name in ("exchange", "counters")],
        *[(name, c_int) for name in ("is_unsigned", "lead", "ctas", "early")],
    ]


class QuantiseArgs(Structure):
    """Mirrors QuantiseArgs in quantise_rows.cu."""

    _fields_ = [
        *[(name, c_void_p) for name in ("x", "factors", "positions", "codes", "scales", "ratios")],
        *[(name, c_int) for name in ("rows", "k", "is_float", "relu_squared", "early")],
    ]


class Plan(NamedTuple):
    """A line of the launch table."""

    tile_rows: int
    splits: int = 1
    pair: int = 1
    warpgroups: int = 2
    blocks: int = 1
    lead: int = 0
    ctas: int = 0
    in_memory: bool = False
    """splits exchange through memory and are no cluster"""

    def __str__(self) -> str:
        text = f"{64 * self.warpgroups * self.blocks}x{self.tile_rows}"
        for name, value, usual in (
            ("split", self.splits, 1),
            ("pair", self.pair, 1),
            ("lead", self.lead, 0),
            ("ctas", self.ctas, 0),
        ):
            text += f" {name}{value}" if value != usual else ""
        return text + " memory" * self.in_memory


class Kernels:
    """libint8.so; every call is checked."""

    def __init__(self, path: Path = FOLDER / "libint8.so") -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.int8_read.argtypes = [c_void_p, c_longlong, c_void_p, c_void_p]
        self.exchange = torch.empty(EXCHANGE_BYTES, dtype=torch.uint8, device="cuda")
        self.counters = torch.zeros(MAX_EXCHANGED_TILES * 8, dtype=torch.int32, device="cuda")

    def multiply(self, plan: Plan, maps: list[tuple[Codes, Codes, Tensor]], early: bool = True) -> None:
        """maps: inputs, whose scales and ratios are padded to `pitch_of`; weights; y [T, n] fp16."""
        first = maps[0][0]
        args = Args(count=len(maps), rows=len(first.codes), k=first.codes.shape[1], pitch=len(first.scales))
        for slot, (x, w, y) in zip(args.maps, maps, strict=False):
            slot.weights, slot.weight_scales, slot.weight_ratios = (t.data_ptr() for t in w)
            slot.x, slot.input_scales, slot.input_ratios = (t.data_ptr() for t in x)
            slot.y, slot.n = y.data_ptr(), len(w.codes)
        args.warpgroups, args.blocks, args.tile_rows, args.splits, args.pair = (
            plan.warpgroups,
            plan.blocks,
            plan.tile_rows,
            plan.splits,
            plan.pair,
        )
        if plan.in_memory:
            args.exchange, args.counters = self.exchange.data_ptr(), self.counters.data_ptr()
        args.is_unsigned, args.lead, args.ctas, args.early = (
            first.codes.dtype == torch.uint8,
            plan.lead,
            plan.ctas,
            early,
        )
        self._check("int8_product", self.library.int8_product(ctypes.byref(args), self._stream()), plan)

    def quantise(
        self, x: Tensor, factors: Tensor | None, positions: Tensor | None, out: Codes, early: bool = True
    ) -> None:
        """Into codes [T, K] s8, or u8: of relu(x)^2."""
        pointers = (None if t is None else t.data_ptr() for t in (x, factors, positions, *out))
        args = QuantiseArgs(*pointers, *x.shape, x.dtype == torch.float32, out.codes.dtype == torch.uint8, early)
        self._check("int8_quantise_rows", self.library.int8_quantise_rows(ctypes.byref(args), self._stream()), x.shape)

    def read(self, data: Tensor, sink: Tensor) -> None:
        """Reads `data` once: the ceiling of memory bandwidth."""
        self._check(
            "int8_read",
            self.library.int8_read(
                data.data_ptr(), data.numel() * data.element_size(), sink.data_ptr(), self._stream()
            ),
            "",
        )

    def _stream(self) -> c_void_p:
        return c_void_p(torch.cuda.current_stream().cuda_stream)

    def _check(self, name: str, code: int, what: object) -> None:
        if code:
            raise RuntimeError(f"{name} failed with {code}: {what}")


def pitch_of(rows: int) -> int:
    """Of the scales of rows: a multiple of every tile that holds them."""
    return -(-rows // 64) * 64 + MAX_TILE_ROWS
