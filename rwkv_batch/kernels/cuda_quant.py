"""Linear maps of 8- and 4-bit weights on the GPU.

Few rows: kernels that stream the codes and make halves of them in registers (csrc/skinny_quant.cu, sparse_value.cu);
one row on Hopper, of fp8 up to 4: the codes multiplied as they are by the parts of its inputs (csrc/wide_row.cu,
wide_few.cu). More, on Hopper: codes as they are by rows in two parts (of fp8 csrc/wide_parts.cu, of int8 wide_int8.cu),
or codes made halves on its tensor cores (csrc/wide_codes.cuh). More still: fp8 weights times fp8 activations (a scale
per row) on the GPU's fp8 units, or the codes made halves for cuBLAS.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cuda_codes import CodesMap, fits_codes, launch_codes
from rwkv_batch.kernels.cuda_int8 import BYTES, BYTES_GROUP, Int8Map, launch_wide_int8, pitch_of
from rwkv_batch.kernels.cuda_library import (
    MAX_MAPS,
    NormMixArgs,
    QuantArgs,
    RowValueArgs,
    cuda_pointer,
    hopper_library,
    library,
)
from rwkv_batch.kernels.cuda_linear import Map, fits_skinny
from rwkv_batch.kernels.cuda_wide import (
    PARTS,
    Fp8Map,
    HalfMap,
    fits_wide_fp8,
    fits_wide_parts,
    floats_by_wide_fp8,
    has_wide,
    launch_wide_fp8,
    num_shares,
    prepare_wide,
)
from rwkv_batch.model.layer import HEAD_SIZE
from rwkv_batch.model.linear import Linear
from rwkv_batch.model.quant.formats import Format, Quantised, codes_int4

logger = logging.getLogger(__name__)

NUMBERS = {Format.FP8: 0, Format.INT8: 1, Format.INT4: 2}
FEW_ROWS = {Format.FP8: 15, Format.INT8: 16, Format.INT4: 8}
"""Most rows that the streaming kernel takes, and for fp8 is asked for."""
FEW_ROWS_ON_HOPPER = {Format.FP8: 4, Format.INT8: 8, Format.INT4: 8}
"""The same beside Hopper's kernels of more rows."""
CODES_ROWS = {Format.FP8: 64, Format.INT8: 256, Format.INT4: 256}
"""Most rows for that kernel, or of fp8 in two parts; from there on, codes of fp8 times codes are faster
(docs/notebook.md)."""
INPUT_STEP = {Format.FP8: 128, Format.INT8: 128, Format.INT4: 256}
OUTPUT_STEP = 32
GROUP_INPUTS = 128
"""That have a scale in common, of int8 and int4."""
MAX_MIXED_ROWS = 8
"""Most rows for a launch of the streaming kernel that has maps of halves beside those in codes."""
MAX_INPUTS = 32768
WIDE_FEW_ROWS = range(2, 5)
"""Of fp8 that Hopper's kernel for some rows is asked for; it takes 8."""
MOST_ROW_INPUTS = 4096
"""Of one row that Hopper's kernel for it takes."""
SCALE_STEP = 4
"""Scales of rows begin at 16 bytes in a product."""
ZERO_OFFSET = 1024
"""Added to a zero: what a half with a 4-bit code in its lowest bits amounts to."""


