"""Decodes the quantised blocks of GGUF files, on any device.

Each block is a few small scales and the numbers' bits, see `ggml-common.h` of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rwkv_batch.model.files.place import BLOCKS

_PIECE_NUMBERS = 1 << 18
"""Numbers that are decoded at once: 1 MiB of fp32."""
_NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Values of the codes of IQ4_NL and IQ4_XS."""
_FORMAT = torch.float64


class BlockTensor(Tensor):
    """A tensor [...] of quantised blocks. Any operation decodes it; `to` with a type decodes in pieces.

    Its type is float64, which no weight has in memory: so `to` and `float` always decode.
    """

    blocks: Tensor
    """[blocks, bytes of a block] uint8, in the order of the numbers"""
    kind: str
    transposed: bool

    @staticmethod
    def __new__(cls, blocks: Tensor, kind: str, shape: Sequence[int], transposed: bool = False) -> BlockTensor:
        """transposed: of [b, a] = `shape`, the blocks have [a, b]."""
        sizes = torch.zeros((), dtype=_FORMAT, device=blocks.device).expand(*shape)  # has sizes, but no numbers
        made: BlockTensor = Tensor._make_subclass(cls, sizes)
        made.blocks, made.kind, made.transposed = blocks, kind, transposed
        return made

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # __torch_dispatch__ would be simpler, but at its first call torch imports sympy: 40 MB and a second.
        given = dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            if function in _WITHOUT_NUMBERS:
                return function(*args, **given)
            first = args[0] if args else None
            if isinstance(first, BlockTensor) and function is Tensor.t:
                return BlockTensor(first.blocks, first.kind, first.shape[::-1], not first.transposed)
            if isinstance(first, BlockTensor) and function is Tensor.to:
                device, dtype, *_ = torch._C._nn._parse_to(*args[1:], **given)
                return first.decode(dtype, device)
            return function(*map(_decoded, args), **{name: _decoded(value) for name, value in given.items()})

    def decode(self, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
        """Return the numbers [...]; by default in fp32, where the blocks are."""
        numbers, _ = BLOCKS[self.kind]
        dtype = torch.float32 if dtype in (None, _FORMAT) else dtype
        out = torch.empty(len(self.blocks), numbers, dtype=dtype, device=device or self.blocks.device)
        step = _PIECE_NUMBERS // numbers
        for at in range(0, len(out), step):
            out[at : at + step] = decode(self.kind, self.blocks[at : at + step].to(out.device))
        shape = self.shape[::-1] if self.transposed else self.shape
        return out.view(shape).t() if self.transposed else out.view(shape)

    def sample(self, count: int) -> Tensor:
        """Return the numbers of `count` blocks that lie apart, [n] fp32."""
        return decode(self.kind, self.blocks[:: max(1, len(self.blocks) // count)][:count]).reshape(-1)


_WITHOUT_NUMBERS = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "nbytes", "layout", "is_cuda")),
    *(Tensor.dim, Tensor.numel, Tensor.size, Tensor.element_size, Tensor.__len__, Tensor.is_contiguous),
    *(Tensor.data_ptr, Tensor.stride),
}
"""Functions that do not need the decoded numbers."""


def _decoded(value: Any) -> Any:
    return value.decode() if isinstance(value, BlockTensor) else value


def stored(tensor: Tensor) -> Tensor:
    """Return the stored form of a tensor [...]: itself, or its blocks [blocks, bytes] uint8."""
    return tensor.blocks if isinstance(tensor, BlockTensor) else tensor


def decode(kind: str, blocks: Tensor) -> Tensor:
    """Decode blocks [n, bytes] uint8 to [n, numbers] fp32.

    kind: one of BLOCKS
    """
    return _DECODERS[kind](blocks)


def encode_q8_0(numbers: Tensor) -> Tensor:
    """Encode numbers [n, 32] fp32 as Q8_0: [n, 34] uint8, rounded as llama.cpp does."""
    scale = numbers.abs().amax(1, keepdim=True) / 127
    scaled = torch.where(scale == 0, 0.0, numbers / scale)
    codes = (scaled.abs() + 0.5).floor() * scaled.sign()
    return torch.cat([scale.half().view(torch.uint8), codes.to(torch.int8).view(torch.uint8)], 1)


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return the fp16 scale at a byte: [n, 1] fp32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _fields(codes: Tensor, bits: int) -> Tensor:
    """Split bytes [..., k] into fields of `bits`, the lowest first: [..., 8 / bits, k]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (codes.unsqueeze(-2) >> shifts.unsqueeze(-1)) & ((1 << bits) - 1)


def _nibbles(blocks: Tensor, at: int) -> Tensor:
    """Return the 32 4-bit codes in the 16 bytes at a byte: [n, 32] uint8."""
    return _fields(blocks[:, at : at + 16], 4).flatten(1)


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """Return one bit for each of 32 numbers, as 16 or 0: [n, 32] uint8."""
    return _fields(blocks[:, at : at + 4], 1).transpose(1, 2).flatten(1) << 4


def _q4_0(blocks: Tensor) -> Tensor:
    return (_nibbles(blocks, 2).float() - 8) * _half(blocks, 0)


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks, 4) * _half(blocks, 0) + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    return ((_nibbles(blocks, 6) | _fifth_bits(blocks, 2)).float() - 16) * _half(blocks, 0)


def _q5_1(blocks: Tensor) -> Tensor:
    return (_nibbles(blocks, 8) | _fifth_bits(blocks, 4)) * _half(blocks, 0) + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8) * _half(blocks, 0)


def _grouped(codes: Tensor, scale: Tensor, minimum: Tensor | None = None) -> Tensor:
    """Return codes * scale - minimum, as [n, 256].

    codes are [n, ...], scale and minimum are [n, groups].
    """
    numbers = codes.reshape(len(codes), scale.shape[1], -1) * scale.unsqueeze(-1)
    return (numbers if minimum is None else numbers - minimum.unsqueeze(-1)).flatten(1)


def _q2_k(blocks: Tensor) -> Tensor:
    scales = _fields(blocks[:, :16], 4)  # the scale's four bits, then the minimum's
    codes = _fields(blocks[:, 16:80].view(-1, 2, 32), 2)
    return _grouped(codes, _half(blocks, 80) * scales[:, 0], _half(blocks, 82) * scales[:, 1])


def _q3_k(blocks: Tensor) -> Tensor:
    low, high = _fields(blocks[:, 96:104], 4).flatten(1), _fields(blocks[:, 104:108], 2).flatten(1)
    scales = (low | (high << 4)).float() - 32
    codes = _fields(blocks[:, 32:96].view(-1, 2, 32), 2).flatten(1)
    third_bits = _fields(blocks[:, :32], 1).flatten(1) << 2
    return _grouped((codes | third_bits).float() - 4, _half(blocks, 108) * scales)


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and minima of Q4_K and Q5_K, [n, 8] each: 6 bits each in 12 bytes at byte 4."""
    first, second, last = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, (last & 15) | (first >> 6 << 4)], 1)
    minima = torch.cat([second & 63, (last >> 4) | (second >> 6 << 4)], 1)
    return _half(blocks, 0) * scales, _half(blocks, 2) * minima


