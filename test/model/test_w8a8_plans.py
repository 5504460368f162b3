"""Plans of the W8A8 kernel: every launch of a published model has one that the kernel takes."""

from __future__ import annotations

import re

import pytest
import torch

from rwkv_batch.kernels.cuda.library import SOURCES
from rwkv_batch.kernels.cuda.w8a8 import products
from rwkv_batch.kernels.cuda.w8a8.plans import (
    MAX_EXCHANGED_ROWS,
    MAX_TILE_ROWS,
    SEGMENT,
    TILES,
    Launch,
    Plan,
    Tile,
    fits,
    launch_table,
    num_ctas,
    plan_w8a8,
)
from rwkv_batch.kernels.cuda.w8a8.products import MAX_SUM_OUTPUTS, W8A8Workspace, fits_sparse, pitch_of

WIDTHS = (768, 1024, 2048, 2560, 4096)
VOCAB = 65536
ROWS = (*range(1, 140), 160, 161, 192, 240, 241, 256, 257, 320, 321, 400, 640, 959, 960, 961, 1024, 2000, 4096, 5000)
NUM_SMS = {"H200": 132, "H100 PCIe": 114, "H20": 78}


def launches_of(width: int, rows: int) -> list[Launch]:
    """The launches of a step: output, r k v, ffn.key, ffn.value, head."""
    return [
        Launch((width,), width, False, rows),
        Launch((width,) * 3, width, False, rows),
        Launch((4 * width,), width, False, rows),
        Launch((width,), 4 * width, True, rows),
        Launch((VOCAB,), width, False, rows),
    ]


@pytest.mark.parametrize("num_sms", NUM_SMS.values(), ids=NUM_SMS)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_launch_has_a_plan_that_the_kernel_takes(width: int, num_sms: int) -> None:
    for rows in ROWS:
        for launch in launches_of(width, rows):
            plan = plan_w8a8(launch, num_sms)
            tile = plan.tile
            assert tile in TILES[launch.is_unsigned], launch
            assert launch.k % SEGMENT == 0 and launch.k // SEGMENT >= max(tile.splits, plan.lead)
            assert -(-rows // tile.tile_rows) * tile.tile_rows <= pitch_of(rows), "the last tile reads its rows' scales"
            if tile.in_memory:
                assert num_ctas(tile, launch) <= num_sms, "a CTA would wait for one that is not resident"
                assert tile.tile_rows <= MAX_EXCHANGED_ROWS and tile.outputs == 128


def test_a_cluster_has_tiles_along_outputs_and_along_rows() -> None:
    for rows, down in ((16384, 64), (257, 2), (256, 2), (513, 4)):
        assert num_ctas(Tile(256, pair=4), Launch((4096, 128), 4096, False, rows)) == (32 + 2) * down


def test_no_ctas_wait_for_each_other_under_mps() -> None:
    for rows in (1, 8, 64, 128, 320):
        for launch in launches_of(4096, rows):
            assert not plan_w8a8(launch, 132, co_resident=False).tile.in_memory


def test_wide_models_read_all_of_ffn_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of few rows have memory for 4,096 outputs, and the kernels for 16,384 inputs."""
    monkeypatch.setattr(products, "has_hopper_gemm", lambda device: True)
    memory = torch.empty(8 * (MAX_SUM_OUTPUTS + 2), dtype=torch.int32)
    work = W8A8Workspace(torch.empty(0), torch.empty(0), 132, memory)
    for n, is_sparse in ((768, True), (4096, True), (4000, False), (5120, False)):
        assert fits_sparse(n, torch.device("cuda")) is is_sparse
        for rows in (2, 8):
            cleared = work.cleared_of(rows, n)
            assert (cleared is not None) is is_sparse
            assert cleared is None or cleared.sums.shape == (rows, n)
        assert work.cleared_of(1, n) is work.cleared_of(9, n) is None


def test_measured_launches_get_their_plan() -> None:
    count = 0
    for (ns, k, is_unsigned), plans in launch_table().items():
        for rows, plan in plans:
            launch = Launch(ns, k, is_unsigned, rows)
            assert fits(plan, launch, 132), launch
            assert plan_w8a8(launch, 132) == plan
            count += 1
    assert count > 30


def test_fewer_rows_take_the_plan_of_the_next_measured_number() -> None:
    launch = Launch((4096,), 4096, False, 20)
    assert plan_w8a8(launch, 132) == Plan(Tile(32, 2))
    assert plan_w8a8(launch._replace(rows=950), 132) == Plan(Tile(240))


def test_a_plan_for_more_rows_is_not_taken_if_its_tile_would_be_half_empty() -> None:
    """ffn.key at 320 rows has tiles of 320 rows."""
    launch = Launch((16384,), 4096, False, 150)
    assert plan_w8a8(launch._replace(rows=320), 132).tile.tile_rows == 320
    assert plan_w8a8(launch, 132).tile.tile_rows == 160


def test_small_models_split_k() -> None:
    """768 outputs are 6 tiles: the rule splits K, so that more SMs load weights."""
    assert plan_w8a8(Launch((768,), 3072, True, 1), 132).tile.splits == 4
    assert plan_w8a8(Launch((2048,), 2048, False, 64), 132).tile.splits == 4


def test_the_compiled_tiles_are_those_of_the_plans() -> None:
    """TILES mirrors the macros in csrc/w8a8."""
    found: set[tuple[bool, Tile]] = set()
    for source in (SOURCES / "w8a8").glob("w8a8_*.cu"):
        for name, arguments in re.findall(r"^    W8A8_(\w+)\((.*)\)$", source.read_text(), re.MULTILINE):
            *numbers, unsigned = arguments.split(", ")
            if name == "ROWS":
                tile = Tile(int(numbers[0]))
            elif name in ("CLUSTER", "MEMORY"):
                tile = Tile(int(numbers[0]), int(numbers[1]), name == "MEMORY")
            else:
                warpgroups, blocks, rows, splits, pair = map(int, numbers[:5])
                tile = Tile(rows, splits, numbers[5] == "true", pair, warpgroups, blocks)
            found.add((unsigned == "true", tile))
    assert found == {(unsigned, tile) for unsigned, tiles in TILES.items() for tile in tiles}
    assert max(tile.tile_rows for _, tile in found) == MAX_TILE_ROWS