@dataclass(slots=True)
class Packed:
    """Codes and scales as the kernels read them (csrc/quant.cuh); [n, k] as stored, [k, n] if transposed."""

    format: Format
    codes: Tensor
    scales: Tensor
    rows: int
    columns: int
    transposed: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    @property
    def outputs(self) -> int:
        """n."""
        return self.columns if self.transposed else self.rows

    @property
    def inputs(self) -> int:
        """k."""
        return self.rows if self.transposed else self.columns

    def fits_codes(self, rows: int) -> bool:
        """Whether Hopper's kernel multiplies so many rows of halves by it."""
        return rows <= CODES_ROWS[self.format] and fits_codes(rows, self.outputs, self.inputs, self.codes.device)

    def codes_map(self, x: Tensor, y: Tensor, activation: Activation = Activation.NONE) -> CodesMap:
        """For a launch of that kernel: x [B, k] fp16 is multiplied into y [B, n] fp16."""
        n, k = self.outputs, self.inputs
        return CodesMap(self.format, self.transposed, n, k, self.codes, self.scales, x, y, activation)

    def by_outputs(self) -> Tensor:
        """Codes [n, k] of 8 bits; of one that is transposed in the place that all of its size share."""
        if not self.transposed:
            return self.codes
        turned = turned_place(self.codes).view(self.codes.dtype).view(self.outputs, self.inputs)
        library().call("rwkv_turn_codes", self.codes.data_ptr(), turned.data_ptr(), self.inputs, self.outputs)
        return turned

    def dequantised(self) -> Tensor:
        """[rows, columns] fp16."""
        out = torch.empty(self.rows, self.columns, dtype=torch.float16, device=self.codes.device)
        library().call(
            "rwkv_dequantise", self.codes.data_ptr(), self.scales.data_ptr(), cuda_pointer(out), NUMBERS[self.format],
            self.transposed, self.rows, self.columns,
        )  # fmt: skip
        return out


class RowCodes(NamedTuple):
    """Rows as fp8 codes: x = codes * scale; or in two parts: x = codes[:, 0] + codes[:, 1] / 8.

    For weights of int8 these are bytes: x = (256 * codes[:, 0] + codes[:, 1]) * scale (csrc/row_bytes.cuh).
    """

    codes: Tensor
    """[T, K] e4m3; or [T, 2, K] e5m2 or int8"""
    scales: Tensor | None
    """[T] fp32: a row's largest becomes 448; None: parts of e5m2; of bytes as `Int8Map.x_scales`"""

    @property
    def in_parts(self) -> bool:
        """Whether these are two parts, or bytes."""
        return self.codes.dim() == 3


@dataclass(slots=True)
class CodedMix:
    """Mixed inputs of a half layer, the first of which are there as codes."""

    codes: Tensor
    """[3 or 1, T, C] e4m3; or parts [3 or 1, T, 2, C] e5m2 or int8"""
    scales: Tensor | None
    """[3 or 1, T] fp32; None: parts of e5m2; of bytes [3 or 1, C / 128, pitch, 2] fp32"""
    halves: Tensor
    """[4 or 0, T, C] fp16: v, w, a, g"""

    @property
    def in_parts(self) -> bool:
        """Whether these are two parts, or bytes."""
        return self.codes.dim() == 4

    @property
    def in_bytes(self) -> bool:
        """Whether codes are those of int8 weights' rows (RowCodes)."""
        return self.codes.dtype == BYTES

    @property
    def scale_pitch(self) -> int:
        """How far apart the scales of two mixes lie, or in bytes of two groups; 0: there are none."""
        if self.scales is None:
            return 0
        return self.scales.shape[2] if self.in_bytes else self.scales.stride(0)

    def __getitem__(self, i: int) -> RowCodes:
        """Of those in codes."""
        return RowCodes(self.codes[i], None if self.scales is None else self.scales[i])


class Shares(NamedTuple):
    """What a half layer adds to the residual stream, its sums not added up: shift_mix does."""

    shares: Tensor
    """[S, T, C] fp32: their sum over S is meant, in that order and rounded to fp16"""


@dataclass(slots=True)
class UnmixedRow:
    """The mixed inputs of a half layer of one row, which the launch that multiplies them makes."""

    mix: Tensor
    """[6 or 1, 1, C] fp16: the weights of the mixes, in the place of the mixed inputs"""
    args: NormMixArgs
    held: tuple[Tensor, ...]
    """what that launch reads and writes: no other tensor may be in its place before"""

    def __getitem__(self, i: int) -> UnmixedRow:
        """The only one of a channel mix. Raises IndexError for others."""
        if i or len(self.mix) > 1:
            raise IndexError(f"mixed input {i} of {len(self.mix)} is made with the others")
        return self


class LoneRow(NamedTuple):
    """The mixed input of a channel mix of one row, whose value's product is in the launch of its key's."""

    x: Tensor
    """[1, C] fp16"""
    added: Tensor
    """[8, C / 8] int64: zeros, to which that launch adds"""


