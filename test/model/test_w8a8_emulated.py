"""W8A8 kernels, run thread by thread on the CPU: the bits of the definition."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cuda import hopper_gemm
from rwkv_batch.kernels.cuda.w8a8 import mixed_launch, products
from rwkv_batch.kernels.cuda.w8a8.mixed_launch import launch_mixed
from rwkv_batch.kernels.cuda.w8a8.plans import TILES, Plan, Tile
from rwkv_batch.kernels.cuda.w8a8.products import (
    Cleared,
    W8A8Gemm,
    W8A8Weights,
    W8A8Workspace,
    multiply,
    multiply_by_mma,
    multiply_sparse,
    multiply_sparse_row,
    pitch_of,
    quantise_mixed,
)
from rwkv_batch.model.quant.w8a8 import Codes, input_transform, product, quantise_rows, quantise_weight
from rwkv_batch.model.quant.w8a8 import InputTransform as Transform
from test.model.emulated.library import emulated, error, needs_headers, send_launches_to

pytestmark = [pytest.mark.slow, needs_headers]


EMULATED_TILES = (8, 32, 80, 128)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    """Launcher -> the library that has it."""
    found = {f"rwkv_{name}": emulated(name, tmp_path_factory.mktemp(name)) for name in ("w8a8_quantise", "w8a8_mma")}
    others = ("w8a8_middle", "w8a8_many", "w8a8_many_unsigned")
    for name in ("w8a8_sparse", "w8a8_sparse_row"):
        found[f"rwkv_{name}"] = emulated(name, tmp_path_factory.mktemp(name))
    found["rwkv_gemm_w8a8"] = emulated("gemm_w8a8", tmp_path_factory.mktemp("gemm_w8a8"), (32, 320), (1,))
    found["rwkv_w8a8"] = emulated("w8a8_few", tmp_path_factory.mktemp("w8a8"), EMULATED_TILES, others=others)
    return found


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch, libraries: dict[str, ctypes.CDLL]) -> None:
    """Launches go to the emulation."""
    send_launches_to(libraries.__getitem__, monkeypatch, hopper_gemm, mixed_launch, products)
    monkeypatch.setattr(products, "has_hopper_gemm", lambda device: True)
    empty = torch.empty(0, dtype=torch.int32)
    work = W8A8Workspace(torch.empty(0, dtype=torch.uint8), torch.zeros(0, dtype=torch.int32), 4, empty)
    monkeypatch.setattr(products, "prepare_w8a8", lambda device: work)


def channels(k: int) -> Tensor:
    """Sizes of inputs: every 16th channel is up to 100 times as large as the others."""
    sizes = torch.rand(k) + 0.5
    sizes[::16] *= torch.rand(len(sizes[::16])) * 100
    return sizes


def made(n: int, k: int, sizes: Tensor) -> tuple[W8A8Weights, Codes, Transform]:
    """A random matrix for inputs of these sizes [K]."""
    weight = torch.randn(n, k) / k**0.5
    transform, s = input_transform(3 * sizes, weight)
    codes = quantise_weight(weight, s, transform.positions)
    return W8A8Weights.prepare(codes, transform), codes, transform


def stored(codes: Tensor, weights: W8A8Weights, transform: Transform) -> Tensor:
    """Codes [R, K] of the definition in the kernels' order."""
    return codes[:, transform.positions[weights.order.long()].long()]


def rows_of(rows: int, sizes: Tensor) -> Tensor:
    """Rows of all kinds: large and small values, zeros, NaN, infinity."""
    x, k = torch.randn(rows, len(sizes)) * sizes, len(sizes)
    for i, change in enumerate((lambda v: v * 0, lambda v: v * 1e-7, lambda v: v * 1e4, lambda v: -v.abs())):
        if i + 1 < rows:
            x[i + 1] = change(x[i + 1])
    if rows > 6:
        x[5, 17], x[6, k - 1] = torch.nan, torch.inf
    return x.half()


def largest_of(x: Tensor, weights: W8A8Weights) -> Tensor:
    """Bits of the rows' largest max(x, 0)^2, of the rest and of segment 1: [R, 2] int32; x [R, K] in stored order."""
    v = torch.where(x <= 0, 0, x.float()).square() * weights.stored_factors.abs()
    return torch.stack([v[:, 128:].amax(1), v[:, :128].amax(1)], 1).view(torch.int32)


def same(got: Tensor, wanted: Tensor) -> bool:
    """Whether two tensors have the same values; any NaN equals any other."""
    return bool(torch.equal(got.isnan(), wanted.isnan()) and torch.equal(got.nan_to_num(7), wanted.nan_to_num(7)))