def _q4_k(blocks: Tensor) -> Tensor:
    return _grouped(_fields(blocks[:, 16:].view(-1, 4, 32), 4), *_scales_and_minima(blocks))


def _q5_k(blocks: Tensor) -> Tensor:
    codes = _fields(blocks[:, 48:].view(-1, 4, 32), 4).flatten(1)
    fifth_bits = _fields(blocks[:, 16:48], 1).flatten(1) << 4
    return _grouped(codes | fifth_bits, *_scales_and_minima(blocks))


def _q6_k(blocks: Tensor) -> Tensor:
    low = _fields(blocks[:, :128].view(-1, 2, 64), 4).flatten(1)
    high = _fields(blocks[:, 128:192].view(-1, 2, 32), 2).flatten(1)
    scales = blocks[:, 192:208].contiguous().view(torch.int8)
    return _grouped((low | (high << 4)).float() - 32, _half(blocks, 208) * scales)


def _values(codes: Tensor) -> Tensor:
    return torch.tensor(_NON_LINEAR, dtype=torch.float32, device=codes.device)[codes.int()]


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _values(_nibbles(blocks, 2)) * _half(blocks, 0)


def _iq4_xs(blocks: Tensor) -> Tensor:
    low = _fields(blocks[:, 4:8], 4).transpose(1, 2).flatten(1)
    high = _fields(blocks[:, 2:4], 2).transpose(1, 2).flatten(1)
    scales = (low | (high << 4)).float() - 32
    return _grouped(_values(_fields(blocks[:, 8:].view(-1, 8, 16), 4)), _half(blocks, 0) * scales)


_DECODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q8_0": _q8_0,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    "iq4_nl": _iq4_nl,
    "iq4_xs": _iq4_xs,
}
