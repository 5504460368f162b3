"""The entrance of a time mix in halves as one launch (csrc/wide_entrance.cu): its plan and the launch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rwkv_batch.kernels.cuda.library import MAX_WIDE_MAPS, WideEntranceArgs
from rwkv_batch.kernels.cuda.wide import (
    DEPTH,
    HALF_SPLITS,
    MAX_WIDE_ROWS,
    OUTPUTS,
    TILE_ROWS,
    HalfMap,
    Plan,
    WideShape,
    fits_wide,
    has_wide,
    launch_planned,
    place_halves,
    plan_wide,
    prepare_wide,
    shares_processors,
)

LEAST_ROWS = 65
"""With 1, 8 and 32 rows it took 0.9, 0.9 and 0.3 % longer than two launches (docs/notebook.md)."""


def fits_entrance(rows: int, whole: Sequence[Tensor], shared: Sequence[Tensor], late: Sequence[Tensor]) -> bool:
    """Whether weights [n, k] of r, k, v, of the low ranks' entrances and of their exits go into one launch.

    r, k, v must leave so many processors idle that every block of the entrances has one: the exits wait for them.
    """
    if not LEAST_ROWS <= rows <= MAX_WIDE_ROWS or not has_wide(whole[0].device) or shares_processors():
        return False
    processors = len(prepare_wide(whole[0].device).partial)
    shapes = [[WideShape(*weight.shape) for weight in weights] for weights in (whole, shared, late)]
    tiles = [sum(-(-shape.n // OUTPUTS) for shape in part) for part in shapes]
    return (
        tiles[0] + HALF_SPLITS * tiles[1] <= processors
        and plan_wide(rows, tuple(shapes[0]), processors).splits == 1
        and all(fits_wide(shape, transposed=False) for part in shapes for shape in part)
        and all(shape.k % (DEPTH * HALF_SPLITS) == 0 for shape in shapes[1])
    )


def launch_entrance(whole: Sequence[HalfMap], shared: Sequence[HalfMap], late: Sequence[HalfMap]) -> None:
    """Maps over the same rows, where `fits_entrance` says so. The late ones' inputs are results of the shared ones.

    Raises ValueError for more maps or rows than a launch takes, or shapes that do not fit each other.
    """
    maps = [*whole, *shared, *late]
    rows, device = maps[0][1].shape[0], maps[0][1].device
    if len(maps) > MAX_WIDE_MAPS or rows > MAX_WIDE_ROWS:
        raise ValueError(
            f"a launch takes {MAX_WIDE_MAPS} maps of {MAX_WIDE_ROWS} rows at most, not {len(maps)} of {rows}"
        )
    args = WideEntranceArgs(count=len(maps), whole=len(whole), late=len(late), rows=rows)
    place_halves(args.maps[: len(maps)], maps, rows)
    tile_rows = next(size for size in TILE_ROWS if size >= max(rows, LEAST_ROWS))
    launch_planned("rwkv_wide_entrance", args, Plan(tile_rows, HALF_SPLITS), prepare_wide(device))
