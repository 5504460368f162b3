"""What launches of Hopper's tensor cores over fp8 codes (wide_fp8.py) and int8 codes (wide_int8.py) have in common.

Rows in two parts, and maps of halves on the processors that those of codes leave idle.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rwkv_batch.kernels.cuda.library import MAX_WIDE_MAPS, WideFp8Args, WideInt8Args
from rwkv_batch.kernels.cuda.wide import (
    DEPTH,
    HALF_SPLITS,
    LARGEST_TILE,
    OUTPUTS,
    HalfMap,
    Plan,
    WideShape,
    WideWorkspace,
    fits_wide,
    has_wide,
    launch_planned,
    most_splits,
    place_halves,
    plan_wide,
    shares_processors,
)

CODES_DEPTH = 128
"""Inputs of a step of a product of codes."""
PARTS_TILE_ROWS = (16, 32, 64)
"""Of rows in two parts: twice as many columns of a product."""
MAX_PARTS_ROWS = PARTS_TILE_ROWS[-1]


def fits_wide_parts(rows: int, n: int, k: int, device: torch.device) -> bool:
    """Whether the kernel of rows in two parts multiplies so many by [n, k]."""
    return rows <= MAX_PARTS_ROWS and k % CODES_DEPTH == 0 and n % 16 == 0 and has_wide(device)


def plan_parts(rows: int, shapes: tuple[WideShape, ...], processors: int) -> Plan:
    """As `plan_wide`, of rows in two parts."""
    return plan_wide(rows, shapes, processors, not shares_processors(), CODES_DEPTH, PARTS_TILE_ROWS)


def num_shares(rows: int, n: int, k: int, processors: int) -> int:
    """Into how many shares of k the kernel of rows in two parts cuts [n, k]."""
    return plan_parts(rows, (WideShape(n, k),), processors).splits


def fits_halves_beside(rows: int, coded: Sequence[WideShape], halves: Sequence[WideShape], processors: int) -> bool:
    """Whether maps of halves fit beside maps of codes in one launch: on the processors that these leave idle.

    Each tile of the halves is shared by several blocks, which wait for each other: all have to run at once.
    """
    if rows > LARGEST_TILE or most_splits(tuple(coded), processors, True, CODES_DEPTH) > 1:
        return False
    tiles = [sum(-(-shape.n // OUTPUTS) for shape in shapes) for shapes in (coded, halves)]
    is_shared = all(fits_wide(shape, False) and shape.k % (DEPTH * HALF_SPLITS) == 0 for shape in halves)
    return is_shared and tiles[0] + HALF_SPLITS * tiles[1] <= processors and not shares_processors()


def check_counts(count: int, rows: int, most_rows: int, to_shares: bool) -> None:
    """Raises ValueError for more maps, or rows, than a launch takes; one whose results are shares takes one map."""
    if count > MAX_WIDE_MAPS or rows > most_rows:
        raise ValueError(f"a launch takes {MAX_WIDE_MAPS} maps of {most_rows} rows, not {count} of {rows}")
    if to_shares and count > 1:
        raise ValueError(f"a launch whose results are shares takes one map, not {count}")


def launch_coded(
    name: str,
    args: WideFp8Args | WideInt8Args,
    shapes: Sequence[WideShape],
    halves: Sequence[HalfMap],
    late: Sequence[HalfMap],
    plan: Plan,
    work: WideWorkspace,
) -> None:
    """Run a kernel over maps of codes that are in their places, and over maps of halves, which come behind them.

    shapes: of the maps of codes; halves, late: as `launch_wide_fp8` has them. Raises ValueError for halves that do not
    fit beside those.
    """
    beside = [WideShape(*weight.shape) for weight, _, _, _ in halves]
    if beside and not fits_halves_beside(args.rows, shapes, beside, len(work.partial)):
        raise ValueError(f"halves {beside} do not fit beside codes {list(shapes)} of {args.rows} rows")
    place_halves(args.maps[len(shapes) : args.count], (*halves, *late), args.rows)
    launch_planned(name, args, Plan(plan.tile_rows, HALF_SPLITS) if halves else plan, work)
