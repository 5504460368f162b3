"""How Hopper's W8A8 kernel tiles a launch (csrc/w8a8/w8a8.cuh): a table of measured plans, and a rule for others."""

from __future__ import annotations

import functools
from bisect import bisect_left
from pathlib import Path
from typing import NamedTuple

import msgspec

LAUNCH_TABLE = Path(__file__).with_name("launch_table.json")
SEGMENT = 128
"""K per stage of the kernel."""
BLOCK_OUTPUTS = 64
"""Outputs of a wgmma; n is a multiple."""
MAX_EXCHANGED_ROWS = 256
"""Largest tile whose sums are exchanged through memory."""
MAX_TILE_ROWS = 320


class Tile(NamedTuple):
    """One compiled form of the kernel."""

    tile_rows: int
    splits: int = 1
    """CTAs that share a tile's K"""
    in_memory: bool = False
    """the CTAs that share K exchange their sums through memory; else they are a cluster"""
    pair: int = 1
    """2: two CTAs load the tile of inputs for both; 4: two such pairs load the tiles of weights for both"""
    warpgroups: int = 2
    blocks: int = 1
    """64 outputs per warpgroup each"""

    @property
    def outputs(self) -> int:
        """Outputs of a tile."""
        return BLOCK_OUTPUTS * self.warpgroups * self.blocks

    @property
    def cluster(self) -> tuple[int, int]:
        """Tiles that CTAs load together, along outputs and along rows."""
        return (2 if self.pair > 1 else 1), (2 if self.pair > 2 else 1)


class Plan(NamedTuple):
    """Tiling of a launch."""

    tile: Tile
    lead: int = 0
    """stages that a warpgroup is ahead of the next one"""
    ctas_per_sm: int = 1
    """2 is for tiles of 8 rows"""


FED_PLAN = Plan(Tile(32))
"""Of few rows that feed ffn.value"""


class Launch(NamedTuple):
    """The sizes and types that choose a plan."""

    ns: tuple[int, ...]
    """outputs of each GEMM"""
    k: int
    is_unsigned: bool
    """inputs are u8"""
    rows: int


class TableLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the launch table."""

    n: tuple[int, ...]
    k: int
    is_unsigned: bool
    rows: int
    tile_rows: int
    splits: int = 1
    in_memory: bool = False
    pair: int = 1
    warpgroups: int = 2
    blocks: int = 1
    lead: int = 0
    ctas_per_sm: int = 1

    def plan(self) -> Plan:
        """Return the plan of the line."""
        tile = Tile(self.tile_rows, self.splits, self.in_memory, self.pair, self.warpgroups, self.blocks)
        return Plan(tile, self.lead, self.ctas_per_sm)


TILES: dict[bool, tuple[Tile, ...]] = {
    False: (
        *map(Tile, (8, 32, 64, 80, 128, 160, 240, 256, 320)),
        *(Tile(rows, 2) for rows in (8, 32, 64)),
        *(Tile(rows, 4, in_memory=True) for rows in (8, 64, 128)),
        Tile(160, 2, in_memory=True),
        *(Tile(rows, pair=2) for rows in (256, 320)),
        Tile(256, pair=4),
        Tile(160, pair=2, blocks=2),
        Tile(160, warpgroups=3),
    ),
    True: (
        *map(Tile, (32, 64, 128, 160, 240, 256)),
        Tile(32, 2),
        *(Tile(rows, 4, in_memory=True) for rows in (8, 32, 64, 128, 256)),
        Tile(160, 2, in_memory=True),
        Tile(256, pair=2),
        Tile(256, pair=4),
    ),
}
"""Whether inputs are u8 -> compiled tiles, as in csrc/w8a8/w8a8_*.cu."""
MAX_RULE_ROWS = 256
"""Largest tile of the rule: larger ones are faster for some shapes only."""
LARGEST_WASTE = 1.25
"""Rows of all tiles per row, up to which a measured plan serves fewer rows than it was measured with."""
FEW_ROWS = 64
"""Up to this tile, memory binds: rows of a tile that are not there cost nothing."""
STAGE_FLOOR, STAGE_BASE = 214, 129
"""Time of a stage in units of one row's products: all SMs load weights, or multiply (measured at K 4,096)."""
TILE_STAGES, EXCHANGE_STAGES = 2, 3
"""Time of a tile's start and end, and of an exchange, in stages."""


