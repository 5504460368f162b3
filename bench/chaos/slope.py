"""Whether a figure grows: a line through it that outliers and steps do not bend, and how sure that line is."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass

FLAT = 0.01
"""Growth an hour, as a share, that is called flat."""
BLOCKS = 24
"""Parts of the time, each known by its median: figures from second to second are not independent of each other."""
LONG_S = 600.0
"""From here on a slope above `FLAT` that is not chance is growth; before that its lower bound has to be above it."""
_SIGMAS = 1.96
"""95 %."""


@dataclass(frozen=True)
class Slope:
    """Growth as a share an hour: Theil and Sen's estimate (the median of the slopes between all blocks), with Sen's
    bounds of 95 %."""

    an_hour: float
    low: float
    high: float
    seconds: float
    """how long was looked at"""

    @property
    def grows(self) -> bool:
        """Whether it is more than flat, as far as so long a time tells."""
        if self.seconds >= LONG_S:
            return self.an_hour > FLAT and self.low > 0
        return self.low > FLAT


def medians(samples: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """(mean time, median) of each block of (seconds, figure) in their order; []: too few."""
    if len(samples) < 2 * BLOCKS:
        return []
    cuts = [len(samples) * number // BLOCKS for number in range(BLOCKS + 1)]
    blocks = [samples[first:end] for first, end in itertools.pairwise(cuts)]
    return [(statistics.fmean(at for at, _ in block), statistics.median(y for _, y in block)) for block in blocks]


def slope(samples: list[tuple[float, float]]) -> Slope | None:
    """Of (seconds, figure) in their order; None: too few."""
    points = medians(samples)
    if not points:
        return None
    slopes = sorted((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in itertools.combinations(points, 2))
    spread = _SIGMAS * (BLOCKS * (BLOCKS - 1) * (2 * BLOCKS + 5) / 18) ** 0.5
    low, high = round((len(slopes) - spread) / 2), round((len(slopes) + spread) / 2)
    scale = 3600 / statistics.median(y for _, y in points)
    middle, seconds = statistics.median(slopes), samples[-1][0] - samples[0][0]
    return Slope(scale * middle, scale * slopes[low], scale * slopes[high], seconds)
