"""W8A8 GEMMs on a GPU: every bit as the definition has it, for any rows, plan and kernel."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from rwkv_batch.kernels.cuda.hopper_gemm import has_hopper_gemm
from rwkv_batch.kernels.cuda.ops import CudaOps
from rwkv_batch.kernels.cuda.w8a8.linear import CudaInt8Linear, CudaW8A8Linear, CudaW8A16Linear
from rwkv_batch.kernels.cuda.w8a8.plans import TILES, Launch, Plan, fits
from rwkv_batch.kernels.cuda.w8a8.products import (
    Cleared,
    ExactSums,
    W8A8Gemm,
    W8A8Mix,
    W8A8Weights,
    multiply,
    multiply_by_mma,
    multiply_sparse,
    multiply_sparse_row,
    pitch_of,
    prepare_w8a8,
    quantise_inputs,
    quantise_mixed,
)
from rwkv_batch.model.layer import Norm, Prologue
from rwkv_batch.model.quant.formats import Format, quantise
from rwkv_batch.model.quant.w8a8 import (
    MAX_RATIO,
    MAX_UNSIGNED_RATIO,
    MAX_WEIGHT_RATIO,
    Codes,
    InputTransform,
    input_transform,
    product,
    quantise_rows,
    quantise_weight,
)
from rwkv_batch.model.step_inputs import StepInputs

GPU = torch.device("cuda", 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
hopper = pytest.mark.skipif(not torch.cuda.is_available() or not has_hopper_gemm(GPU), reason="not a Hopper GPU")
PLANS = [(unsigned, tile) for unsigned, tiles in TILES.items() for tile in tiles]
SHAPES = (((4096,), 4096), ((192, 4160, 64), 2048), ((768, 768, 768), 768), ((64,), 128), ((2560,), 10240))


def channels(k: int) -> Tensor:
    """Sizes of inputs [K]: every 16th channel is up to 100 times as large as the others."""
    sizes = torch.rand(k, device=GPU) + 0.5
    sizes[::16] *= torch.rand(len(sizes[::16]), device=GPU) * 100
    return sizes


class Matrix:
    """A random matrix for inputs of these sizes [K]."""

    def __init__(self, n: int, sizes: Tensor) -> None:
        k = len(sizes)
        weight = torch.randn(n, k, device=GPU) / k**0.5
        self.transform, s = input_transform(3 * sizes, weight)
        self.codes = quantise_weight(weight, s, self.transform.positions)
        self.weights = W8A8Weights.prepare(self.codes, self.transform)

    def stored(self, codes: Tensor) -> Tensor:
        """Return codes [T, K] of the definition in the kernels' order."""
        return codes[:, self.transform.positions[self.weights.order.long()].long()]


