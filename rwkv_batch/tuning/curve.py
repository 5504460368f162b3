"""Curves of a tuning's losses: a line of text, and a PNG."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence

import numpy as np

_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH, _HEIGHT, _LEFT, _EDGE = 800, 400, 92, 20
"""Of a picture and its margins, in pixels."""
_PALETTE = bytes.fromhex("ffffff 000000 88aabb cc4400")
_INK, _TRAINING, _HELD_OUT = 1, 2, 3
"""Colours of the palette."""
_DIGITS = {".": 0x0002, "-": 0x01C0} | dict(
    zip("0123456789", (0x7B6F, 0x2492, 0x73E7, 0x73CF, 0x5BC9, 0x79CF, 0x79EF, 0x7249, 0x7BEF, 0x7BCF), strict=True)
)
"""Characters of 5 rows of 3 pixels, a bit each."""
_PIXEL = 3
"""Size of such a pixel."""


def sparkline(values: Sequence[float]) -> str:
    """Return a curve in one line: means of 60 parts, high to low."""
    size = max(1, -(-len(values) // 60))
    means = [sum(part) / len(part) for start in range(0, len(values), size) if (part := values[start : start + size])]
    low, high = min(means, default=0.0), max(means, default=0.0)
    span = (high - low) or 1.0
    return "".join(_BLOCKS[round((mean - low) / span * (len(_BLOCKS) - 1))] for mean in means)


def loss_curve(losses: Sequence[float], evaluations: Sequence[tuple[int, float, float]]) -> bytes:
    """Return a PNG of the losses per step: training grey, held-out red and thick. The axes have their ends."""
    held = [(step, loss) for step, loss, _ in evaluations]
    values = [*losses, *(loss for _, loss in held)] or [0.0]
    low, high, steps = min(values), max(values), max(len(losses), 1)
    span, right, bottom = (high - low) or 1.0, _WIDTH - _EDGE, _HEIGHT - 2 * _EDGE
    canvas = np.zeros((_HEIGHT, _WIDTH), np.uint8)
    canvas[_EDGE:bottom, _LEFT] = canvas[bottom, _LEFT:right] = _INK
    for entries, colour, size in ((list(enumerate(losses, 1)), _TRAINING, 1), (held, _HELD_OUT, 3)):
        points = [
            (_LEFT + (right - _LEFT) * x / steps, _EDGE + (bottom - _EDGE) * (high - y) / span) for x, y in entries
        ]
        for (x0, y0), (x1, y1) in zip(points, points[1:] or points, strict=False):
            count = int(max(abs(x1 - x0), abs(y1 - y0))) + 2
            xs, ys = (np.linspace(*ends, count).astype(int) for ends in ((x0, x1), (y0, y1)))
            for dx in range(size):
                for dy in range(size):
                    canvas[np.minimum(ys + dy, _HEIGHT - 1), np.minimum(xs + dx, _WIDTH - 1)] = colour
    for number, y in ((high, _EDGE), (low, bottom - 15)):
        _write(canvas, _label(number), 4, y + 4)
    _write(canvas, f"{steps}", right - 12 * len(f"{steps}"), bottom + 4)
    return _png(canvas)


def _label(loss: float) -> str:
    """Return a loss with three or four digits that count, in at most seven characters."""
    places = 3 - math.floor(math.log10(loss)) if loss > 0 else 3
    return f"{loss:.{min(5, max(0, places))}f}"[:7]


def _write(canvas: np.ndarray, text: str, x: int, y: int) -> None:
    """Write digits into a canvas [height, width]."""
    for i, character in enumerate(text):
        bits = np.array([_DIGITS[character] >> (14 - n) & 1 for n in range(15)], np.uint8).reshape(5, 3)
        glyph = np.kron(bits, np.ones((_PIXEL, _PIXEL), np.uint8)) * _INK
        at = canvas[y : y + glyph.shape[0], x + 12 * i : x + 12 * i + glyph.shape[1]]
        at[:] = glyph[: at.shape[0], : at.shape[1]]


def _png(canvas: np.ndarray) -> bytes:
    """Return a canvas [height, width] of palette colours as a file."""
    rows = np.pad(canvas, ((0, 0), (1, 0)))  # each row begins with its filter: none
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", _WIDTH, _HEIGHT, 8, 3, 0, 0, 0)), (b"PLTE", _PALETTE),
        (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b""),
    )  # fmt: skip
    chunks = (
        struct.pack(">I", len(part)) + name + part + struct.pack(">I", zlib.crc32(name + part)) for name, part in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