@pytest.mark.parametrize(("k", "count", "rows"), [(128, 1, 3), (768, 3, 8), (2560, 1, 19), (5120, 1, 2), (5120, 1, 15)])
@pytest.mark.parametrize("relu_squared", [False, True])
@pytest.mark.parametrize("bits", [8, 16])
def test_inputs_have_the_bits_of_the_definition(k: int, count: int, rows: int, relu_squared: bool, bits: int) -> None:
    sizes = channels(k)
    matrices = [made(64, k, sizes) for _ in range(count)]
    x = torch.stack([rows_of(rows, sizes) for _ in range(count)])
    all_weights = [weights for weights, _, _ in matrices]
    in_order = torch.stack([x[i][:, weights.order.long()] for i, weights in enumerate(all_weights)])
    for got in (
        quantise_mixed(x, all_weights, relu_squared, bits=bits),
        quantise_mixed(in_order, all_weights, relu_squared, in_order=True, bits=bits),
    ):
        for i, (weights, _, transform) in enumerate(matrices):
            v = x[i].float()
            v = torch.where(v <= 0, 0, v).square() if relu_squared else v
            wanted = quantise_rows(v, transform, relu_squared, bits)
            assert torch.equal(got[i].codes, stored(wanted.codes, weights, transform))
            assert same(got[i].scales[: len(wanted.codes)], wanted.scales)
            assert torch.equal(got[i].ratios[: len(wanted.codes)], wanted.ratios)


def random_gemms(
    rows: int, k: int, ns: tuple[int, ...], is_unsigned: bool = False, bits: int = 8
) -> tuple[list[W8A8Gemm], list[Tensor]]:
    """GEMMs and what they must give."""
    gemms, wanted = [], []
    for n in ns:
        sizes = channels(k)
        weights, codes, transform = made(n, k, sizes)
        x = torch.randn(rows, k) * sizes
        inputs = quantise_rows(x.relu().square() if is_unsigned else x, transform, is_unsigned, bits)
        padding = pitch_of(len(inputs.codes)) - len(inputs.codes)
        padded = Codes(
            stored(inputs.codes, weights, transform),
            torch.cat([inputs.scales, torch.full((padding,), torch.nan)]),
            torch.cat([inputs.ratios, torch.zeros(padding, dtype=torch.int32)]),
        )
        gemms.append(W8A8Gemm(padded, weights, torch.full((rows, n), torch.nan, dtype=torch.float16)))
        wanted.append(product(inputs, codes, bits).half())
    return gemms, wanted


def assert_products(
    rows: int, k: int, ns: tuple[int, ...], is_unsigned: bool, plan: Plan | None, bits: int = 8
) -> None:
    """Multiply by Hopper's kernel, or by mma without a plan."""
    gemms, wanted = random_gemms(rows, k, ns, is_unsigned, bits)
    multiply_by_mma(gemms, bits) if plan is None else multiply(gemms, plan, bits)
    for gemm, y in zip(gemms, wanted, strict=True):
        assert torch.equal(gemm.y.view(torch.int16), y.view(torch.int16))


