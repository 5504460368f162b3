"""The definition of quantised weights. Plain torch, any device.

    fp8   e4m3 numbers, one fp32 scale per output
    int8  as w8a8.py: inputs are 8-bit integers too, or 16-bit ones
    int4  integers q in 0 .. 15, one fp16 scale and one integer zero per output and group of 128 inputs:
          (q - zero) * scale

fp16 scales are in units of 2^-6, so that small scales keep all their bits. The last group of a row may be shorter.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rwkv_batch.model.quant import w8a8
from rwkv_batch.model.quant.w8a8 import Codes, InputTransform

GROUP = 128
"""inputs per scale"""
FP8_MAX = 448.0
SCALE_UNIT = 2.0**-6
"""Value of an fp16 scale of 1."""
ROWS_AT_ONCE = 2048
"""outputs per fp32 temporary"""
CLIP_FRACTIONS = (1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.82, 0.79, 0.76, 0.73, 0.7)
"""Shares of a group's range that 4-bit weights may cover; the smallest squared error wins."""
QUANTISED_NAMES = re.compile(r"(^head|\.att\.(receptance|key|value|output)|\.ffn\.(key|value))\.weight$")
"""Quantised matrices. Vectors, low-rank matrices and the embedding are not."""


class Format(enum.StrEnum):
    FP8 = "fp8"
    W8A8 = "int8"
    INT4 = "int4"


WEIGHT_ONLY = (Format.FP8, Format.INT4)
NOT_ROUNDED = 32
"""`activation_bits` of plain torch for versions before RWKV-7: their inputs stay as they are."""


