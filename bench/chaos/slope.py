"""Growth of a figure over time, with confidence bounds. Fits a robust line."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass

FLAT = 0.01
"""Growth per hour, as a share, that counts as flat."""
BLOCKS = 24
"""Time blocks, each reduced to its median: samples of neighbouring seconds are not independent."""
LONG_S = 1800.0
"""From this length on, the upper bound must be below FLAT. Shorter runs only fail if the lower one is above."""
_SIGMAS = 1.96
"""95 %."""


@dataclass(frozen=True)
class Slope:
    """Growth per hour as a share, with 95 % bounds.

    This is the Theil-Sen estimator with Sen's bounds. The estimate is the median of the slopes between all pairs of
    blocks.
    """

    an_hour: float
    low: float
    high: float
    seconds: float
    """length of the sampled time"""

    @property
    def grows(self) -> bool:
        """Whether the figure grows. Also True if a long run does not show that it is flat."""
        return (self.high if self.seconds >= LONG_S else self.low) > FLAT


def medians(samples: list[tuple[float, float]], has_floor: bool = False) -> list[tuple[float, float]]:
    """Return (mean time, median) of each block of (seconds, figure) samples; [] if there are too few.

    has_floor: return the lowest figure in place of the median. Files, threads and descriptors come and go with
    requests, so only their lowest number shows what is left behind.
    """
    if len(samples) < 2 * BLOCKS:
        return []
    cuts = [len(samples) * number // BLOCKS for number in range(BLOCKS + 1)]
    blocks = [samples[first:end] for first, end in itertools.pairwise(cuts)]
    reduce = min if has_floor else statistics.median
    return [(statistics.fmean(at for at, _ in block), reduce(y for _, y in block)) for block in blocks]


def slope(samples: list[tuple[float, float]], has_floor: bool = False) -> Slope | None:
    """Return the slope of (seconds, figure) samples in time order; None if there are too few. `has_floor`: `medians`"""
    points = medians(samples, has_floor)
    if not points:
        return None
    slopes = sorted((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in itertools.combinations(points, 2))
    spread = _SIGMAS * (BLOCKS * (BLOCKS - 1) * (2 * BLOCKS + 5) / 18) ** 0.5
    low, high = round((len(slopes) - spread) / 2), round((len(slopes) + spread) / 2)
    scale = 3600 / statistics.median(y for _, y in points)
    middle, seconds = statistics.median(slopes), samples[-1][0] - samples[0][0]
    return Slope(scale * middle, scale * slopes[low], scale * slopes[high], seconds)