@pytest.mark.parametrize(("rows", "k", "num_sms"), [(1, 384, 1), (20, 1664, 1), (260, 256, 1), (7, 384, 6)])
def test_low_ranks_in_the_same_launch(
    rows: int, k: int, num_sms: int, libraries: dict[str, ctypes.CDLL], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of the definition, and fp16 products next to them, some of which read others."""
    libraries["rwkv_gemm_w8a8"].emulation_set(num_sms, 227 << 10)
    libraries["rwkv_gemm_w8a8"].emulation_set_resident(num_sms)
    monkeypatch.setattr(mixed_launch, "FP16_SPLITS", 1)
    gemms, wanted = random_gemms(rows, k, (192, 64, 128))
    low = []
    for n, inputs, activation in ((64, 192, Activation.TANH), (192, 128, Activation.NONE)):
        y = torch.full((rows, n), torch.nan, dtype=torch.float16)
        low.append((torch.randn(n, inputs).half() / 8, torch.randn(rows, inputs).half(), y, activation))
    y = torch.full((rows, 160), torch.nan, dtype=torch.float16)
    dependent = [(torch.randn(160, 64).half() / 8, low[0][2], y, Activation.NONE)]
    for _ in range(2):  # the first launch must reset its counters
        launch_mixed(gemms, low, dependent)
        for gemm, true in zip(gemms, wanted, strict=True):
            assert torch.equal(gemm.y.view(torch.int16), true.view(torch.int16))
            gemm.y.fill_(torch.nan)
        for weight, x, y, activation in (*low, *dependent):
            reference = x.float() @ weight.float().T
            reference = reference.tanh() if activation is Activation.TANH else reference
            assert error(y, reference) < 1e-3


@pytest.mark.parametrize(
    ("rows", "k", "ns"), [(1, 768, (64,)), (8, 1152, (64, 128, 64)), (19, 256, (64,)), (70, 384, (128,))]
)
@pytest.mark.parametrize("is_unsigned", [False, True])
@pytest.mark.parametrize("bits", [8, 16])
def test_mma_has_the_bits_of_the_definition(
    rows: int, k: int, ns: tuple[int, ...], is_unsigned: bool, bits: int
) -> None:
    assert_products(rows, k, ns, is_unsigned, None, bits)


@pytest.mark.parametrize(
    ("is_unsigned", "tile"),
    [(unsigned, Tile(rows)) for unsigned in (False, True) for rows in EMULATED_TILES if Tile(rows) in TILES[unsigned]],
    ids=str,
)
def test_hopper_has_the_bits_of_the_definition(is_unsigned: bool, tile: Tile) -> None:
    """K of fewer stages than the ring and of more; several tiles per CTA, with warpgroups apart."""
    rows = tile.tile_rows
    assert_products(rows + 3, 384, (192, 64), is_unsigned, Plan(tile))
    assert_products(rows // 2 + 3, 384, (192, 64), is_unsigned, Plan(tile), bits=16)
    if rows == 8:
        assert_products(33 * rows - 1, 256, (192, 64), is_unsigned, Plan(tile))  # row blocks in three bands
    if rows in (8, 128):
        assert_products(2 * rows, 1664, (320, 128, 128), is_unsigned, Plan(tile, lead=1))


@pytest.mark.parametrize(
    ("rows", "k", "n"), [(1, 4096, 128), (1, 16384, 64), (1, 640, 64), (3, 9216, 256), (8, 640, 128), (8, 16384, 128)]
)
@pytest.mark.parametrize("share", [0.12, 1.0])
def test_sparse_rows_have_the_bits_of_the_definition(
    rows: int, k: int, n: int, share: float, libraries: dict[str, ctypes.CDLL]
) -> None:
    """Inputs that are negative, and those whose code is zero, are left out; a row with NaN stays so."""
    sums = torch.zeros(8, n, dtype=torch.int32)
    libraries["rwkv_w8a8_sparse"].emulation_set(8, 227 << 10)
    sizes = channels(k)
    weights, codes, transform = made(n, k, sizes)
    x = torch.randn(rows, k).abs() * sizes * torch.where(torch.rand(rows, k) < share, 1, -1)
    if rows > 2:
        x[1] = -x[1].abs()
        x[2] *= 1e-3
    if rows > 3:
        x[3, 7] = torch.nan
    x = x.half()
    v = x.float()
    inputs = quantise_rows(torch.where(v <= 0, 0, v).square(), transform, unsigned=True)
    in_order = x[:, weights.order.long()].contiguous()
    transposed = weights.codes.T.contiguous()
    if rows == 1:
        y = multiply_sparse_row(in_order, weights, transposed)
    else:
        found = multiply_sparse(in_order, weights, transposed, Cleared(sums[:rows], largest_of(in_order, weights)))
        y = (found.sums.float() * (found.row_scales[:, None] * found.output_scales)).half()
        assert (sums[rows:] == 0).all()
    wanted = product(inputs, codes).half()
    assert wanted[[i for i in range(rows) if i != 3]].isfinite().all()
    assert same(y, wanted)


@pytest.mark.parametrize("rows", [5, 32])
def test_outputs_raise_the_largest_inputs_of_the_map_that_they_feed(rows: int) -> None:
    (gemm,), _ = random_gemms(rows, 256, (5120,))
    fed, _, _ = made(64, 5120, channels(5120))
    largest = torch.zeros(rows, 2, dtype=torch.int32)
    multiply([gemm], fed=fed, largest=largest)
    assert torch.equal(largest, largest_of(gemm.y, fed))


def test_a_matrix_that_the_kernels_do_not_take_is_refused() -> None:
    for n, k in ((96, 256), (64, 192), (64, 16512)):
        codes = Codes(torch.zeros(n, k, dtype=torch.int8), torch.ones(n), torch.full((n,), 16, dtype=torch.int32))
        with pytest.raises(ValueError, match=f"{n} outputs and {k} inputs.*--dtype fp16"):
            W8A8Weights.prepare(codes, Transform(torch.ones(k), torch.arange(k, dtype=torch.int32)))