def random_codes(rows: int, k: int, unsigned: bool, bits: int = 8) -> Codes:
    """Codes over the whole range, sometimes the extremes alone; scales and ratios padded by NaN and 0."""
    low, high = (0, 256) if unsigned else (-127, 128)
    codes = torch.randint(low, high, (rows, k), device=GPU, dtype=torch.int16)
    if torch.rand(()) < 0.3:
        codes.fill_(high - 1)
    scales = torch.full((pitch_of(rows),), torch.nan, device=GPU)
    ratios = torch.zeros(pitch_of(rows), device=GPU, dtype=torch.int32)
    parts = bits // 8  # rows of an input, of one scale and ratio
    scales[:rows] = torch.rand(rows // parts, device=GPU).repeat_interleave(parts)
    of_inputs = torch.randint(16, (MAX_UNSIGNED_RATIO if unsigned else MAX_RATIO) + 1, (rows // parts,), device=GPU)
    ratios[:rows] = of_inputs.repeat_interleave(parts)
    return Codes(codes.to(torch.uint8 if unsigned else torch.int8), scales, ratios)


def random_weights(n: int, k: int) -> tuple[W8A8Weights, Codes]:
    codes = random_codes(n, k, unsigned=False)
    ratios = torch.randint(16, MAX_WEIGHT_RATIO + 1, (n,), device=GPU, dtype=torch.int32)
    codes = Codes(codes.codes, torch.rand(n, device=GPU) * (0.001 / k), ratios)  # finite in fp16
    identity = InputTransform(torch.ones(k, device=GPU), torch.arange(k, device=GPU, dtype=torch.int32))
    return W8A8Weights.prepare(codes, identity), codes


def wanted(x: Codes, w: Codes, bits: int = 8) -> Tensor:
    """y [T, n] fp16 of the definition; x is padded."""
    rows = len(x.codes)
    return product(Codes(x.codes, x.scales[:rows], x.ratios[:rows]), w, bits).half()


def poisoned(rows: int, n: int) -> Tensor:
    """[rows + 8, n] NaN: the last 8 rows must stay."""
    return torch.full((rows + 8, n), torch.nan, dtype=torch.float16, device=GPU)


def scaled(of: ExactSums) -> Tensor:
    """Return y [T, n] fp16 of exact sums, as `shift_mix` reads them."""
    return (of.sums.float() * (of.row_scales[: len(of.sums), None] * of.output_scales)).half()


def largest_of(x: Tensor, weights: W8A8Weights) -> Tensor:
    """Bits of the rows' largest max(x, 0)^2, of the rest and of segment 1: [T, 2] int32; x [T, K] in stored order."""
    v = torch.where(x <= 0, 0, x.float()).square() * weights.stored_factors.abs()
    rest = v[:, 128:].amax(1) if v.shape[1] > 128 else torch.zeros_like(v[:, 0])
    return torch.stack([rest, v[:, :128].amax(1)], 1).view(torch.int32)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def assert_products(
    ns: Sequence[int], k: int, rows: int, unsigned: bool, plan: Plan | None = None, mma: bool = False, bits: int = 8
) -> None:
    gemms, true, ys = [], [], []
    for n in ns:
        weights, codes = random_weights(n, k)
        x, y = random_codes(rows * bits // 8, k, unsigned, bits), poisoned(rows, n)
        gemms.append(W8A8Gemm(x, weights, y[:rows]))
        true.append(wanted(x, codes, bits))
        ys.append(y)
    torch.cuda.synchronize()  # weights are read before the previous kernel ends
    multiply_by_mma(gemms, bits) if mma else multiply(gemms, plan, bits)
    torch.cuda.synchronize()
    for y, t in zip(ys, true, strict=True):
        assert t.isfinite().all()
        assert same_bits(y[:rows], t), f"{ns} x {k}, {rows} rows, {plan}: {(y[:rows] != t).sum()} of {t.numel()} differ"
        assert y[rows:].isnan().all(), "rows past the end were written"


@hopper
@pytest.mark.parametrize(("unsigned", "tile"), PLANS, ids=str)
def test_every_tile_has_the_bits_of_the_definition(unsigned: bool, tile: tuple[int, ...]) -> None:
    torch.manual_seed(hash((unsigned, *tile)) % 2**31)
    t = tile[0]
    num_sms = prepare_w8a8(GPU).num_sms
    cases = 0
    for ns, k in SHAPES:
        for rows in sorted({1, t // 2 + 1, t - 1, t, t + 1, 2 * t + 3}):
            plan = Plan(next(found for found in TILES[unsigned] if found == tile))
            if fits(plan, Launch(ns, k, unsigned, rows), num_sms):
                assert_products(ns, k, rows, unsigned, plan)
                if rows > 1:  # two rows of bytes per input
                    assert_products(ns, k, rows // 2, unsigned, plan, bits=16)
                cases += 1
    assert cases > 3


@hopper
@pytest.mark.parametrize("plan", [Plan(TILES[True][4], lead=1), Plan(TILES[False][0], ctas_per_sm=2)], ids=str)
def test_lead_and_two_ctas_per_sm(plan: Plan) -> None:
    unsigned = plan.tile in TILES[True]
    for rows in (7, 300, 961):
        assert_products((4096,), 16384 if unsigned else 4096, rows, unsigned, plan)
    assert_products((65536,), 1024, 8, unsigned, plan)


@pytest.mark.parametrize("width", [768, 1024, 2048, 2560, 4096])
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9, 31, 64, 65, 100, 129, 320, 700, 960, 1500, 4096])
def test_the_chosen_plan_has_the_bits_of_the_definition(width: int, rows: int) -> None:
    torch.manual_seed(rows * width)
    assert_products((width,), width, rows, unsigned=False)
    assert_products((width,) * 3, width, rows, unsigned=False)
    assert_products((4 * width,), width, rows, unsigned=False)
    assert_products((width,), 4 * width, rows, unsigned=True)
    assert_products((width,) * 3, width, rows, unsigned=False, bits=16)
    assert_products((width,), 4 * width, rows, unsigned=True, bits=16)


@pytest.mark.parametrize("rows", [1, 8, 9, 32, 33, 64, 65, 200])
@pytest.mark.parametrize("unsigned", [False, True])
def test_mma_has_the_bits_of_the_definition(rows: int, unsigned: bool) -> None:
    torch.manual_seed(rows)
    for ns, k in (((64,), 128), ((192, 4160, 64), 2048), ((768,), 3072), ((4096,), 16384)):
        assert_products(ns, k, rows, unsigned, mma=True)
        assert_products(ns, k, rows, unsigned, mma=True, bits=16)


@pytest.mark.parametrize("rows", [1, 8, 9, 64, 320, 700])
@pytest.mark.parametrize("width", [768, 4096])
def test_results_in_fp32_are_those_in_fp16(rows: int, width: int) -> None:
    torch.manual_seed(rows)
    linear = CudaW8A8Linear(quantise(torch.randn(2048, width, device=GPU) / 32, Format.W8A8, 3 * channels(width)))
    x = (torch.randn(rows, width, device=GPU) * channels(width)).half()
    out = torch.full((rows + 8, 2048), torch.nan, device=GPU)
    assert torch.equal(linear.to_fp32(x, out[:rows]), linear(x).float())
    assert torch.equal(linear.to_fp32(x), out[:rows])
    assert out[rows:].isnan().all()
    y = torch.empty(rows, 2048, device=GPU)
    multiply_by_mma([W8A8Gemm(quantise_inputs(x, linear.weights), linear.weights, y)])
    assert torch.equal(y, out[:rows])


@pytest.mark.parametrize("rows", [1, 8, 9, 100])
@pytest.mark.parametrize("kind", [CudaW8A8Linear, CudaW8A16Linear])
def test_a_channel_mix_has_the_same_bits_in_stored_order(rows: int, kind: type[CudaInt8Linear]) -> None:
    torch.manual_seed(rows)
    stored = [
        quantise(torch.randn(n, k, device=GPU) / 32, Format.W8A8, 3 * channels(k))
        for n, k in ((3072, 768), (768, 3072))
    ]
    key, value = kind(stored[0]), kind(stored[1], squares_inputs=True)
    x = torch.randn(rows, 768, device=GPU).half()
    hidden = key(x)
    y = value(hidden)
    key.feed(value)
    assert same_bits(key(x), hidden)
    assert same_bits(value.multiply_stored(key.multiply_codes(key.quantise(x))), y)
    cleared = prepare_w8a8(GPU).cleared_of(rows, 768)
    if cleared is not None and isinstance(value, CudaW8A8Linear):
        cleared.sums.zero_(), cleared.largest.zero_()
        assert same_bits(scaled(value.multiply_fed(key, key.quantise(x), cleared)), y)


@hopper
@pytest.mark.parametrize("rows", range(1, 9))
@pytest.mark.parametrize(("k", "n"), [(16384, 4096), (10240, 2560), (3072, 768), (128, 128)])
def test_few_rows_by_active_inputs_have_the_bits_of_the_definition(rows: int, k: int, n: int) -> None:
    torch.manual_seed(rows)
    matrix = Matrix(n, channels(k))
    transposed = matrix.weights.codes.T.contiguous()
    for share in (0.0, 0.12, 0.5, 1.0):
        sign = torch.where(torch.rand(rows, k, device=GPU) < share, 1, -1)
        x = (torch.randn(rows, k, device=GPU).abs() * sign * channels(k) / 100).half()
        if rows > 3:
            x[1], x[2], x[3, k - 1] = -x[1].abs(), x[2] * 1e-2, torch.nan
        v = x.float()
        inputs = quantise_rows(torch.where(v <= 0, 0, v).square(), matrix.transform, unsigned=True)
        in_order = x[:, matrix.weights.order.long()].contiguous()
        torch.cuda.synchronize()  # weights are read before the previous kernel ends
        for _ in range(20):
            cleared = Cleared(torch.zeros(rows, n, dtype=torch.int32, device=GPU), largest_of(in_order, matrix.weights))
            if rows > 1:
                y = scaled(multiply_sparse(in_order, matrix.weights, transposed, cleared))
            else:
                y = multiply_sparse_row(in_order, matrix.weights, transposed)
            wanted = product(inputs, matrix.codes).half()
            assert torch.equal(y.isnan(), wanted.isnan())
            assert same_bits(y.nan_to_num(7), wanted.nan_to_num(7)), f"{share}"


@pytest.mark.parametrize("k", [128, 768, 2048, 2560, 3072, 4096, 8192, 10240, 16384])
@pytest.mark.parametrize("relu_squared", [False, True])
@pytest.mark.parametrize("bits", [8, 16])
def test_inputs_have_the_bits_of_the_definition(k: int, relu_squared: bool, bits: int) -> None:
    torch.manual_seed(k)
    for rows in (1, 2, 8, 64, 333):
        sizes = channels(k)
        matrices = [Matrix(64, sizes) for _ in range(3)]
        x = torch.randn(3, rows, k, device=GPU) * sizes
        if rows > 7:
            x[:, 1] = 0
            x[:, 2, :64] *= 100
            x[:, 3] *= 1e-6
            x[:, 4] *= 1e4
            x[0, 5, 17], x[1, 6, k - 1], x[2, 7, 0] = torch.nan, torch.inf, -torch.inf
        x = x.half()
        weights = [m.weights for m in matrices]
        in_order = torch.stack([x[i][:, w.order.long()] for i, w in enumerate(weights)])
        for got in (
            quantise_mixed(x, weights, relu_squared, bits=bits),
            quantise_mixed(in_order, weights, relu_squared, in_order=True, bits=bits),
        ):
            for i, m in enumerate(matrices):
                v = x[i].float()
                v = torch.where(v <= 0, 0, v).square() if relu_squared else v
                true = quantise_rows(v, m.transform, relu_squared, bits)
                assert torch.equal(got[i].codes, m.stored(true.codes))
                assert torch.equal(got[i].ratios[: len(true.codes)], true.ratios)
                assert torch.equal(got[i].scales[: len(true.codes)].nan_to_num(-1), true.scales.nan_to_num(-1))


@pytest.mark.parametrize("outliers", [1, 20, 100])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(outliers: float) -> None:
    """Inputs and products together; both are exact, so the row's place does not matter."""
    torch.manual_seed(7)
    sizes = torch.ones(2048, device=GPU)
    sizes[torch.randperm(2048)[:8]] = outliers
    key, value = Matrix(8192, sizes), Matrix(2048, torch.full((8192,), float(outliers), device=GPU))
    x = (torch.randn(1200, 2048, device=GPU) * sizes).half()

    def channel_mix(rows: Tensor) -> Tensor:
        hidden, y = rows.new_empty(len(rows), 8192), rows.new_empty(len(rows), 2048)
        multiply([W8A8Gemm(quantise_inputs(rows, key.weights), key.weights, hidden)])
        multiply([W8A8Gemm(quantise_inputs(hidden, value.weights, relu_squared=True), value.weights, y)])
        return y

    torch.cuda.synchronize()
    together = channel_mix(x)
    hidden = product(quantise_rows(x[:9], key.transform), key.codes).half().float()
    true = product(quantise_rows(hidden.relu().square(), value.transform, unsigned=True), value.codes).half()
    assert same_bits(together[:9], true)
    for start, count in ((0, 1), (1199, 1), (3, 8), (700, 33), (17, 64), (100, 128), (50, 321), (5, 960)):
        assert same_bits(channel_mix(x[start : start + count].contiguous()), together[start : start + count])


def test_graphs_of_several_streams_give_the_same_bits() -> None:
    """Captured on streams of their own and replayed in turn many times: counters need no reset between launches."""
    torch.manual_seed(3)
    cases = []
    for ns, k, rows, unsigned in (
        ((4096,), 4096, 1, False),
        ((4096,), 16384, 64, True),
        ((4096,), 16384, 128, True),
        ((4096,) * 3, 4096, 8, False),
    ):
        pairs = [random_weights(n, k) for n in ns]
        gemms = [
            W8A8Gemm(random_codes(rows, k, unsigned), weights, poisoned(rows, n)[:rows])
            for (weights, _), n in zip(pairs, ns, strict=True)
        ]
        cases.append((gemms, [wanted(gemm.x, codes) for gemm, (_, codes) in zip(gemms, pairs, strict=True)]))
    prepare_w8a8(GPU)
    graphs = []
    for gemms, _ in cases:
        multiply(gemms)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            for _ in range(3):
                multiply(gemms)
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in range(2)]
    done: torch.cuda.Event | None = None
    for _ in range(20):
        for i, (graph, (gemms, _)) in enumerate(zip(graphs, cases, strict=True)):
            with torch.cuda.stream(streams[i % 2]):
                if done is not None:
                    streams[i % 2].wait_event(done)  # launches share the workspace: one after the other
                for gemm in gemms:
                    gemm.y.fill_(torch.nan)
                graph.replay()
                done = streams[i % 2].record_event()
    torch.cuda.synchronize()
    for gemms, true in cases:
        for gemm, y in zip(gemms, true, strict=True):
            assert same_bits(gemm.y, y)


def step(lengths: list[int], adapted: bool) -> StepInputs:
    """A step's inputs; rows with adapters are mixed to fp16."""
    ends = torch.tensor([0, *lengths], device=GPU).cumsum(0)
    slots = torch.arange(2, 2 + len(lengths), device=GPU)
    inputs = StepInputs(torch.zeros(sum(lengths), dtype=torch.int64, device=GPU), ends, slots, slots, ends[1:] - 1, 1)
    inputs.max_seqlen = max(lengths)
    inputs.adapters = torch.zeros(sum(lengths), dtype=torch.int64) if adapted else None
    return inputs


@pytest.mark.parametrize("width", [768, 2560, 4096])
@pytest.mark.parametrize("mixes", [6, 1])
def test_the_mix_writes_the_bits_that_a_separate_kernel_makes(width: int, mixes: int) -> None:
    """One row (elsewhere than on Hopper), a CTA per SM, many rows, prompts; a row with NaN among them."""
    ops = CudaOps()
    ops.prepare_device(GPU, width, 4 * width)
    torch.manual_seed(width)
    norm = Norm(channels(width), torch.randn(width, device=GPU) / 8)
    stored = [quantise(torch.randn(64, width, device=GPU), Format.W8A8, 3 * norm.weight) for _ in "rkv"]
    maps = [CudaW8A8Linear(of_map) for of_map in stored[: 3 if mixes == 6 else 1]]
    prologue = Prologue(norm, torch.rand(mixes, width, device=GPU).half(), maps[0], tuple(maps[1:]))
    for lengths in ([1], [1] * 8, [1] * 64, [1] * 320, [300, 1, 77], [2000]):
        if lengths == [1] and maps[0].takes_one_row:
            continue
        tokens = sum(lengths)
        x, shift = (
            torch.randn(tokens, width, device=GPU).half(),
            torch.randn(len(lengths) + 2, width, device=GPU).half(),
        )
        x[0], x[tokens // 2] = 1000 * x[0], 0
        if tokens > 4:
            x[1, 5] = torch.nan
        results = []
        for adapted in (False, True):
            after = shift.clone()
            out, mixed = ops.shift_mix(x, x.flip(0), prologue, after, step(lengths, adapted))
            results.append((out, mixed, after))
        (out, mixed, after), (out_plain, halves, after_plain) = results
        assert isinstance(mixed, W8A8Mix) and isinstance(halves, Tensor)
        assert torch.equal(out.nan_to_num(7), out_plain.nan_to_num(7))
        assert torch.equal(after.nan_to_num(7), after_plain.nan_to_num(7))
        assert mixes == 1 or torch.equal(mixed.fp16.nan_to_num(7), halves[2:].nan_to_num(7))
        wanted = quantise_mixed(halves[: len(maps)], [linear.weights for linear in maps])
        for i, true in enumerate(wanted):
            assert torch.equal(mixed[i].codes, true.codes), f"mix {i}, {lengths}"
            assert torch.equal(mixed[i].ratios[:tokens], true.ratios[:tokens])
            assert torch.equal(mixed[i].scales[:tokens].nan_to_num(7), true.scales[:tokens].nan_to_num(7))


def test_no_rows_and_wrong_shapes() -> None:
    matrix = Matrix(64, channels(256))
    multiply(
        [
            W8A8Gemm(
                quantise_inputs(torch.empty(0, 256, device=GPU).half(), matrix.weights),
                matrix.weights,
                poisoned(-8, 64),
            )
        ]
    )
    x = quantise_inputs(torch.randn(3, 256, device=GPU).half(), matrix.weights)
    with pytest.raises(ValueError, match="do not fit"):
        multiply([W8A8Gemm(x, matrix.weights, torch.empty(3, 128, device=GPU).half())])
    with pytest.raises(ValueError, match="do not fit"):
        quantise_inputs(torch.randn(3, 384, device=GPU).half(), matrix.weights)
    with pytest.raises(ValueError, match="takes 3"):
        multiply([W8A8Gemm(x, matrix.weights, torch.empty(3, 64, device=GPU).half())] * 4)
