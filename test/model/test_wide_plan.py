"""How products of many rows are cut up: every plan can be launched, and fills the processors where it can."""

from __future__ import annotations

import pytest
import torch

from native import build, machine
from rwkv_batch.kernels.cuda import wide as cuda_wide
from rwkv_batch.kernels.cuda import wide_entrance
from rwkv_batch.kernels.cuda.coded_launch import CODES_DEPTH
from rwkv_batch.kernels.cuda.ops import CudaOps
from rwkv_batch.kernels.cuda.wide import (
    DEPTH,
    OUTPUTS,
    TILE_ROWS,
    Plan,
    WideShape,
    WideWorkspace,
    fits_wide,
    plan_wide,
    why_no_wide,
)
from rwkv_batch.kernels.cuda.wide_entrance import fits_entrance
from rwkv_batch.kernels.cuda.wide_fp8 import (
    FP8_TILE_ROWS,
    MAX_COLUMNS,
    MAX_TURNED_ROWS,
    TURNED_TILE_ROWS,
    plan_fp8,
    plan_turned,
)

PROCESSORS = 132
SHAPES = {
    "entrance": (WideShape(4096, 4096),) * 3 + (WideShape(128, 4096),) * 3 + (WideShape(512, 4096),),
    "exits": (WideShape(4096, 128),) * 3 + (WideShape(4096, 512),),
    "output": (WideShape(4096, 4096),),
    "key": (WideShape(16384, 4096),),
    "value": (WideShape(4096, 16384),),
    "narrow": (WideShape(768, 768), WideShape(64, 768)),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("rows", [1, 8, 16, 17, 32, 33, 64, 80, 105, 128, 233, 250, 256])
def test_every_plan_has_a_kernel_and_room(rows: int, name: str) -> None:
    plan = plan_wide(rows, SHAPES[name], PROCESSORS)
    assert plan.tile_rows in TILE_ROWS
    assert rows <= plan.tile_rows < rows + 32
    tiles = sum(-(-shape.n // OUTPUTS) for shape in SHAPES[name])
    assert plan.splits == 1 or tiles * plan.splits <= PROCESSORS
    assert all(shape.k % (DEPTH * plan.splits) == 0 for shape in SHAPES[name])


@pytest.mark.parametrize("width", [768, 1024, 2048, 2560, 4096])
def test_every_plan_of_turned_codes_has_a_kernel_and_no_idle_product(width: int) -> None:
    value = (WideShape(width, 4 * width),)
    for rows in range(65, MAX_TURNED_ROWS + 1, 5):
        plan = plan_turned(rows, value, PROCESSORS)
        blocks = -(-rows // plan.tile_rows)
        assert plan.tile_rows in TURNED_TILE_ROWS, f"{rows} rows"
        assert 4 * width % (CODES_DEPTH * plan.splits) == 0
        assert plan.splits == 1 or blocks * -(-width // OUTPUTS) * plan.splits <= PROCESSORS
        if plan.tile_rows > MAX_COLUMNS:  # two products
            assert rows - (blocks - 1) * plan.tile_rows > plan.tile_rows // 2, f"{rows} rows: one has none"


def test_groups_of_four_gpus_fill_their_tiles() -> None:
    """320 and 960 rows in four groups."""
    assert [plan_wide(rows, SHAPES["key"], PROCESSORS).tile_rows for rows in (80, 240)] == [80, 240]


def test_few_outputs_share_k() -> None:
    """4096 outputs are 32 tiles: 132 processors want four blocks on each; 16384 are enough for all."""
    assert plan_wide(64, SHAPES["value"], PROCESSORS).splits == 4
    assert plan_wide(64, SHAPES["key"], PROCESSORS).splits == 1
    assert plan_wide(64, (WideShape(7168, 4096),), PROCESSORS).splits == 2


def test_blocks_do_not_wait_where_others_may_hold_the_processors() -> None:
    assert plan_wide(64, SHAPES["value"], PROCESSORS, may_wait=False).splits == 1


def test_fewer_processors_share_less() -> None:
    """114 of an H100 PCIe: 32 tiles leave room for three blocks each, and there are kernels for two."""
    assert plan_wide(64, SHAPES["value"], 114).splits == 2


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("rows", [*range(1, 642, 13), 64, 65, 128, 320, 321, 640])
def test_every_plan_of_codes_has_a_kernel_and_room(rows: int, name: str) -> None:
    plan = plan_fp8(rows, SHAPES[name], PROCESSORS)
    assert plan.tile_rows in FP8_TILE_ROWS
    tiles = sum(-(-shape.n // OUTPUTS) for shape in SHAPES[name]) * -(-rows // plan.tile_rows)
    assert plan.splits == 1 or tiles * plan.splits <= PROCESSORS
    assert all(shape.k % (CODES_DEPTH * plan.splits) == 0 for shape in SHAPES[name] if shape.k % CODES_DEPTH == 0)
    assert tiles * plan.splits * plan.tile_rows <= PROCESSORS * FP8_TILE_ROWS[-1] or plan.splits == 1, "room for sums"


def test_tiles_of_half_the_rows_exchange_less() -> None:
    """From 257 rows on, where four blocks would share a tile, two share each of two; where two would, or none, nothing
    changes."""
    value, key = SHAPES["value"], SHAPES["key"]
    assert [plan_fp8(rows, value, PROCESSORS) for rows in (64, 256, 257, 320)] == [
        Plan(64, 4),
        Plan(256, 4),
        Plan(160, 2),
        Plan(160, 2),
    ]
    assert plan_fp8(320, key, PROCESSORS) == Plan(320, 1)
    assert plan_fp8(640, value, PROCESSORS) == Plan(320, 2)
    assert plan_fp8(320, value, PROCESSORS, may_wait=False) == Plan(320, 1)


def test_entrances_of_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """r, k, v of 4,096 outputs leave 36 of 132 processors, 28 of which the low ranks take; of 2,048 they share k."""
    work = WideWorkspace(torch.empty(PROCESSORS, 1), torch.zeros(PROCESSORS, 2, dtype=torch.int32))
    monkeypatch.setattr(wide_entrance, "prepare_wide", lambda device: work)
    monkeypatch.setattr(wide_entrance, "has_wide", lambda device: True)

    def fits(rows: int, width: int = 4096, rank: int = 128) -> bool:
        def weights(*shapes: tuple[int, int]) -> list[torch.Tensor]:
            return [torch.empty(shape, device="meta") for shape in shapes]

        low = weights(*[(rank, width)] * 3, (512, width))
        return fits_entrance(rows, weights(*[(width, width)] * 3), low, weights(*[(width, rank)] * 3, (width, 512)))

    assert [rows for rows in (1, 64, 65, 80, 240, 256, 257) if fits(rows)] == [65, 80, 240, 256]
    assert not fits(80, width=2048) and not fits(80, width=2560)
    assert not fits(80, rank=512), "64 blocks"
    assert not fits(80, rank=96)
    monkeypatch.setattr(wide_entrance, "shares_processors", lambda: True)
    assert not fits(80)


def test_why_there_are_none() -> None:
    reason = why_no_wide(torch.device("cpu"))
    assert reason is not None and "sm_90 only" in reason
    assert CudaOps().does_without(torch.device("cpu")) == {"wide": reason}


def test_a_build_that_fails_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise build.BuildError("nvcc knows no compute_90a")

    monkeypatch.setattr(cuda_wide, "hopper_library", refuse)
    monkeypatch.setattr(machine, "gpu_archs", lambda: ("sm_90",))
    device = torch.device("cuda", 63)
    assert why_no_wide(device) == "nvcc knows no compute_90a"
    assert not cuda_wide.has_wide(device)


def test_what_fits() -> None:
    assert fits_wide(WideShape(96, 768), transposed=False)
    assert not fits_wide(WideShape(96, 768), transposed=True)
    assert not fits_wide(WideShape(96, 96), transposed=False)
    assert not fits_wide(WideShape(72, 128), transposed=False)