class RowSums(NamedTuple):
    """What a channel mix adds to the residual stream of one row, as blocks have added it up (csrc/row_sums.cuh)."""

    sums: Tensor
    """[8, C / 8] int64: units of 2^-32, of 8 neighbouring channels each in another line"""


@dataclass(slots=True)
class QuantMap:
    """One map of a grouped launch: y = activation(x @ W.T)."""

    linear: CudaQuantLinear
    x: Tensor
    y: Tensor
    activation: Activation = Activation.NONE


@dataclass(slots=True)
class CodeMap:
    """One map over rows that are fp8 codes already: y = activation((codes * scales) @ W.T), or in parts (RowCodes)."""

    linear: CudaQuantLinear
    codes: Tensor
    scales: Tensor | None
    y: Tensor
    activation: Activation = Activation.NONE
    y_scales: Tensor | None = None
    """of results in bytes"""


class CudaQuantLinear(Linear):
    """Codes [out, in] on a GPU, or [in, out] if transposed, fp32 sums."""

    def __init__(self, stored: Quantised, group: int = BYTES_GROUP, transposed: bool = False) -> None:
        """group: inputs that share a scale where they are bytes.

        Raises ValueError for sizes that the kernels do not take.
        """
        check_shape(stored)
        self.packed, self.group = pack(stored, transposed), group
        self.weight = self.packed.codes
        self.in_features = stored.in_features

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and scales."""
        return self.packed.num_bytes

    @property
    def format(self) -> Format:
        """How it is stored."""
        return self.packed.format

    def is_few(self, rows: int) -> bool:
        """Whether so many rows are the streaming kernel's, which takes what is not transposed."""
        if self.packed.transposed:
            return False
        most = FEW_ROWS_ON_HOPPER if self.packed.fits_codes(rows) else FEW_ROWS
        return rows <= most[self.format]

    def takes_halves(self, rows: int) -> bool:
        """Whether a kernel of our own multiplies so many rows as they are."""
        return self.is_few(rows) or self.packed.fits_codes(rows)

    def takes_codes(self, rows: int) -> bool:
        """Whether so many rows are multiplied as fp8 codes."""
        return not self.takes_halves(rows) and is_multiplied_by_codes(self.format, self.weight.device)

    def takes_parts(self, rows: int) -> bool:
        """Whether so many rows are multiplied in two parts, unless results are fp32 (`gives_floats`)."""
        p = self.packed
        return (
            self.format in (Format.FP8, Format.INT8)
            and not self.is_few(rows)
            and fits_wide_parts(rows, p.outputs, p.inputs, p.codes.device)
        )

    def gives_floats(self, rows: int) -> bool:
        """Whether rows in bytes give results in fp32: those of int8, where no blocks share a product's k."""
        p = self.packed
        if self.format is not Format.INT8 or not self.takes_parts(rows):
            return False
        return num_shares(rows, p.outputs, p.inputs, len(prepare_wide(p.codes.device).partial)) == 1

    def empty_parts(self, rows: int, width: int, *count: int) -> RowCodes:
        """Room for rows [width] in two parts as its format has them; `count` times, with that many before its sizes."""
        device = self.weight.device
        if self.format is Format.FP8:
            return RowCodes(torch.empty(*count, rows, 2, width, dtype=PARTS, device=device), None)
        groups = *count, width // self.group, pitch_of(rows), 2
        scales = torch.empty(groups, dtype=torch.float32, device=device)
        return RowCodes(torch.empty(*count, rows, 2, width, dtype=BYTES, device=device), scales)

    def row_parts(self, x: Tensor) -> RowCodes:
        """x [T, K] fp16 in two parts as its format has them."""
        rows, k = x.shape
        parts = self.empty_parts(rows, k)
        if parts.scales is None:
            library().call("rwkv_row_parts", cuda_pointer(x), cuda_pointer(parts.codes, PARTS), rows, k)
        else:
            places = cuda_pointer(parts.codes, BYTES), cuda_pointer(parts.scales, torch.float32)
            library().call("rwkv_row_bytes", cuda_pointer(x), *places, rows, k, pitch_of(rows), self.group)
        return parts

    def __call__(self, x: Tensor | RowCodes) -> Tensor:
        """[T, in] fp16, or in two parts, -> [T, out] fp16."""
        rows = x.codes if isinstance(x, RowCodes) else x
        y = torch.empty(len(rows), self.packed.outputs, dtype=torch.float16, device=rows.device)
        if isinstance(x, RowCodes):
            multiply_codes([CodeMap(self, *x, y)])
        else:
            multiply_into([QuantMap(self, x, y)])
        return y

    def to_fp32(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[T, in] fp16 -> [T, out] fp32; into `out` if that is given. Raises ValueError if it does not fit."""
        shape = x.shape[0], self.packed.outputs
        if out is None:
            out = torch.empty(shape, dtype=torch.float32, device=x.device)
        elif out.shape != shape:
            raise ValueError(f"the result is {shape}, the place for it {tuple(out.shape)}")
        if x.shape[0]:
            multiply_into([QuantMap(self, x, out)])
        return out


class CudaQuantValue(CudaQuantLinear):
    """ffn.value: transposed, so that rows whose input is zero need not be read.

    As stored as well where every product of rows in codes would have to turn it: of fp8 where there is no Hopper.
    """

    def __init__(self, stored: Quantised) -> None:
        """Raises ValueError for sizes that the kernels do not take."""
        super().__init__(stored, transposed=True)
        device = stored.codes.device
        both = is_multiplied_by_codes(stored.format, device) and not has_wide(device)
        self.as_stored = CudaQuantLinear(stored) if both else None

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and scales, of both where there are two."""
        return self.packed.num_bytes + (0 if self.as_stored is None else self.as_stored.num_bytes)

    @property
    def is_turned(self) -> bool:
        """Whether products of very many rows want it in the other order."""
        return self.as_stored is None and is_multiplied_by_codes(self.format, self.packed.codes.device)

    @property
    def of_codes(self) -> CudaQuantLinear:
        """What rows in codes are multiplied by."""
        return self.as_stored or self

    def __call__(self, x: Tensor | RowCodes) -> Tensor:
        """[T, in] fp16 -> [T, out] fp16, nothing skipped."""
        if isinstance(x, RowCodes):
            return super().__call__(x)
        of_codes = self.of_codes
        if of_codes is not self and (of_codes.format is Format.FP8 or of_codes.takes_parts(len(x))):
            return of_codes(x)
        return super().__call__(x)


_TURNED: WeakValueDictionary[tuple[torch.device, int], Tensor] = WeakValueDictionary()


def turned_place(codes: Tensor) -> Tensor:
    """[bytes] uint8, as many as some codes take and on their device: the same for all of a size, while one has it."""
    key = codes.device, codes.nbytes
    place = _TURNED.get(key)
    if place is None:
        place = _TURNED[key] = torch.empty(codes.nbytes, dtype=torch.uint8, device=codes.device)
    return place


def make_quantised(name: str, stored: Quantised) -> Linear:
    """The map of the weight file's tensor of that name."""
    if name.endswith("ffn.value.weight"):
        return CudaQuantValue(stored)
    return CudaQuantLinear(stored, HEAD_SIZE if name.endswith("att.output.weight") else BYTES_GROUP)


def check_shape(stored: Quantised) -> None:
    """ValueError with the sizes that the kernels want, where a matrix has others."""
    n, k, step = stored.out_features, stored.in_features, INPUT_STEP[stored.format]
    if n % OUTPUT_STEP or k % step or k > MAX_INPUTS:
        raise ValueError(
            f"the cuda kernels take {stored.format} matrices of a multiple of {OUTPUT_STEP} outputs and {step} inputs, "
            f"up to {MAX_INPUTS}, not {n} x {k}; use --dtype fp16"
        )


def pack(stored: Quantised, transposed: bool = False) -> Packed:
    """Codes and scales in the kernels' order."""
    n, k = stored.out_features, stored.in_features
    if stored.format is Format.FP8:
        codes, scales = stored.codes, stored.scales
    elif stored.format is Format.INT8:
        codes, scales = stored.codes.view(torch.uint8) ^ 128, stored.scales.T.contiguous()
    else:
        assert stored.zeros is not None, "4-bit codes have zeros"
        codes = codes_int4(stored)
        scales = torch.stack([stored.scales.T, stored.zeros.T.half() + ZERO_OFFSET], dim=-1).contiguous()
    if transposed:
        codes = codes.view(torch.uint8).T.contiguous().view(codes.dtype)
    codes = pack_nibbles(codes) if stored.format is Format.INT4 else codes.contiguous()
    rows, columns = (k, n) if transposed else (n, k)
    return Packed(stored.format, codes, scales, rows, columns, transposed)


def pack_nibbles(codes: Tensor) -> Tensor:
    """[rows, columns] 4-bit codes, one a byte -> [rows, columns / 2]: of eight, 0 2 4 6 and then 1 3 5 7."""
    c = codes.reshape(len(codes), -1, 4, 2).transpose(2, 3).reshape(len(codes), -1, 2)
    return (c[..., 0] | c[..., 1] << 4).contiguous()


def multiply_into(maps: Sequence[QuantMap]) -> None:
    """Up to 8 maps of one format over the same number of rows each."""
    rows, first = maps[0].x.shape[0], maps[0].linear
    if first.is_few(rows):
        multiply_few(maps)
    elif first.takes_parts(rows) and maps[0].y.dtype == torch.float16:
        multiply_codes([CodeMap(m.linear, *m.linear.row_parts(m.x), m.y, m.activation) for m in maps])
    elif maps[0].y.dtype == torch.float32 and all(m.linear.gives_floats(rows) for m in maps):
        for m in maps:  # a share that is the whole product
            multiply_codes([CodeMap(m.linear, *m.linear.row_parts(m.x), m.y.unsqueeze(0))])
    elif first.packed.fits_codes(rows):
        launch_codes([m.linear.packed.codes_map(m.x, m.y, m.activation) for m in maps])
    elif first.takes_codes(rows):
        multiply_codes([CodeMap(m.linear, *quantise_rows(m.x), m.y, m.activation) for m in maps])
    else:
        for m in maps:
            meant = m.linear.packed.dequantised()
            torch.mm(m.x, meant if m.linear.packed.transposed else meant.T, out_dtype=m.y.dtype, out=m.y)
            apply_activation(m.y, m.activation)


def add_shares(x: Tensor | None, delta: Shares) -> Tensor:
    """x [T, C] fp16, or zeros, and what is added to it -> [T, C] fp16."""
    count, rows, width = delta.shares.shape
    out = torch.empty(rows, width, dtype=torch.float16, device=delta.shares.device)
    places = cuda_pointer(x), cuda_pointer(delta.shares, torch.float32), cuda_pointer(out)
    library().call("rwkv_add_shares", *places, count, out.numel())
    return out


def add_sums(x: Tensor, delta: RowSums) -> Tensor:
    """x [1, C] fp16 and what is added to it -> [1, C] fp16."""
    out = torch.empty_like(x)
    places = cuda_pointer(x), cuda_pointer(delta.sums, torch.int64), cuda_pointer(out)
    hopper_library().call("rwkv_add_sums", *places, x.shape[1])
    return out


def added_up(delta: Tensor | Shares) -> Tensor:
    """[T, C] fp16."""
    return add_shares(None, delta) if isinstance(delta, Shares) else delta


def multiply_to_shares(linear: CudaQuantLinear, x: RowCodes) -> Tensor | Shares:
    """Rows [T, 2, in] in two parts -> [T, out] fp16, as shares where blocks share a product's k."""
    rows, packed = len(x.codes), linear.packed
    device = x.codes.device
    count = num_shares(rows, packed.outputs, packed.inputs, len(prepare_wide(device).partial))
    if count == 1:
        return linear(x)
    shares = torch.empty(count, rows, packed.outputs, dtype=torch.float32, device=device)
    multiply_codes([CodeMap(linear, *x, shares)])
    return Shares(shares)


def apply_activation(y: Tensor, activation: Activation) -> None:
    """In place on y [T, out] fp16, of those that follow a matrix in small codes. Raises ValueError for others."""
    if activation is Activation.RELU_SQUARED:
        library().call("rwkv_relu_square", cuda_pointer(y), y.numel())
    elif activation is Activation.SIGNED_SQUARE:
        y.mul_(y.abs())
    elif activation is not Activation.NONE:
        raise ValueError(f"no product of small codes is followed by {activation.name}")


def multiply_codes(maps: Sequence[CodeMap], halves: Sequence[HalfMap] = (), late: Sequence[HalfMap] = ()) -> None:
    """Up to 8 maps of fp8 weights over rows of fp8 codes: our own kernel where `fits_wide_fp8` says so, else cuBLAS.

    Rows in parts are our own kernels', of fp8 or of int8, and so are results in parts.

    `halves`, `late`: maps of halves for our own kernel, see `launch_wide_fp8`.
    """
    first = maps[0]
    if first.codes.dtype == BYTES:
        launch_wide_int8([_int8_map(m) for m in maps], halves, late)
        return
    if first.scales is None or _fits_wide(first):
        launch_wide_fp8([_fp8_map(m) for m in maps], halves, late)
        return
    for m in maps:
        assert m.scales is not None, "parts are multiplied above"
        scaled_product(m.linear, m.codes, m.scales, m.y)
        apply_activation(m.y, m.activation)


def _fits_wide(m: CodeMap) -> bool:
    """Whether our own kernel multiplies such rows of fp8 codes."""
    packed = m.linear.packed
    rows, n, k, device = len(m.codes), packed.outputs, packed.inputs, m.y.device
    if m.y.dtype == torch.float16:
        return fits_wide_fp8(rows, n, k, device, packed.transposed)
    return not packed.transposed and floats_by_wide_fp8(rows, n, k, device)


def _fp8_map(m: CodeMap) -> Fp8Map:
    packed = m.linear.packed
    return Fp8Map(packed.codes, packed.scales, m.codes, m.scales, m.y, m.activation, packed.transposed)


def _int8_map(m: CodeMap) -> Int8Map:
    assert m.scales is not None, "bytes have scales"
    packed = m.linear.packed
    return Int8Map(packed.codes, packed.scales, m.codes, m.scales, m.y, m.y_scales, m.activation, packed.transposed)


def multiply_few(
    maps: Sequence[QuantMap],
    halves: Sequence[Map] = (),
    norm: NormMixArgs | None = None,
    value: RowValueArgs | None = None,
) -> None:
    """Up to 8 maps over the same few rows in one launch: of one format, and up to 8 rows of halves beside them.

    `norm`: of what the launch makes its one row; a map reads its mix for x. `value`: what the only map's one row is
    multiplied by, where it `fits_row_value`; its y is not written. Raises ValueError for others.
    """
    rows, format_ = maps[0].x.shape[0], maps[0].linear.format
    count, most = len(maps) + len(halves), min(FEW_ROWS[format_], MAX_MIXED_ROWS if halves else FEW_ROWS[format_])
    if count > MAX_MAPS or rows > most:
        raise ValueError(f"a launch takes {MAX_MAPS} maps of {most} rows, not {count} of {rows}")
    args = QuantArgs(count=count, rows=rows, format=NUMBERS[format_])
    if norm is not None:
        args.norm = norm
    if value is not None:
        args.value = value
    # Halves first: they are twice the bytes of an output, and would be what a launch waits for at its end.
    for slot, half in zip(args.maps[: len(halves)], halves, strict=True):
        n, k = half.weight.shape
        if not fits_skinny(half.weight) or half.x.shape != (rows, k) or half.y.shape != (rows, n):
            raise ValueError(f"[{n}, {k}], {tuple(half.x.shape)}, {tuple(half.y.shape)} do not fit each other")
        slot.codes, slot.x, slot.y = cuda_pointer(half.weight), cuda_pointer(half.x), cuda_pointer(half.y)
        slot.n, slot.k, slot.ld_y, slot.activation, slot.warps_k = n, k, n, half.activation, 8
    for slot, m in zip(args.maps[len(halves) : count], maps, strict=True):
        packed = m.linear.packed
        n, k = packed.rows, packed.columns
        if packed.format is not format_ or m.x.shape != (rows, k) or m.y.shape != (rows, n):
            raise ValueError(
                f"{packed.format} [{n}, {k}], {tuple(m.x.shape)}, {tuple(m.y.shape)} do not fit each other"
            )
        slot.codes, slot.scales = packed.codes.data_ptr(), packed.scales.data_ptr()
        slot.x, slot.y = cuda_pointer(m.x), cuda_pointer(m.y, m.y.dtype)
        slot.n, slot.k, slot.ld_y = n, k, n
        slot.activation, slot.float_out = m.activation, m.y.dtype == torch.float32
        chunks = k // INPUT_STEP[format_]
        slot.warps_k = 8 if chunks >= 8 else 4 if chunks >= 4 else 2 if chunks >= 2 else 1
    if rows == 1 and fits_wide_row(maps[0].linear, [slot.k for slot in args.maps[:count]]):
        hopper_library().call("rwkv_wide_row", ctypes.byref(args))
        return
    if fits_wide_few(maps[0].linear, [slot.k for slot in args.maps[:count]], rows):
        hopper_library().call("rwkv_wide_few", ctypes.byref(args))
        return
    library().call("rwkv_skinny_quant", ctypes.byref(args))


def fits_wide_few(linear: CudaQuantLinear, inputs: Sequence[int], rows: int) -> bool:
    """Whether Hopper's kernel for some rows of fp8 (csrc/wide_few.cu) takes maps of so many inputs."""
    is_known = rows in WIDE_FEW_ROWS and linear.format is Format.FP8 and all(k % 64 == 0 for k in inputs)
    return is_known and has_wide(linear.packed.codes.device)


def fits_wide_row(linear: CudaQuantLinear, inputs: Sequence[int]) -> bool:
    """Whether Hopper's kernel for one row (csrc/wide_row.cu) takes maps of so many inputs in a launch with `linear`."""
    return has_wide(linear.packed.codes.device) and all(k <= MOST_ROW_INPUTS and k % 64 == 0 for k in inputs)


def fits_row_value(key: CudaQuantLinear, processors: int) -> bool:
    """Whether the launch of one row of `key` (csrc/wide_row.cu) takes ffn.value as well, each block a group at most.

    Not of fp8: that was slower (docs/notebook.md).
    """
    packed = key.packed
    is_known = packed.format is not Format.FP8 and packed.rows % GROUP_INPUTS == 0
    return is_known and packed.rows <= GROUP_INPUTS * processors and fits_wide_row(key, [packed.columns])


def quantise_rows(x: Tensor, relu_square: bool = False) -> RowCodes:
    """x [T, K] fp16, or max(x, 0)^2, as codes."""
    rows, k = x.shape
    codes = torch.empty(rows, k, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    library().call(
        "rwkv_quantise_rows",
        cuda_pointer(x),
        codes.data_ptr(),
        cuda_pointer(scales, torch.float32),
        rows,
        k,
        relu_square,
    )
    return RowCodes(codes, scales)


def scaled_product(linear: CudaQuantLinear, codes: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """fp8 rows [T, K] with scales [T] times an fp8 matrix -> out [T, N]."""
    weight, types = linear.packed.by_outputs(), scaled_types(out.device)
    dtype = out.dtype if out.dtype in types else types[0]
    place = out if dtype == out.dtype else torch.empty(out.shape, dtype=dtype, device=out.device)
    torch._scaled_mm(
        codes,
        weight.T,
        scale_a=scales.unsqueeze(1),
        scale_b=linear.packed.scales.unsqueeze(0),
        out_dtype=dtype,
        use_fast_accum=True,
        out=place,
    )
    return out if place is out else out.copy_(place)


def is_multiplied_by_codes(format_: Format, device: torch.device) -> bool:
    """Whether a device has products of rows of fp8 codes with weights of this format."""
    return format_ is Format.FP8 and bool(scaled_types(device))


@functools.cache
def scaled_types(device: torch.device) -> tuple[torch.dtype, ...]:
    """The result types of fp8 products with a scale per row; none: this GPU or torch has no such product."""
    if torch.cuda.get_device_capability(device) < (8, 9):
        return ()
    found = []
    ones = torch.ones(32, dtype=torch.float32, device=device)
    codes = torch.ones(32, 32, device=device).to(torch.float8_e4m3fn)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        try:
            torch._scaled_mm(codes, codes.T, ones.unsqueeze(1), ones.unsqueeze(0), out_dtype=dtype, use_fast_accum=True)
            found.append(dtype)
        except (RuntimeError, ValueError) as error:
            logger.info("no fp8 products with results in %s on %s: %s", dtype, device, str(error).splitlines()[0])
    return tuple(found)
