"""The strategies of the `rwkv` package, as this service's own settings: "cuda fp16 *10 -> cpu fp32"."""

from __future__ import annotations

import re
from dataclasses import dataclass

PART = re.compile(r"(?P<device>cuda(?::\d+)?|cpu)\s+(?P<dtype>[a-z0-9]+)(?:\s*\*\s*(?P<count>\d+)(?P<plus>\+)?)?$")
DTYPES = {
    **{name: name for name in ("fp32", "bf16", "fp16", "fp8", "int8", "int4")},
    **{
        f"{name}{suffix}": small
        for name in ("fp32", "bf16", "fp16")
        for suffix, small in (("i8", "int8"), ("i4", "int4"))
    },
}
"""A strategy's type -> --dtype."""
BY_DEVICE = {"cuda": "fp16", "cpu": "fp32"}
"""What --dtype auto is on each kind of device."""


class StrategyError(ValueError):
    """A strategy cannot be followed; the message names the part and the remedy."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """What --pp-devices, --pp-layers and --dtype would say."""

    devices: tuple[str, ...]
    layers: tuple[int, ...]
    """of each device; 0: what the others leave; empty: they are dealt"""
    dtype: str


def parse_strategy(text: str) -> Strategy:
    """`device dtype [*layers] -> ...`, the last part without a count taking the rest. Raises StrategyError."""
    parts = [_parse_part(part.strip()) for part in text.split("->")]
    devices = tuple(device for device, _, _ in parts)
    counts = [count for _, _, count in parts]
    if len(parts) > 1 and None in counts[:-1]:
        raise StrategyError(
            f'in {text!r} every part but the last wants a number of layers, like "cuda fp16 *10 -> cpu fp32"'
        )
    layers = tuple(count or 0 for count in counts) if len(parts) > 1 or counts[0] else ()
    return Strategy(devices, layers, _common_dtype(text, parts))


def _parse_part(part: str) -> tuple[str, str, int | None]:
    found = PART.match(part)
    if found is None:
        raise StrategyError(f'{part!r} is not `device dtype *layers` with cuda, cuda:N or cpu, like "cuda:0 fp16 *10"')
    if found["plus"]:
        raise StrategyError(
            f"{part!r} streams the layers that do not fit, which is not served: give the rest to another device "
            f'("{part.removesuffix("+")} -> cpu fp32"), or take smaller weights (int8, int4)'
        )
    if found["dtype"] not in DTYPES:
        raise StrategyError(f"{part!r} names the type {found['dtype']!r}; there are {', '.join(DTYPES)}")
    if found["count"] is not None and int(found["count"]) == 0:
        raise StrategyError(f"{part!r} gives {found['device']} no layers; leave the part out")
    return found["device"], DTYPES[found["dtype"]], int(found["count"]) if found["count"] else None


def _common_dtype(text: str, parts: list[tuple[str, str, int | None]]) -> str:
    dtypes = {dtype for _, dtype, _ in parts}
    if len(dtypes) == 1:
        return dtypes.pop()
    if all(dtype == BY_DEVICE[device.partition(":")[0]] for device, dtype, _ in parts):
        return "auto"
    raise StrategyError(
        f"{text!r} mixes types: all parts take one, or fp16 on cuda with fp32 on cpu; see --dtype and --pp-layers"
    )
