"""State layouts: the memory for states on the GPU, their bytes in the database, and splits into pipeline stages.

A slot holds one sequence's whole state, in every stage's arena. Slot 0 is always the zero state: fresh sequences read
it and nobody writes it. Slot 1 is the dummy that graph padding writes to. Kernels read a row's state from one slot and
write it to another, often the same one. So forks, prefix-cache hits and rollbacks need no copy.

A state's parts belong to stages: "stage0.wkv" [layers, ...] with recurrent states, and "stage0.shift" [layers, 2, C]
with the token shifts of time mix and channel mix. A layer may be split between two stages. The first then has its
recurrent state and time mix, the second its channel mix. The other token shift in each stage is unused.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import struct
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

ZERO_SLOT = 0
DUMMY_SLOT = 1
FIRST_FREE_SLOT = 2


class InvalidStateValues(ValueError):  # noqa: N818 - names what the numbers are
    """A state has invalid numbers: NaN, infinite, or a negative quantisation scale."""


class HostState(Protocol):
    """One state in host memory, as named parts of little-endian bytes.

    The names are "stage0.wkv", "stage0.shift", ...
    """

    def parts(self) -> dict[str, memoryview]:
        """Return the bytes by part name. Valid only after the copy that fills the parts."""


class Copy(Protocol):
    """An asynchronous copy between a slot and host memory."""

    @property
    def host(self) -> HostState: ...

    def is_done(self) -> bool:
        """Return whether the copy is done. Never blocks."""

    def wait(self) -> None: ...


class Arena(Protocol):
    """Slots of states on the GPU(s). Engine thread only, except `host_state`."""

    num_slots: int
    """including the zero slot and the dummy"""
    state_bytes: int
    """over all stages"""
    layout: dict[str, tuple[str, tuple[int, ...]]]
    """Part name -> (dtype such as "float32", shape). A stored state must match it."""
    vocab: int
    """token ids are smaller"""
    fingerprint: str
    """Digests of a sample of the model's weights and of all of them; see `is_same_model`."""

    def save(self, slot: int) -> Copy:
        """Start copying a slot to host memory. Do not write the slot until the copy is done."""

    def load(self, slot: int, host: HostState) -> Copy:
        """Start copying a host state into a slot. Do not read the slot from the host until then.

        The device orders later forwards after the copy, so a row may be scheduled at once.
        """

    def host_state(self, parts: Mapping[str, bytes | memoryview]) -> HostState:
        """Build a host state from stored bytes. Any thread.

        Raises ValueError naming a part that does not fit `layout`, InvalidStateValues naming a part with invalid
        numbers.
        """


LAYOUT_VERSION = 1
"""Format of the stored bytes: parts in layout order, little-endian, cut into chunks."""
CHUNK_BYTES = 1 << 20
"""Bytes of a state per row. A turn's commit waits for at most one such write."""
CHUNKS_PER_STATE = 1 << 20
"""Row id of chunk n of state s is s * CHUNKS_PER_STATE + n."""

Layout = dict[str, tuple[str, tuple[int, ...]]]
ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int8": 1, "uint8": 1}
"""Bytes per number of each dtype that a layout may name."""


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Pack token ids as unsigned 32-bit little-endian: the byte order of all processors that the kernels support."""
    return array("I", tokens).tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    packed = array("I")
    packed.frombytes(data)
    return packed.tolist()


def checksum(data: bytes | memoryview, *numbers: int) -> bytes:
    """Return 16 bytes over the data and numbers. The numbers identify the row of the data."""
    return checksum_pieces((data,), *numbers)


def checksum_pieces(pieces: Sequence[bytes | memoryview], *numbers: int) -> bytes:
    """`checksum` of data in pieces."""
    digest = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        digest.update(piece)
    digest.update(struct.pack(f"<{len(numbers)}q", *numbers))
    return digest.digest()


def chunk_checksum(data: bytes | memoryview, at: int) -> int:
    """Return a CRC-32 over a chunk and its row number. Detects damage, not tampering."""
    return zlib.crc32(data, zlib.crc32(struct.pack("<q", at)))


def layout_text(layout: Layout) -> str:
    """Encode a layout as text, in part order. Equal layouts give equal text."""
    return json.dumps([[name, dtype, list(shape)] for name, (dtype, shape) in layout.items()], separators=(",", ":"))


def part_sizes(layout: Layout) -> dict[str, int]:
    return {name: math.prod(shape) * ITEM_BYTES[dtype] for name, (dtype, shape) in layout.items()}


def split_chunks(parts: dict[str, memoryview], order: Sequence[str]) -> Iterator[memoryview]:
    """Yield the state's bytes part by part, in chunks. A chunk has at most CHUNK_BYTES. No chunk spans two parts."""
    for name in order:
        whole = parts[name].cast("B")
        for start in range(0, len(whole), CHUNK_BYTES):
            yield whole[start : start + CHUNK_BYTES]


