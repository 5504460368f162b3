"""Parses strategies of the `rwkv` package into this service's settings: "cuda fp16 *10 -> cpu fp32"."""

from __future__ import annotations

import re
from dataclasses import dataclass

PART = re.compile(
    r"(?P<device>cuda(?::\d+)?|cpu)\s+(?P<dtype>[a-z0-9]+)(?:\s*\*\s*(?P<count>\d+)(?P<plus>\+)?)?$", re.ASCII
)
DTYPES = {
    **{name: name for name in ("fp32", "bf16", "fp16", "fp8", "int8", "int4")},
    **{
        f"{name}{suffix}": small
        for name in ("fp32", "bf16", "fp16")
        for suffix, small in (("i8", "int8"), ("i4", "int4"))
    },
}
MAX_LAYERS = 1000
DEFAULT_DTYPES = {"cuda": "fp16", "cpu": "fp32"}
"""The meaning of --dtype auto per device."""


class StrategyError(ValueError):
    """The message names the part and the remedy."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """Values of --pp-devices, --pp-layers, --pp-resident and --dtype."""

    devices: tuple[str, ...]
    layers: tuple[int, ...]
    """per device; 0: the rest; empty: split automatically"""
    dtype: str
    resident: tuple[int | None, ...] = ()
    """per device, layers that stay on it while others are streamed; None: all; empty: all on all devices"""


@dataclass(frozen=True, slots=True)
class _Part:
    device: str
    dtype: str
    count: int | None
    streams: bool
    """`*count+`: the part takes the rest of the layers, and `count` of them stay on the device"""


def parse_strategy(text: str) -> Strategy:
    """`device dtype [*layers] -> ...`. The last part without a count, or a part with `+`, takes the rest.

    Raises StrategyError.
    """
    parts = [_parse_part(part.strip()) for part in text.split("->")]
    devices = tuple(part.device for part in parts)
    if len(parts) > 1 and None in [part.count for part in parts[:-1]]:
        raise StrategyError(
            f'in {text!r} every part but the last needs a number of layers, like "cuda fp16 *10 -> cpu fp32"'
        )
    counts = [0 if part.streams else part.count or 0 for part in parts]
    if counts.count(0) > 1:
        raise StrategyError(f"in {text!r} more than one part takes the rest of the layers; give the others a number")
    layers = tuple(counts) if len(parts) > 1 or counts[0] else ()
    streamed = any(part.streams for part in parts)
    resident = tuple(part.count if part.streams else None for part in parts) if streamed else ()
    return Strategy(devices, layers, _common_dtype(text, parts), resident)


def _parse_part(part: str) -> _Part:
    found = PART.match(part)
    if found is None:
        raise StrategyError(f'{part!r} is not `device dtype *layers` with cuda, cuda:N or cpu, like "cuda:0 fp16 *10"')
    if found["dtype"] not in DTYPES:
        raise StrategyError(f"{part!r} has the type {found['dtype']!r}; use one of {', '.join(DTYPES)}")
    streams = found["plus"] is not None
    if found["count"] and (len(found["count"]) > 4 or int(found["count"]) > MAX_LAYERS):
        raise StrategyError(f"{part[:80]!r} gives {found['device']} more than {MAX_LAYERS} layers; give fewer")
    count = int(found["count"]) if found["count"] else None
    if count == 0 and not streams:
        raise StrategyError(f"{part!r} gives {found['device']} no layers; leave the part out")
    return _Part(found["device"], DTYPES[found["dtype"]], count, streams)


def _common_dtype(text: str, parts: list[_Part]) -> str:
    dtypes = {part.dtype for part in parts}
    if len(dtypes) == 1:
        return dtypes.pop()
    if all(part.dtype == DEFAULT_DTYPES[part.device.partition(":")[0]] for part in parts):
        return "auto"
    raise StrategyError(
        f"{text!r} mixes types: use one for all parts, or fp16 on cuda with fp32 on cpu; see --dtype and --pp-layers"
    )
