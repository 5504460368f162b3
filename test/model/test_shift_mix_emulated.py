"""What enters a half layer as fp8 codes: the kernel that mixes and quantises, run thread by thread on the CPU."""

from __future__ import annotations

import ctypes
import sys
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cuda import packed_weights, quantised_rows, skinny_quant
from rwkv_batch.kernels.cuda import shift_mix as cuda_shift_mix
from rwkv_batch.kernels.cuda.linear import Gemm
from rwkv_batch.kernels.cuda.ops import CudaOps
from rwkv_batch.kernels.cuda.quant_linear import CudaQuantLinear
from rwkv_batch.kernels.cuda.quantised_rows import (
    DeferredMix,
    PartialSums,
    QuantisedMix,
    RowSums,
    SingleRowInput,
    quantise_rows,
)
from rwkv_batch.kernels.cuda.skinny_quant import QuantGemm, multiply_few
from rwkv_batch.kernels.cuda.w8a8 import linear
from rwkv_batch.kernels.cuda.w8a8.linear import CudaW8A8Linear
from rwkv_batch.kernels.cuda.w8a8.products import ExactSums, W8A8Mix, W8A8Workspace
from rwkv_batch.kernels.cuda.workspace import Workspace
from rwkv_batch.kernels.naive import NaiveOps
from rwkv_batch.model.layer import Norm, Prologue
from rwkv_batch.model.quant.formats import Format, quantise
from rwkv_batch.model.quant.w8a8 import InputTransform
from rwkv_batch.model.quant.w8a8 import quantise_rows as quantise_rows_w8a8
from rwkv_batch.model.step_inputs import CONTINUES, StepInputs, rows_of_tokens
from test.model.emulated.library import emulated, error, needs_headers, send_launches_to

pytestmark = [pytest.mark.slow, needs_headers]

CPU = torch.device("cpu")
SOURCES = ("shift_mix", "quantise", "skinny_quant")
WIDTH = 384
"""Less than whole warps of threads have."""
both_halves = pytest.mark.parametrize("mixes", [6, 1])
all_lengths = pytest.mark.parametrize(
    "lengths", [[1] * 20, [1] * 3, [9, 1, 14]], ids=["many rows", "a processor a row", "prompts"]
)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> list[ctypes.CDLL]:
    """The sources, for the CPU."""
    return [emulated(name, tmp_path_factory.mktemp(name)) for name in SOURCES]


