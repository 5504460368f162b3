"""Plans of the Hopper GEMMs: every plan can be launched, and uses all SMs where possible."""

from __future__ import annotations

import pytest
import torch

from native import build, machine
from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cuda import fused_input_projections
from rwkv_batch.kernels.cuda import hopper_gemm as cuda_wide
from rwkv_batch.kernels.cuda.fused_input_projections import fits_fused_projections
from rwkv_batch.kernels.cuda.hopper_gemm import (
    TILE_K,
    TILE_N,
    TILE_ROWS,
    GemmShape,
    HopperWorkspace,
    Plan,
    fits_hopper_gemm,
    hopper_gemm_unavailable_reason,
    plan_hopper_gemm,
    plan_row_blocks,
)
from rwkv_batch.kernels.cuda.hopper_gemm_fp8 import (
    FP8_TILE_ROWS,
    MAX_COLUMNS,
    MAX_TRANSPOSED_ROWS,
    TRANSPOSED_TILE_ROWS,
    plan_fp8,
    plan_transposed,
)
from rwkv_batch.kernels.cuda.hopper_quantised_launch import QUANTISED_TILE_K
from rwkv_batch.kernels.cuda.ops import CudaOps

PROCESSORS = 132
SHAPES = {
    "input projections": (GemmShape(4096, 4096),) * 3 + (GemmShape(128, 4096),) * 3 + (GemmShape(512, 4096),),
    "exits": (GemmShape(4096, 128),) * 3 + (GemmShape(4096, 512),),
    "output": (GemmShape(4096, 4096),),
    "key": (GemmShape(16384, 4096),),
    "value": (GemmShape(4096, 16384),),
    "narrow": (GemmShape(768, 768), GemmShape(64, 768)),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("rows", [1, 8, 16, 17, 32, 33, 64, 80, 105, 128, 233, 250, 256])
def test_every_plan_has_a_kernel_and_room(rows: int, name: str) -> None:
    plan = plan_hopper_gemm(rows, SHAPES[name], PROCESSORS)
    assert plan.tile_rows in TILE_ROWS
    assert rows <= plan.tile_rows < rows + 32
    tiles = sum(-(-shape.n // TILE_N) for shape in SHAPES[name])
    assert plan.splits == 1 or tiles * plan.splits <= PROCESSORS
    assert all(shape.k % (TILE_K * plan.splits) == 0 for shape in SHAPES[name])


@pytest.mark.parametrize("width", [768, 1024, 2048, 2560, 4096])
def test_every_transposed_plan_has_a_kernel_and_no_idle_warpgroup(width: int) -> None:
    value = (GemmShape(width, 4 * width),)
    for rows in range(65, MAX_TRANSPOSED_ROWS + 1, 5):
        plan = plan_transposed(rows, value, PROCESSORS)
        blocks = -(-rows // plan.tile_rows)
        assert plan.tile_rows in TRANSPOSED_TILE_ROWS, f"{rows} rows"
        assert 4 * width % (QUANTISED_TILE_K * plan.splits) == 0
        assert plan.splits == 1 or blocks * -(-width // TILE_N) * plan.splits <= PROCESSORS
        if plan.tile_rows > MAX_COLUMNS:  # two products
            assert rows - (blocks - 1) * plan.tile_rows > plan.tile_rows // 2, f"{rows} rows: one has none"


def test_groups_of_four_gpus_fill_their_tiles() -> None:
    """320 and 960 rows in four groups."""
    assert [plan_hopper_gemm(rows, SHAPES["key"], PROCESSORS).tile_rows for rows in (80, 240)] == [80, 240]


def test_split_k_over_many_rows_runs_on_all_sms() -> None:
    """The low ranks down are 7 tiles in 4 splits: 132 SMs take four blocks of rows."""
    rows = (200, 320, 512, 960)
    assert [plan_row_blocks(count, 7, 4, PROCESSORS).tile_rows for count in rows] == [224, 80, 128, 240]
    assert [plan_row_blocks(count, 128, 1, PROCESSORS).tile_rows for count in rows] == [224, 160, 256, 240]
    assert plan_row_blocks(320, 16, 4, PROCESSORS).tile_rows == 160, "there is room for two blocks"


def test_few_outputs_use_split_k() -> None:
    """4096 outputs are 32 tiles: 132 SMs take four CTAs per tile. 16384 outputs are enough tiles."""
    assert plan_hopper_gemm(64, SHAPES["value"], PROCESSORS).splits == 4
    assert plan_hopper_gemm(64, SHAPES["key"], PROCESSORS).splits == 1
    assert plan_hopper_gemm(64, (GemmShape(7168, 4096),), PROCESSORS).splits == 2


def test_no_waiting_between_ctas_under_mps() -> None:
    assert plan_hopper_gemm(64, SHAPES["value"], PROCESSORS, co_resident=False).splits == 1


def test_fewer_sms_split_less() -> None:
    """114 SMs of an H100 PCIe: 32 tiles leave room for three CTAs each, and kernels exist for two."""
    assert plan_hopper_gemm(64, SHAPES["value"], 114).splits == 2


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("rows", [*range(1, 642, 13), 64, 65, 128, 320, 321, 640])
def test_every_quantised_plan_has_a_kernel_and_room(rows: int, name: str) -> None:
    plan = plan_fp8(rows, SHAPES[name], PROCESSORS)
    assert plan.tile_rows in FP8_TILE_ROWS
    tiles = sum(-(-shape.n // TILE_N) for shape in SHAPES[name]) * -(-rows // plan.tile_rows)
    assert plan.splits == 1 or tiles * plan.splits <= PROCESSORS
    assert all(
        shape.k % (QUANTISED_TILE_K * plan.splits) == 0 for shape in SHAPES[name] if shape.k % QUANTISED_TILE_K == 0
    )
    assert tiles * plan.splits * plan.tile_rows <= PROCESSORS * FP8_TILE_ROWS[-1] or plan.splits == 1, "room for sums"


def test_half_tiles_exchange_less() -> None:
    """From 257 rows: where four CTAs would share a tile, two share each of two. Other plans stay."""
    value, key = SHAPES["value"], SHAPES["key"]
    assert [plan_fp8(rows, value, PROCESSORS) for rows in (64, 256, 257, 320)] == [
        Plan(64, 4),
        Plan(256, 4),
        Plan(160, 2),
        Plan(160, 2),
    ]
    assert plan_fp8(320, key, PROCESSORS) == Plan(320, 1)
    assert plan_fp8(640, value, PROCESSORS) == Plan(320, 2)
    assert plan_fp8(320, value, PROCESSORS, co_resident=False) == Plan(320, 1)


def test_input_projections_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """r, k, v of 4,096 outputs leave 36 of 132 SMs. Low ranks take 28. With 2,048 outputs they use split-K."""
    work = HopperWorkspace(torch.empty(PROCESSORS, 1), torch.zeros(PROCESSORS, 2, dtype=torch.int32))
    monkeypatch.setattr(fused_input_projections, "prepare_hopper_gemm", lambda device: work)
    monkeypatch.setattr(fused_input_projections, "has_hopper_gemm", lambda device: True)

    def fits(rows: int, width: int = 4096, rank: int = 128) -> bool:
        def weights(*shapes: tuple[int, int]) -> list[torch.Tensor]:
            return [torch.empty(shape, device="meta") for shape in shapes]

        low = weights(*[(rank, width)] * 3, (512, width))
        return fits_fused_projections(
            rows, weights(*[(width, width)] * 3), low, weights(*[(width, rank)] * 3, (width, 512))
        )

    assert [rows for rows in (1, 64, 65, 80, 240, 256, 257) if fits(rows)] == [65, 80, 240, 256]
    assert not fits(80, width=2048) and not fits(80, width=2560)
    assert not fits(80, rank=512), "64 blocks"
    assert not fits(80, rank=96)
    monkeypatch.setattr(fused_input_projections, "is_mps_active", lambda: True)
    assert not fits(80)


@pytest.mark.parametrize("name", ["output", "key", "value"])
def test_launches_in_order_cover_all_rows_with_one_split(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """All rows once, tiles that exist, as many CTAs as run at once, and the same split for any number of rows."""
    work = HopperWorkspace(torch.empty(PROCESSORS, 1), torch.zeros(PROCESSORS, 2, dtype=torch.int32))
    monkeypatch.setattr(cuda_wide, "prepare_hopper_gemm", lambda device: work)
    launches: list[tuple[int, Plan]] = []
    monkeypatch.setattr(cuda_wide, "launch_hopper_kernel", lambda _, args, plan, __: launches.append((args.rows, plan)))
    monkeypatch.setattr(cuda_wide, "cuda_pointer", lambda tensor, dtype=None: 16 * len(tensor))
    (n, k) = SHAPES[name][0]
    splits = cuda_wide.fixed_splits(SHAPES[name], torch.device("cpu"))
    for is_transposed in (False, True):
        weight = torch.empty((k, n) if is_transposed else (n, k), dtype=torch.half, device="meta")
        for rows in (1, 5, 16, 17, 256, 257, 512, 1000, 1024, 1025, 4096):
            launches.clear()
            x, y = torch.empty(rows, k, dtype=torch.half, device="meta"), torch.empty(rows, n, device="meta").half()
            cuda_wide.launch_in_order([(weight, x, y, Activation.NONE)], splits, is_transposed)
            assert sum(count for count, _ in launches) == rows
            for count, plan in launches:
                blocks = -(-count // plan.tile_rows)
                assert plan.splits == splits and plan.tile_rows in TILE_ROWS
                assert splits == 1 or -(-n // TILE_N) * splits * blocks <= PROCESSORS
                assert blocks == 1 or not is_transposed
    with pytest.raises(ValueError, match="4 splits take inputs that are a multiple of 256, not 64"):
        cuda_wide.launch_in_order([(torch.empty(64, 64), torch.empty(1, 64), torch.empty(1, 64), Activation.NONE)], 4)


def test_the_reason_for_no_kernels() -> None:
    reason = hopper_gemm_unavailable_reason(torch.device("cpu"))
    assert reason is not None and "require sm_90" in reason
    assert CudaOps().missing_kernels(torch.device("cpu")) == {"wide": reason}


def test_a_failed_build_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise build.BuildError("nvcc knows no compute_90a")

    monkeypatch.setattr(cuda_wide, "hopper_library", refuse)
    monkeypatch.setattr(machine, "gpu_archs", lambda: ("sm_90",))
    device = torch.device("cuda", 63)
    assert hopper_gemm_unavailable_reason(device) == "nvcc knows no compute_90a"
    assert not cuda_wide.has_hopper_gemm(device)


def test_supported_shapes() -> None:
    assert fits_hopper_gemm(GemmShape(96, 768), transposed=False)
    assert not fits_hopper_gemm(GemmShape(96, 768), transposed=True)
    assert not fits_hopper_gemm(GemmShape(96, 96), transposed=False)
    assert not fits_hopper_gemm(GemmShape(72, 128), transposed=False)