def join_parts(chunks: Sequence[bytes], sizes: dict[str, int]) -> dict[str, bytes]:
    """Invert `split_chunks`. Raises ValueError if the sizes do not match."""
    parts: dict[str, bytes] = {}
    at = 0
    for name, size in sizes.items():
        count = -(-size // CHUNK_BYTES)
        parts[name] = b"".join(chunks[at : at + count])
        if len(parts[name]) != size:
            raise ValueError(f"part {name} has {len(parts[name])} bytes, {size} expected")
        at += count
    if at != len(chunks):
        raise ValueError(f"{len(chunks)} chunks, {at} expected")
    return parts


SAME_LAYOUT_HINT = "start with the same state dtype (--wkv-state) and devices"
"""Remedy for a state with other layers or dtypes."""


class _Piece(NamedTuple):
    """One of several equal pieces of a part."""

    part: str
    position: int
    spec: tuple[str, tuple[int, ...]]
    """(dtype, shape)"""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.spec[1]) * ITEM_BYTES[self.spec[0]]

    def read_from(self, parts: Mapping[str, bytes | memoryview]) -> memoryview:
        begin = self.position * self.num_bytes
        return memoryview(parts[self.part]).cast("B")[begin : begin + self.num_bytes]


class _LayerState(NamedTuple):
    wkv: _Piece
    time_shift: _Piece
    channel_shift: _Piece


class _StageParts(NamedTuple):
    """A stage's parts and layers. The first layer may have only its channel mix here."""

    wkv: str
    shift: str
    first: int
    last: int
    """exclusive"""
    starts_mid_layer: bool


def has_same_layers(stored: Layout, own: Layout) -> bool:
    """Whether both layouts have the same layers in the same dtypes. Any split into stages counts."""
    if stored == own:
        return True
    own_layers = _layer_states(own)
    if not own_layers or any(shape and shape[0] > len(own_layers) for _, shape in stored.values()):
        return False
    return _layer_specs(_layer_states(stored)) == _layer_specs(own_layers)


def reshard_state(
    parts: Mapping[str, bytes | memoryview], stored: Layout, own: Layout
) -> Mapping[str, bytes | memoryview]:
    """Return a state's parts in layout `own`, from parts in layout `stored`. Requires `has_same_layers`."""
    if stored == own:
        return parts
    layers = _layer_states(stored)
    found: dict[str, bytes | memoryview] = {}
    for stage in _stages(own) or []:
        stage_layers = layers[stage.first : stage.last]
        found[stage.wkv] = b"".join(layer.wkv.read_from(parts) for layer in stage_layers[stage.starts_mid_layer :])
        shifts = itertools.chain.from_iterable((layer.time_shift, layer.channel_shift) for layer in stage_layers)
        found[stage.shift] = b"".join(shift.read_from(parts) for shift in shifts)
    return found


def _stages(layout: Layout) -> list[_StageParts] | None:
    """Return the stages of a layout. None if the parts are not stages."""
    stages: list[_StageParts] = []
    for i in range(len(layout) // 2):
        wkv, shift = f"stage{i}.wkv", f"stage{i}.shift"
        if wkv not in layout or shift not in layout:
            return None
        states, shifts = layout[wkv][1], layout[shift][1]
        if not states or len(shifts) < 2 or shifts[1] != 2:
            return None
        num_split, end = shifts[0] - states[0], stages[-1].last if stages else 0
        if num_split not in {0, 1} or num_split > end:
            return None
        first = end - num_split
        stages.append(_StageParts(wkv, shift, first, first + shifts[0], bool(num_split)))
    return stages if 2 * len(stages) == len(layout) else None


def _layer_states(layout: Layout) -> list[_LayerState]:
    """Return the pieces of each layer. Empty if the parts are not stages."""
    layers: list[_LayerState] = []
    for stage in _stages(layout) or []:
        (wkv_type, wkv), (shift_type, shift) = layout[stage.wkv], layout[stage.shift]
        for i in range(stage.last - stage.first):
            time_shift, channel_shift = (
                _Piece(stage.shift, 2 * i + column, (shift_type, shift[2:])) for column in range(2)
            )
            if i == 0 and stage.starts_mid_layer:
                layers[-1] = layers[-1]._replace(channel_shift=channel_shift)
            else:
                state = _Piece(stage.wkv, i - stage.starts_mid_layer, (wkv_type, wkv[1:]))
                layers.append(_LayerState(state, time_shift, channel_shift))
    return layers


def _layer_specs(layers: list[_LayerState]) -> list[list[tuple[str, tuple[int, ...]]]]:
    return [[piece.spec for piece in layer] for layer in layers]