@functools.lru_cache(maxsize=4096)
def plan_w8a8(launch: Launch, num_sms: int, co_resident: bool = True) -> Plan:
    """Return the plan of a launch: measured if the table has one, else by the rule.

    co_resident: whether all CTAs of a launch run at once; an exchange through memory requires it.
    """
    measured = _measured(launch)
    if (
        measured is not None
        and _wastes_little(measured.tile, launch.rows)
        and fits(measured, launch, num_sms, co_resident)
    ):
        return measured
    plans = (Plan(tile) for tile in TILES[launch.is_unsigned] if tile.tile_rows <= MAX_RULE_ROWS and tile.pair == 1)
    fitting = [plan for plan in plans if plan.tile.warpgroups == 2 and fits(plan, launch, num_sms, co_resident)]
    return min(fitting, key=lambda plan: (_cost(plan.tile, launch, num_sms), plan.tile.tile_rows))


def fits(plan: Plan, launch: Launch, num_sms: int, co_resident: bool = True) -> bool:
    """Whether a plan's kernel is compiled and takes the launch."""
    tile = plan.tile
    if tile not in TILES[launch.is_unsigned] or launch.k // SEGMENT < tile.splits:
        return False
    return not tile.in_memory or (co_resident and num_ctas(tile, launch) <= num_sms)


def num_ctas(tile: Tile, launch: Launch) -> int:
    """Return the number of CTAs of a launch. Each computes one tile, or one split of it."""
    abreast, stacked = tile.cluster
    outputs, rows = tile.outputs * abreast, tile.tile_rows * stacked
    return sum(-(-n // outputs) for n in launch.ns) * -(-launch.rows // rows) * tile.splits * tile.pair


@functools.cache
def launch_table() -> dict[tuple[tuple[int, ...], int, bool], list[tuple[int, Plan]]]:
    """Return the plans of the launch table by shape.

    (n of each GEMM, k, is_unsigned) -> (rows, plan) in order of rows
    """
    table: dict[tuple[tuple[int, ...], int, bool], list[tuple[int, Plan]]] = {}
    for line in msgspec.json.decode(LAUNCH_TABLE.read_bytes(), type=list[TableLine]):
        table.setdefault((line.n, line.k, line.is_unsigned), []).append((line.rows, line.plan()))
    return {shape: sorted(plans) for shape, plans in table.items()}


def _measured(launch: Launch) -> Plan | None:
    """The plan of the nearest measured number of rows. It is the nearest at or above where there is one."""
    plans = launch_table().get((launch.ns, launch.k, launch.is_unsigned))
    if plans is None:
        return None
    return plans[min(bisect_left(plans, launch.rows, key=lambda line: line[0]), len(plans) - 1)][1]


def _wastes_little(tile: Tile, rows: int) -> bool:
    together = tile.tile_rows * tile.cluster[1]
    return tile.tile_rows <= FEW_ROWS or -(-rows // together) * together <= LARGEST_WASTE * rows


def _cost(tile: Tile, launch: Launch, num_sms: int) -> float:
    """Estimated time: waves of CTAs, each of some stages."""
    ctas = num_ctas(tile, launch)
    waves, busy = -(-ctas // num_sms), min(1.0, ctas / num_sms)
    stages = -(-launch.k // SEGMENT // tile.splits) + TILE_STAGES + (EXCHANGE_STAGES if tile.splits > 1 else 0)
    return waves * stages * max(STAGE_FLOOR * max(busy, 0.5), STAGE_BASE + tile.tile_rows)