@dataclass(slots=True)
class Quantised:
    """A quantised matrix [out, in]. G = ceil(in / 128)."""

    format: Format
    codes: Tensor
    """[out, in] float8_e4m3fn or int8; int4: [out, ceil(in / 2)] uint8, the even input in the low half"""
    scales: Tensor
    """fp8, int8: [out] fp32; int4: [out, G] fp16 in units of 2^-6"""
    zeros: Tensor | None
    """int4: [out, G] uint8"""
    in_features: int
    ratios: Tensor | None = None
    """int8: [out] int32"""
    transform: InputTransform | None = None
    """int8: of the inputs"""
    activation_bits: int = 8
    """int8: of the inputs, 8, 16 or NOT_ROUNDED; not stored"""

    @property
    def out_features(self) -> int:
        return len(self.codes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the matrix. Includes scales and zeros."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by field name; a matrix is [out, in]."""
        named = {"codes": self.codes, "scales": self.scales, "zeros": self.zeros, "ratios": self.ratios}
        if self.transform is not None:
            named |= self.transform._asdict()
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @classmethod
    def of(cls, format_: Format, tensors: Mapping[str, Tensor], in_features: int) -> Quantised:
        """Make a matrix [out, in] of its `tensors()`. Raises KeyError if one is missing."""
        transform = None
        if format_ is Format.W8A8:
            transform = InputTransform(*(tensors[name] for name in InputTransform._fields))
        optional = tensors.get("zeros"), in_features, tensors.get("ratios")
        return cls(format_, tensors["codes"], tensors["scales"], *optional, transform)

    def in_segments(self) -> Codes:
        assert self.ratios is not None, "only int8 has ratios"
        return Codes(self.codes, self.scales, self.ratios)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether the tensors fit a matrix of this shape."""
        out, inner = shape
        groups = -(-inner // GROUP)
        expected = {
            Format.FP8: {"codes": (torch.float8_e4m3fn, (out, inner)), "scales": (torch.float32, (out,))},
            Format.INT4: {
                "codes": (torch.uint8, (out, -(-inner // 2))),
                "scales": (torch.float16, (out, groups)),
                "zeros": (torch.uint8, (out, groups)),
            },
            Format.W8A8: {
                "codes": (torch.int8, (out, inner)),
                "scales": (torch.float32, (out,)),
                "ratios": (torch.int32, (out,)),
                "factors": (torch.float32, (inner,)),
                "positions": (torch.int32, (inner,)),
            },
        }[self.format]
        return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors().items()} == expected

    def to(self, device: torch.device) -> Quantised:
        moved = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return Quantised.of(self.format, moved, self.in_features)


def format_of(dtype: str) -> Format | None:
    """Return the format that --dtype names. None: a dtype, not a format."""
    return Format(dtype) if dtype in [format_.value for format_ in Format] else None


def is_quantised(name: str) -> bool:
    return QUANTISED_NAMES.search(name) is not None


def format_for(name: str, storage: Format) -> Format | None:
    """Return the format of a tensor under --dtype `storage`; None: not quantised.

    int4 keeps the head in int8: with 4 bits, the head loses as much quality as all other matrices (bench/quality.py).
    """
    if not is_quantised(name):
        return None
    return Format.W8A8 if storage is Format.INT4 and name.startswith("head.") else storage


def has_squared_inputs(name: str) -> bool:
    """Return whether the inputs of the tensor of this name are relu(x)^2."""
    return name.endswith("ffn.value.weight")


def quantise(
    weight: Tensor,
    format: Format,  # noqa: A002
    x_max: Tensor | None = None,
    squares: bool = False,
) -> Quantised:
    """Quantise weight [out, in] of any float dtype, on its device.

    int8 needs x_max [in], the largest inputs, and whether they are squares.
    """
    if format is Format.W8A8:
        assert x_max is not None, "see runner/calibration.py"
        transform, s = w8a8.input_transform(x_max.to(weight.device), weight, squares)
        of_rows = w8a8.quantise_weight(weight, s, transform.positions)
        return Quantised(format, of_rows.codes, of_rows.scales, None, weight.shape[1], of_rows.ratios, transform)
    make = {Format.FP8: _fp8, Format.INT4: _int4}[format]
    parts = [make(weight[start : start + ROWS_AT_ONCE].float()) for start in range(0, len(weight), ROWS_AT_ONCE)]
    codes, scales, zeros = zip(*parts, strict=True)
    whole = torch.cat(zeros) if format is Format.INT4 else None
    # As bytes, because some torch operations lack fp8.
    joined = torch.cat([part.view(torch.uint8) for part in codes]).view(codes[0].dtype)
    return Quantised(format, joined, torch.cat(scales), whole, weight.shape[1])


def dequantise(stored: Quantised, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the matrix [out, in], computed in fp32; of int8 as it multiplies inputs that are not rounded."""
    out = torch.empty(stored.out_features, stored.in_features, dtype=dtype, device=stored.codes.device)
    for start in range(0, len(out), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        out[rows] = _dequantise_rows(stored, rows)
    return out


def codes_int4(stored: Quantised) -> Tensor:
    """Return the 4-bit integers unpacked: [out, in] uint8."""
    pairs = torch.stack([stored.codes & 15, stored.codes >> 4], dim=-1)
    return pairs.reshape(stored.out_features, -1)[:, : stored.in_features]


def _dequantise_rows(stored: Quantised, rows: slice) -> Tensor:
    scales = stored.scales[rows].float()
    if stored.format is Format.FP8:
        return stored.codes[rows].float() * scales.unsqueeze(1)
    if stored.format is Format.W8A8:
        assert stored.ratios is not None and stored.transform is not None
        steps = scales.unsqueeze(1).repeat(1, stored.in_features)
        steps[:, : w8a8.LARGE_CHANNELS] *= stored.ratios[rows].float().unsqueeze(1) / 16
        return (stored.codes[rows].float() * steps)[:, stored.transform.positions.long()] * stored.transform.factors
    scale_per_input = _expand_groups(scales * SCALE_UNIT, stored.in_features)
    assert stored.zeros is not None, "4-bit codes have zeros"
    part = Quantised(stored.format, stored.codes[rows], stored.scales[rows], stored.zeros[rows], stored.in_features)
    return (codes_int4(part).float() - _expand_groups(stored.zeros[rows].float(), stored.in_features)) * scale_per_input


def _expand_groups(per_group: Tensor, inputs: int) -> Tensor:
    """Expand one value per group to its inputs: [out, G] -> [out, in]."""
    return per_group.repeat_interleave(GROUP, dim=1)[:, :inputs]


def _grouped(weight: Tensor) -> Tensor:
    """Group inputs: [out, in] -> [out, G, 128]; the last group is filled with its last input."""
    missing = -weight.shape[1] % GROUP
    if missing:
        weight = torch.cat([weight, weight[:, -1:].expand(-1, missing)], dim=1)
    return weight.reshape(len(weight), -1, GROUP)


def _fp8(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    largest = weight.abs().amax(dim=1)
    if not bool(largest.isfinite().all()):
        raise ValueError("NaN or infinite weights cannot be quantised; use --dtype fp16")
    scales = torch.where(largest > 0, largest / FP8_MAX, torch.ones_like(largest))
    codes = (weight / scales.unsqueeze(1)).clamp(-FP8_MAX, FP8_MAX)
    return codes.to(torch.float8_e4m3fn), scales, scales


def _int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    groups = _grouped(weight)
    low, high = groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)
    best = torch.full_like(low, torch.inf)
    scales, zeros = low.half(), torch.zeros_like(low)
    for fraction in CLIP_FRACTIONS:
        scale = _fp16_scale((high - low) * fraction / 15)
        step = scale.float() * SCALE_UNIT
        zero = (-low * fraction / step).round().clamp(0, 15)
        group_scale, group_zero = step.unsqueeze(2), zero.unsqueeze(2)
        codes = (groups / group_scale + group_zero).round().clamp(0, 15)
        error = ((codes - group_zero) * group_scale - groups).square().sum(dim=2)
        better = error < best
        best = torch.where(better, error, best)
        scales, zeros = torch.where(better, scale, scales), torch.where(better, zero, zeros)
    inputs = weight.shape[1]
    steps = _expand_groups(scales.float() * SCALE_UNIT, inputs)
    codes = (weight / steps + _expand_groups(zeros, inputs)).round().clamp(0, 15).to(torch.uint8)
    if inputs % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[:, ::2] | codes[:, 1::2] << 4, scales, zeros.to(torch.uint8)


def _fp16_scale(scale: Tensor) -> Tensor:
    """Convert scales to fp16. In units of SCALE_UNIT, never zero. Raises ValueError beyond fp16."""
    if not bool((scale <= 65504.0 * SCALE_UNIT).all()):
        raise ValueError(
            f"the scale {scale.max().item():g} of a weight exceeds fp16, so it cannot be quantised; use --dtype fp16"
        )
    return (scale / SCALE_UNIT).clamp(min=2.0**-14).half()