@pytest.fixture
def ops(libraries: list[ctypes.CDLL], monkeypatch: pytest.MonkeyPatch) -> CudaOps:
    """Its kernels on the CPU, of a GPU that multiplies fp8 codes."""

    def library_of(name: str) -> ctypes.CDLL:
        known = {"rwkv_two_part_rows": "quantise", "rwkv_add_partials": "shift_mix", "rwkv_add_exact_sums": "shift_mix"}
        source = known.get(name) or name.removeprefix("rwkv_").removesuffix("_rows")
        return libraries[SOURCES.index(source)]

    send_launches_to(library_of, monkeypatch, cuda_shift_mix, skinny_quant, quantised_rows)
    monkeypatch.setattr(packed_weights, "scaled_mm_dtypes", lambda device: (torch.float16,))
    monkeypatch.setattr(packed_weights, "fits_weight_only", lambda *args: False)
    unused, counter = torch.empty(0), torch.zeros(1, dtype=torch.int32)
    use_w8a8(monkeypatch, unused)
    found = CudaOps()
    found.workspaces[CPU] = Workspace(unused, unused, counter, torch.zeros(8, WIDTH // 8, dtype=torch.int64), 4)
    use_processors(found, libraries, 4)
    return found


def use_processors(ops: CudaOps, libraries: list[ctypes.CDLL], count: int) -> None:
    for library in libraries:
        library.emulation_set(count, 227 << 10)
    ops.workspaces[CPU].num_sms = count


def use_w8a8(monkeypatch: pytest.MonkeyPatch, sums: Tensor) -> None:
    work = W8A8Workspace(torch.empty(0), torch.empty(0), 4, sums)
    for module in (linear, cuda_shift_mix):
        monkeypatch.setattr(module, "prepare_w8a8", lambda device: work)


def prologue(mixes: int) -> Prologue:
    norm = Norm(torch.rand(WIDTH) + 0.5, torch.randn(WIDTH) / 8)
    consumer = CudaQuantLinear(quantise(torch.randn(32, 128), Format.FP8))
    return Prologue(norm, torch.rand(mixes, WIDTH).half(), consumer)


def step(lengths: list[int]) -> StepInputs:
    ends = torch.tensor([0, *lengths]).cumsum(0)
    slots = torch.arange(2, 2 + len(lengths))
    return StepInputs(torch.zeros(int(ends[-1])), ends, slots, slots, ends[1:] - 1, max(lengths))


def run(
    ops: CudaOps, of: Prologue, x: Tensor, shift: Tensor, inputs: StepInputs
) -> tuple[Tensor, QuantisedMix, Tensor]:
    after = shift.clone()
    out, mixed = ops.shift_mix(x, x.flip(0), of, after, inputs)
    assert isinstance(mixed, QuantisedMix)
    return out, mixed, after


class Made(NamedTuple):
    """A step's mixed inputs, as quantised rows and as halves. Rows with adapters need the halves."""

    x: Tensor
    shift: Tensor
    of: Prologue
    inputs: StepInputs
    mixed: QuantisedMix
    halves: Tensor

    @property
    def consumer(self) -> CudaQuantLinear:
        """The map that reads them."""
        assert isinstance(self.of.consumer, CudaQuantLinear)
        return self.of.consumer


def with_fp16_rows(ops: CudaOps, lengths: list[int], mixes: int) -> Made:
    """Of random rows, one large and one zero; what else the kernel writes is the same both ways."""
    inputs, of = step(lengths), prologue(mixes)
    tokens = len(inputs.tokens)
    x, shift = torch.randn(tokens, WIDTH).half(), torch.randn(len(lengths) + 2, WIDTH).half()
    x[0], x[tokens // 2] = 1000 * x[0], 0.0
    out, mixed, after = run(ops, of, x, shift, inputs)
    inputs.adapters = torch.zeros(tokens, dtype=torch.int64)
    plain = shift.clone()
    out_plain, halves = ops.shift_mix(x, x.flip(0), of, plain, inputs)
    assert isinstance(halves, Tensor)
    assert torch.equal(out, out_plain)
    assert torch.equal(after, plain)
    if mixes == 6:
        assert torch.equal(mixed.fp16, halves[2:])
    return Made(x, shift, of, inputs, mixed, halves)


@pytest.mark.parametrize("sms", [4, 30], ids=["four tokens at a time", "a processor a token"])
def test_rows_that_continue_others(ops: CudaOps, libraries: list[ctypes.CDLL], sms: int) -> None:
    """As one row of all their tokens; each writes its slot."""
    use_processors(ops, libraries, sms)
    lengths, of = [5, 8, 1, 4, 6], prologue(6)
    tokens, first = sum(lengths), lengths[0]
    x, shift = torch.randn(tokens, WIDTH).half(), torch.randn(len(lengths) + 2, WIDTH).half()
    whole, parts = step([first, tokens - first]), step(lengths)
    parts.read_slots = torch.tensor([2, 3, CONTINUES, CONTINUES, CONTINUES])
    parts.write_slots = torch.tensor([2, 4, 5, 6, 3])
    out, mixed, after = run(ops, of, x, shift, parts)
    expected_out, expected, expected_after = run(ops, of, x, shift, whole)
    assert torch.equal(out, expected_out)
    assert torch.equal(mixed.fp16, expected.fp16)
    assert torch.equal(mixed.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(after[[2, 3]], expected_after[[2, 3]])
    parts.token_rows = rows_of_tokens(parts.cu_seqlens, tokens)  # read before the kernel in front ends
    out, staged, after = run(ops, of, x, shift, parts)
    assert torch.equal(out, expected_out)
    assert torch.equal(staged.fp16, expected.fp16)
    assert torch.equal(after[[2, 3]], expected_after[[2, 3]])
    parts.read_slots = torch.zeros(len(lengths), dtype=torch.int64)
    assert torch.equal(after, run(ops, of, x, shift, parts)[2])


@all_lengths
@both_halves
def test_adds_shares(ops: CudaOps, monkeypatch: pytest.MonkeyPatch, lengths: list[int], mixes: int) -> None:
    """As the sum rounded, to the bit; as halves and in parts."""
    inputs, of = step(lengths), prologue(mixes)
    tokens = len(inputs.tokens)
    x, shift = torch.randn(tokens, WIDTH).half(), torch.randn(len(lengths) + 2, WIDTH).half()
    for count, in_parts in ((4, False), (2, True), (4, True)):
        monkeypatch.setattr(CudaQuantLinear, "takes_two_part_rows", lambda linear, rows, in_parts=in_parts: in_parts)
        monkeypatch.setattr(CudaQuantLinear, "takes_fp8_rows", lambda linear, rows: False)
        shares = torch.randn(count, tokens, WIDTH)
        total = shares[0]
        for share in shares[1:]:
            total = total + share
        after = [shift.clone(), shift.clone()]
        out, mixed = ops.shift_mix(x, total.half(), of, after[0], inputs)
        out_of_shares, mixed_of_shares = ops.shift_mix(x, PartialSums(shares), of, after[1], inputs)
        assert torch.equal(out, out_of_shares)
        assert torch.equal(out, ops.add(x, PartialSums(shares)))
        assert torch.equal(*after)
        if in_parts:
            assert torch.equal(mixed.codes.view(torch.uint8), mixed_of_shares.codes.view(torch.uint8))
            mixed, mixed_of_shares = mixed.fp16, mixed_of_shares.fp16
        assert torch.equal(mixed, mixed_of_shares)


@all_lengths
@both_halves
def test_codes_are_those_of_the_halves(
    ops: CudaOps, monkeypatch: pytest.MonkeyPatch, lengths: list[int], mixes: int
) -> None:
    monkeypatch.setitem(quantised_rows.SKINNY_ROWS, Format.FP8, 2)
    made = with_fp16_rows(ops, lengths, mixes)
    mixed, halves, of, inputs = made.mixed, made.halves, made.of, made.inputs
    for i in range(3 if mixes == 6 else 1):
        expected = quantise_rows(halves[i])
        assert torch.equal(mixed[i].codes.view(torch.uint8), expected.codes.view(torch.uint8)), i
        assert torch.equal(mixed[i].scales, expected.scales), i
    reference = Prologue(of.norm, of.mix.float(), of.consumer)
    _, meant = NaiveOps().shift_mix(made.x.float(), made.x.flip(0).float(), reference, made.shift.float(), inputs)
    assert error(halves, meant) < 1e-3


@all_lengths
@both_halves
def test_parts_add_up_to_the_halves(
    ops: CudaOps, monkeypatch: pytest.MonkeyPatch, lengths: list[int], mixes: int
) -> None:
    monkeypatch.setattr(CudaQuantLinear, "takes_two_part_rows", lambda linear, rows: True)
    made = with_fp16_rows(ops, lengths, mixes)
    mixed, halves = made.mixed, made.halves
    for i in range(3 if mixes == 6 else 1):
        parts, scales = mixed[i]
        first = halves[i].to(torch.float8_e5m2)
        second = ((halves[i] - first.half()) * 8).to(torch.float8_e5m2)
        assert scales is None
        assert torch.equal(parts.view(torch.uint8), torch.stack([first, second], dim=1).view(torch.uint8))
        alone = made.consumer.to_two_part_rows(halves[i])
        assert torch.equal(alone.codes.view(torch.uint8), parts.view(torch.uint8)), "as adapters' rows"


def w8a8_prologue(mixes: int) -> Prologue:
    """A prologue whose maps have large channels of their own."""
    norm = Norm(torch.rand(WIDTH) + 0.5, torch.randn(WIDTH) / 8)
    norm.weight[::16] *= 30
    stored = [
        quantise(torch.randn(64, WIDTH), Format.W8A8, 3 * norm.weight * (torch.rand(WIDTH) + 0.1)) for _ in range(3)
    ]
    maps = [CudaW8A8Linear(of_map) for of_map in stored[: 3 if mixes == 6 else 1]]
    return Prologue(norm, torch.rand(mixes, WIDTH).half(), maps[0], tuple(maps[1:]))


@pytest.mark.parametrize(
    ("lengths", "width"),
    [([1] * 20, WIDTH), ([1] * 3, WIDTH), ([1], WIDTH), ([9, 1, 14], WIDTH), ([9, 1, 14], 512), ([1] * 19, 512)],
    ids=["many", "a processor a row", "one", "prompts", "prompts in whole warps", "many in whole warps"],
)
@both_halves
def test_rows_in_8_bits_have_the_bits_of_the_definition(
    ops: CudaOps,
    monkeypatch: pytest.MonkeyPatch,
    lengths: list[int],
    width: int,
    mixes: int,
) -> None:
    """Rounded after the mix is rounded to fp16, which adapters read; a row with NaN has a NaN scale."""
    monkeypatch.setattr(sys.modules[__name__], "WIDTH", width)
    inputs, of = step(lengths), w8a8_prologue(mixes)
    tokens = len(inputs.tokens)
    x, shift = torch.randn(tokens, WIDTH).half(), torch.randn(len(lengths) + 2, WIDTH).half()
    x[0], x[tokens // 2] = 1000 * x[0], 0.0
    if tokens > 2:
        x[1, 5] = torch.nan
    after, plain = shift.clone(), shift.clone()
    out, mixed = ops.shift_mix(x, x.flip(0), of, after, inputs)
    assert isinstance(mixed, W8A8Mix)
    inputs.adapters = torch.zeros(tokens, dtype=torch.int64)
    out_plain, halves = ops.shift_mix(x, x.flip(0), of, plain, inputs)
    assert torch.equal(out.nan_to_num(7), out_plain.nan_to_num(7))
    assert torch.equal(after.nan_to_num(7), plain.nan_to_num(7))
    if mixes == 6:
        assert torch.equal(mixed.fp16.nan_to_num(7), halves[2:].nan_to_num(7))
    for i, consumer in enumerate((of.consumer, *of.others)):
        assert isinstance(consumer, CudaW8A8Linear)
        transform = InputTransform(consumer.weights.stored_factors.abs(), torch.arange(WIDTH))
        expected = quantise_rows_w8a8(halves[i][:, consumer.weights.order.long()], transform)
        actual = mixed[i]
        assert tokens < 4 or (expected.ratios > 20).any(), "segment 1 is larger in some rows"
        assert torch.equal(actual.codes, expected.codes)
        assert torch.equal(actual.ratios[:tokens], expected.ratios)
        assert torch.equal(actual.scales[:tokens].nan_to_num(7), expected.scales.nan_to_num(7))


@pytest.mark.parametrize("lengths", [[1] * 3, [2, 1]], ids=["decode", "ragged"])
@both_halves
def test_exact_sums_have_the_bits_of_a_delta_in_fp16(
    ops: CudaOps, monkeypatch: pytest.MonkeyPatch, lengths: list[int], mixes: int
) -> None:
    """The start of a channel mix clears what its launches add to, of the step's tokens."""
    tokens = sum(lengths)
    cleared = torch.full((tokens * (WIDTH + 2) + 8,), 7, dtype=torch.int32)
    use_w8a8(monkeypatch, cleared)
    inputs, of = step(lengths), w8a8_prologue(mixes)
    x, shift = torch.randn(tokens, WIDTH).half(), torch.randn(len(lengths) + 2, WIDTH).half()
    sums = torch.randint(-(2**30), 2**30, (tokens, WIDTH), dtype=torch.int32)
    delta = ExactSums(sums, torch.rand(tokens) * 1e-8, torch.rand(WIDTH))
    y = (sums.float() * (delta.row_scales[:, None] * delta.output_scales)).half()
    plain, after, read = shift.clone(), shift.clone(), sums.clone()
    out, mixed = ops.shift_mix(x, y, of, plain, inputs)
    cleared.fill_(7)
    out_of_sums, mixed_of_sums = ops.shift_mix(x, delta, of, after, inputs)
    assert torch.equal(out, out_of_sums) and torch.equal(plain, after) and torch.equal(sums, read)
    assert torch.equal(out, ops.add(x, delta))
    assert isinstance(mixed, W8A8Mix) and isinstance(mixed_of_sums, W8A8Mix)
    assert torch.equal(mixed.codes.codes, mixed_of_sums.codes.codes)
    assert (cleared[tokens * (WIDTH + 2) :] == 7).all()
    assert (cleared[: tokens * (WIDTH + 2)] == (0 if mixes == 1 else 7)).all()


@pytest.mark.parametrize("format_", [None, Format.FP8, Format.INT4, Format.W8A8])
@both_halves
def test_prompts_of_a_processor_a_token_have_the_bits_of_longer_ones(
    ops: CudaOps, libraries: list[ctypes.CDLL], monkeypatch: pytest.MonkeyPatch, mixes: int, format_: Format | None
) -> None:
    """In slots that are read and written, and in others; INT4 stands for rows in two parts, None for halves."""
    monkeypatch.setattr(CudaQuantLinear, "takes_two_part_rows", lambda linear, rows: format_ is Format.INT4)
    of = w8a8_prologue(mixes) if format_ is Format.W8A8 else prologue(mixes)
    lengths = [9, 1, 14, 2]
    x, delta, shift = torch.randn(26, WIDTH).half(), torch.randn(26, WIDTH).half(), torch.randn(10, WIDTH).half()
    for first, others in ((2, 2), (2, 6)):
        made = []
        for num_sms in (4, 26):
            use_processors(ops, libraries, num_sms)
            inputs, after = step(lengths), shift.clone()
            inputs.read_slots, inputs.write_slots = torch.arange(first, first + 4), torch.arange(others, others + 4)
            if format_ is None:
                inputs.adapters = torch.zeros(26, dtype=torch.int64)
            out, mixed = ops.shift_mix(x, delta, of, after, inputs)
            parts = [mixed[i] for i in range(3 if mixes == 6 else 1)]
            if format_ is not None:
                parts = [tensor[:26].view(torch.uint8) for part in parts for tensor in part if tensor is not None]
                parts.append(mixed.fp16)  # type: ignore[union-attr]
            made.append([out, after, *parts])
        for one, other in zip(*made, strict=True):
            assert torch.equal(one, other)


def test_few_rows_enter_as_halves(ops: CudaOps) -> None:
    x = torch.randn(5, WIDTH).half()
    _, mixed = ops.shift_mix(x, None, prologue(6), torch.zeros(7, WIDTH).half(), step([1] * 5))
    assert isinstance(mixed, Tensor)


def sums_of(delta: Tensor) -> Tensor:
    """[1, C] as kernels add it up (csrc/fixed_point_sums.cuh)."""
    return (delta.double() * 2.0**32).round().long().view(-1, 8).T.contiguous()


@both_halves
def test_sums_of_a_row_are_a_delta(ops: CudaOps, monkeypatch: pytest.MonkeyPatch, mixes: int) -> None:
    """To the bit; before the launch that adds to them again they are zeros, whatever was in them."""
    monkeypatch.setattr(cuda_shift_mix, "fits_row_value", lambda key, processors: True)
    monkeypatch.setattr(cuda_shift_mix, "_defers_mix", lambda prologue: False)
    of = prologue(mixes)
    of = Prologue(of.norm, of.mix, CudaQuantLinear(quantise(torch.randn(32, 256), Format.INT4)))
    x, shift = torch.randn(1, WIDTH).half(), torch.randn(3, WIDTH).half()
    delta = torch.randn(1, WIDTH) * torch.tensor([1e-5, 1.0, 1000.0, -8000.0]).repeat(WIDTH // 4)
    plain, after = shift.clone(), shift.clone()
    out, mixed = ops.shift_mix(x, delta.half(), of, plain, step([1]))
    kept = ops.workspaces[CPU].row_sums
    kept.copy_(sums_of(delta))
    out_of_sums, mixed_of_sums = ops.shift_mix(x, RowSums(kept), of, after, step([1]))
    assert torch.equal(out_of_sums, out)
    assert torch.equal(after, plain)
    if mixes == 6:
        assert torch.equal(mixed_of_sums, mixed)
        assert torch.equal(kept, sums_of(delta)), "read only"
        return
    (row,) = mixed_of_sums
    assert isinstance(row, SingleRowInput)
    assert torch.equal(row.x, mixed[0].x)
    assert row.added.data_ptr() == kept.data_ptr()
    assert not kept.any()


def test_sums_are_of_one_row(ops: CudaOps) -> None:
    sums = RowSums(ops.workspaces[CPU].row_sums)
    x = torch.randn(2, WIDTH).half()
    with pytest.raises(AssertionError, match="rwkv_shift_mix is refused"):
        ops.shift_mix(x, sums, prologue(6), torch.zeros(4, WIDTH).half(), step([1, 1]))


@pytest.mark.parametrize("width", [2304, 512])
def test_the_launch_of_the_maps_of_one_row_mixes_it_alike(
    ops: CudaOps, libraries: list[ctypes.CDLL], width: int
) -> None:
    """To the bit, in a slot that is read and written; of two rows shift_mix makes it."""
    use_processors(ops, libraries, 3)
    consumer = CudaQuantLinear(quantise(torch.randn(96, width) / width**0.5, Format.FP8))
    norm = Norm(torch.rand(width) + 0.5, torch.randn(width) / 8)
    of = Prologue(norm, torch.rand(6, width).half(), consumer)
    x, delta, shift = torch.randn(2, width).half(), torch.randn(2, width).half(), torch.randn(4, width).half()
    low = torch.randn(32, width).half() / width**0.5
    after = shift.clone()
    out, mixed = ops.shift_mix(x, delta, of, after, step([1, 1]))
    alone = shift.clone()
    inputs = step([1])
    out_alone, row = ops.shift_mix(x[:1], delta[:1], of, alone, inputs)
    assert isinstance(mixed, Tensor)
    assert isinstance(row, DeferredMix)
    results = []
    for given, args in ((mixed, None), (row.mix, row.args)):
        rows = given.shape[1]
        y, z = torch.full((rows, 96), torch.nan).half(), torch.full((rows, 32), torch.nan).half()
        multiply_few([QuantGemm(consumer, given[1], y)], [Gemm(low, given[3], z, Activation.TANH)], args)
        results.append((y[0], z[0]))
    assert torch.equal(out_alone[0], out[0])
    assert torch.equal(alone[2], after[2])
    assert torch.equal(alone[3], shift[3])
    for one, both in zip(*results, strict=True):
        assert torch.equal(one, both)
    assert ops.workspaces[CPU].mix_counter.item() == 0


@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.usefixtures("ops")
def test_a_row_without_numbers_stays_so_in_codes(squares: bool) -> None:
    halves = torch.randn(3, WIDTH).half()
    halves[1, 70] = torch.nan
    made = quantise_rows(halves, relu_square=squares)
    assert made.scales is not None
    meant = made.codes.float() * made.scales.unsqueeze(1)
    assert meant.isnan().any(1).tolist() == [False, True, False]
    assert not squares or (meant[::2] >= 0).all()
