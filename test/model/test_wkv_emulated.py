"""The WKV of rows of one token, against plain torch.

Of few rows with the low ranks' exits, of states of all forms; of any rows, of states of 8 bits.
The CPU runs the kernels thread by thread.
"""

from __future__ import annotations

import ctypes
from ctypes import byref
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rwkv_batch.kernels.cuda.library import LowRankUpArgs, WkvArgs
from rwkv_batch.kernels.naive import NaiveOps
from rwkv_batch.model.layer import Projections
from rwkv_batch.model.state import pack_int8, unpack_int8
from rwkv_batch.model.step_inputs import CONTINUES, StepInputs
from test.model.emulated.library import call, emulation_of, error, needs_headers

pytestmark = [pytest.mark.slow, needs_headers]
HEADS, RANK, GATE_RANK = 2, 128, 192
WIDTH = 64 * HEADS


library = emulation_of("wkv_few")
"""The kernel of few rows on the CPU."""


decode = emulation_of("wkv_decode")
"""The kernel of any rows."""


sequence = emulation_of("wkv_sequence")
"""The kernel of prompts that has the bits of `decode`."""


chunks = emulation_of("wkv_chunk")
"""The fast kernel of prompts."""


def make_layer() -> Any:
    """The constants of a time mix and its low ranks' exits."""
    vectors = {name: torch.randn(WIDTH) for name in ("w0", "a0", "k_k", "k_a")}
    ln_x = SimpleNamespace(weight=torch.randn(WIDTH), bias=torch.randn(WIDTH))
    low_out, gate_out = torch.randn(3, WIDTH, RANK).half() / 11, torch.randn(WIDTH, GATE_RANK).half() / 14
    residual = SimpleNamespace(v0=torch.randn(WIDTH))
    return SimpleNamespace(
        **vectors, r_k=torch.randn(HEADS, 64), ln_x=ln_x, v_residual=residual, low_out=low_out, gate_out=gate_out
    )


def make_args(layer: Any, given: dict[str, Tensor], wkv: Tensor, slots: tuple[Tensor, Tensor], y: Tensor) -> WkvArgs:
    """All but what `given` does not have."""
    at = lambda tensor: None if tensor is None else tensor.data_ptr()  # noqa: E731
    return WkvArgs(
        **{name: at(given.get(name)) for name in ("r", "w", "k", "v", "a", "g", "v_gate")},
        v_first=at(given.get("first")),
        **{name: at(getattr(layer, name)) for name in ("w0", "a0", "k_k", "k_a", "r_k")},
        v0=at(layer.v_residual.v0),
        ln_weight=at(layer.ln_x.weight),
        ln_bias=at(layer.ln_x.bias),
        y=at(y),
        state=at(wkv),
        read_slots=at(slots[0]),
        write_slots=at(slots[1]),
        slot_stride=wkv.stride(0),
        rows=len(given["r"]),
        heads=HEADS,
    )


def run(
    library: ctypes.CDLL, layer: Any, given: dict[str, Tensor], wkv: Tensor, slots: tuple[Tensor, Tensor]
) -> Tensor:
    """y [rows, WIDTH]; wkv is updated. Without `first` the layer is the model's first."""
    y = torch.full((len(given["r"]), WIDTH), torch.nan).half()
    args = make_args(layer, given, wkv, slots, y)
    skipped = 0 if "first" in given else 1
    low, low_out = given["low"][skipped:].contiguous(), layer.low_out[skipped:].contiguous()
    addresses = (tensor.data_ptr() for tensor in (low, given["gate"], low_out, layer.gate_out))
    up_weights = LowRankUpArgs(*addresses, 3 - skipped, RANK, GATE_RANK, len(given["r"]) != 5)
    call(library, "rwkv_wkv_few", byref(args), byref(up_weights), wkv.element_size())
    return y


def run_decode(
    library: ctypes.CDLL,
    layer: Any,
    given: dict[str, Tensor],
    wkv: Tensor,
    slots: tuple[Tensor, Tensor],
    form: torch.dtype = torch.float16,
) -> Tensor:
    """As run, with the exits multiplied before.

    form: fp16; float8_e5m2 for y in two parts, [rows, 2, WIDTH]
    """
    rows = len(given["r"])
    y = torch.full((rows, WIDTH), torch.nan).half()
    given = given | {n: x.half() for n, x in zip(("v_gate", "w", "a", "g"), exits_of(layer, given), strict=True)}
    args = make_args(layer, given, wkv, slots, y)
    if form is not torch.float16:
        y = torch.full((rows, 2, WIDTH), 77).to(form)
        args.y, args.y_two_part = None, y.data_ptr()
    call(library, "rwkv_wkv_decode", byref(args), wkv.element_size())
    return y


def exits_of(layer: Any, given: dict[str, Tensor]) -> list[Tensor]:
    """v's gate, w, a and g, [rows, WIDTH] fp32 each."""
    low = [x.float() @ out.float().T for x, out in zip(given["low"], layer.low_out, strict=True)]
    return [*low, given["gate"].float() @ layer.gate_out.float().T]


def reference(layer: Any, given: dict[str, Tensor], wkv: Tensor, slots: tuple[Tensor, Tensor]) -> Tensor:
    """The same in fp32."""
    rows, first = len(given["r"]), given.get("first")
    gate, w, a, g = exits_of(layer, given)
    p = Projections(*(x.float() for x in (given["r"], w, given["k"], given["v"], a, g)), v_gate=gate)
    if first is None:
        layer = SimpleNamespace(**{**vars(layer), "v_residual": None})
    inputs = StepInputs(slots[0][:0], torch.arange(rows + 1), *slots, slots[0], 1)
    return NaiveOps().time_mix(layer, p, None if first is None else first.float(), wkv, inputs)[0]


def make_inputs(rows: int, first_layer: bool) -> dict[str, Tensor]:
    given = {name: torch.randn(rows, WIDTH).half() for name in ("r", "k", "v", "first")}
    if first_layer:
        del given["first"]
    return given | {"low": torch.randn(3, rows, RANK).half(), "gate": torch.rand(rows, GATE_RANK).half()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "first_layer"), [(1, False), (1, True), (5, False)])
def test_a_step(library: ctypes.CDLL, rows: int, first_layer: bool, dtype: torch.dtype) -> None:
    layer, given = make_layer(), make_inputs(rows, first_layer)
    state = 0.3 * torch.randn(2 * rows, HEADS, 64, 64)
    slots = torch.arange(rows), torch.arange(rows).flip(0) + rows
    wkv, expected = state.to(dtype), state.to(dtype).float()
    kept = wkv[:rows].clone()
    y, wanted_y = run(library, layer, given, wkv, slots), reference(layer, given, expected, slots)
    assert error(y, wanted_y) < 2e-3
    assert error(wkv, expected) < 1e-3
    assert torch.equal(wkv[:rows], kept)


@pytest.mark.parametrize(
    ("kernel", "dtype", "rows"), [("few", torch.float16, 8), ("few", torch.uint8, 4), ("decode", torch.uint8, 9)]
)
def test_a_row_has_the_same_bits_alone_and_in_company(
    library: ctypes.CDLL, decode: ctypes.CDLL, kernel: str, dtype: torch.dtype, rows: int
) -> None:
    layer, given = make_layer(), make_inputs(rows, False)
    state = 0.3 * torch.randn(2 * rows, HEADS, 64, 64)
    state = pack_int8(state) if dtype is torch.uint8 else state.to(dtype)
    slots = torch.arange(rows), torch.arange(rows) + rows
    together = state.clone()
    step = partial(run, library, layer) if kernel == "few" else partial(run_decode, decode, layer)
    y = step(given, together, slots)
    row = rows - 2
    mine = slice(row, row + 1)
    alone = {name: (x[:, mine] if name == "low" else x[mine]).contiguous() for name, x in given.items()}
    assert torch.equal(step(alone, state, (slots[0][mine], slots[1][mine])), y[mine])
    assert torch.equal(state[rows + row], together[rows + row])


def coded_slots(rows: int) -> tuple[Tensor, Tensor]:
    """Return states of 8 bits, and the same states as fp32.

    The states of 8 bits are [2 * rows + 1, HEADS, 4224]. Their values have many sizes, and the first state is all zero.
    """
    state = torch.randn(2 * rows + 1, HEADS, 64, 64) * torch.logspace(-6, 2, 64).unsqueeze(-1)
    state[0] = 0
    stored = pack_int8(state)
    return stored, unpack_int8(stored)


def assert_codes(actual: Tensor, expected: Tensor) -> None:
    """A code off at most, on average nothing, but for halves' rounding: `got` [..., 4224], numbers [..., 64, 64]."""
    scale = actual[..., 64 * 64 :].contiguous().view(torch.bfloat16).float()
    off = (unpack_int8(actual) - expected) / scale.clamp(min=1e-4).unsqueeze(-1)
    assert float((off.abs() > 1.1).float().mean()) < 2e-3
    assert abs(float(off.mean())) < 6 / off.numel() ** 0.5
    assert 0.05 < float(off.square().mean()) < 0.2
    assert int(actual[..., : 64 * 64].view(torch.int8).min()) >= -127


@pytest.mark.parametrize(
    ("kernel", "rows", "first_layer"), [("few", 1, True), ("few", 4, False), ("decode", 2, True), ("decode", 30, False)]
)
def test_a_step_of_codes(library: ctypes.CDLL, decode: ctypes.CDLL, kernel: str, rows: int, first_layer: bool) -> None:
    """30 rows are several items for each warp of the one processor. The first row starts in slot 0."""
    layer, given = make_layer(), make_inputs(rows, first_layer)
    stored, expected = coded_slots(rows)
    slots = torch.arange(rows), torch.arange(rows).flip(0) + rows + 1
    kept = stored[: rows + 1].clone()
    decode["emulation_set"](1, 227 << 10)
    given_all = (layer, given, stored, slots)
    y = run(library, *given_all) if kernel == "few" else run_decode(decode, *given_all)
    assert error(y, reference(layer, given, expected, slots)) < 2e-3
    assert_codes(stored[rows + 1 :], expected[rows + 1 :])
    assert torch.equal(stored[: rows + 1], kept)


def test_one_warp_has_all_heads_where_no_more_fit(decode: ctypes.CDLL) -> None:
    """And another launch right behind finds the claims as it wants them."""
    layer, given = make_layer(), make_inputs(5, False)
    slots = torch.arange(5), torch.arange(5) + 6
    results = []
    for room in (16, 227):
        decode["emulation_set"](1, room << 10)
        stored = pack_int8(torch.ones(11, HEADS, 64, 64) + torch.arange(64) / 70)
        results += [(run_decode(decode, layer, given, stored, slots), stored)]
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_codes_that_do_not_change_stay(decode: ctypes.CDLL) -> None:
    """No decay, no key: all of them, whatever is thrown for them."""
    layer, given = make_layer(), make_inputs(3, False)
    layer.w0 = torch.full((WIDTH,), -100.0)
    given["k"] *= 0
    stored, _ = coded_slots(3)
    kept = stored.clone()
    for _ in range(3):
        given["v"] = torch.randn(3, WIDTH).half()
        run_decode(decode, layer, given, stored, (torch.arange(1, 4), torch.arange(1, 4)))
        assert torch.equal(stored, kept)


def test_ranks_beyond_the_registers_and_too_many_rows_of_codes_are_refused(library: ctypes.CDLL) -> None:
    args, up_weights = WkvArgs(rows=1, heads=HEADS), LowRankUpArgs(groups=3, rank=256, gate_rank=320)
    function = library["rwkv_wkv_few"]
    assert function(byref(args), byref(up_weights), 2, None) != 0
    args, up_weights = WkvArgs(rows=5, heads=HEADS), LowRankUpArgs(groups=3, rank=128, gate_rank=192)
    assert function(byref(args), byref(up_weights), 1, None) != 0


def test_a_step_in_parts(decode: ctypes.CDLL) -> None:
    """y as it is otherwise, in two parts: of several rows, and with states of 8 bits."""
    layer, given = make_layer(), make_inputs(9, False)
    stored, _ = coded_slots(9)
    slots = torch.arange(9), torch.arange(9) + 10
    again = stored.clone()
    halves, y = (
        run_decode(decode, layer, given, stored, slots),
        run_decode(decode, layer, given, again, slots, torch.float8_e5m2),
    )
    first = halves.to(torch.float8_e5m2)
    assert torch.equal(y[:, 0].view(torch.uint8), first.view(torch.uint8))
    assert torch.equal(y[:, 1].view(torch.uint8), ((halves - first.half()) * 8).to(torch.float8_e5m2).view(torch.uint8))
    assert torch.equal(again, stored)


@pytest.mark.parametrize(
    ("dtype", "first_layer", "sms"),
    [
        (torch.float16, False, 8),
        (torch.float16, False, 1),
        (torch.float16, True, 2),
        (torch.float16, False, 16),
        (torch.float32, True, 16),
        (torch.float32, True, 8),
        (torch.float32, False, 2),
        (torch.uint8, False, 8),
        (torch.uint8, True, 1),
    ],
)
def test_a_prompt_has_the_bits_of_its_tokens_one_by_one(
    sequence: ctypes.CDLL, decode: ctypes.CDLL, dtype: torch.dtype, first_layer: bool, sms: int
) -> None:
    """Two rows of 19 and 35 tokens, in slots 2 and 1, over several blocks of 16. One CTA per SM has 8 state warps.

    With two SMs for each head a cluster has them. The second row is cut in three, or in tokens: each continues the one
    before, and writes a slot too.
    """
    sequence["emulation_set"](sms, 227 << 10)
    lengths, tokens = (19, 35), 54
    layer, given = make_layer(), make_inputs(tokens, first_layer)
    given = given | {n: x.half() for n, x in zip(("v_gate", "w", "a", "g"), exits_of(layer, given), strict=True)}
    state = 0.3 * torch.randn(5, HEADS, 64, 64)
    stepped = pack_int8(state) if dtype is torch.uint8 else state.to(dtype)
    wkv, expected = stepped.clone(), torch.empty(tokens, WIDTH).half()
    start = 0
    for length, slot in zip(lengths, (2, 1), strict=True):
        for token in range(start, start + length):
            mine = {name: x[token : token + 1] for name, x in given.items() if name not in ("low", "gate")}
            slots = torch.tensor([slot]), torch.tensor([slot])
            args = make_args(layer, mine, stepped, slots, expected[token : token + 1])
            call(decode, "rwkv_wkv_decode", byref(args), wkv.element_size())
            if token == 19 + 17:
                stepped[4] = stepped[1]
        start += length
    before = wkv
    for known, cuts in ((0, (1, 18)), (2, (1, 18)), (34, range(1, 35))):  # if some are known, CTAs may be smaller
        y, wkv = torch.full((tokens, WIDTH), torch.nan).half(), before.clone()
        ends = torch.tensor([0, 19, *(19 + cut for cut in cuts), tokens])
        reads = torch.tensor([2, 1] + [CONTINUES] * len(cuts))
        writes = torch.tensor([2, *(4 if cut == 18 else 3 for cut in cuts), 0])
        args = make_args(layer, given, wkv, (reads, writes), y)
        args.rows, args.cu_seqlens, args.continuing = len(reads), ends.data_ptr(), known
        call(sequence, "rwkv_wkv_sequence", byref(args), wkv.element_size())
        assert torch.equal(y, expected)
        assert torch.equal(wkv[[0, 2, 4]], stepped[[1, 2, 4]])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.uint8])
@pytest.mark.parametrize("sms", [1, 30], ids=["2 teams", "4 teams"])
def test_a_prompt_in_chunks(chunks: ctypes.CDLL, dtype: torch.dtype, sms: int) -> None:
    """Rows of 3 and 40 tokens; the second is followed by rows of 17 and 2 that continue it, and by one of 5."""
    chunks["emulation_set"](sms, 227 << 10)
    lengths = [3, 40, 17, 2, 5]
    ends, tokens = torch.tensor([0, *lengths]).cumsum(0), sum(lengths)
    layer, given = make_layer(), make_inputs(tokens, False)
    layer.k_k, layer.k_a = 0.85 + layer.k_k / 10, 1 + layer.k_a / 10
    given = given | {n: x.half() for n, x in zip(("v_gate", "w", "a", "g"), exits_of(layer, given), strict=True)}
    state = 0.3 * torch.randn(9, HEADS, 64, 64)
    wkv = pack_int8(state) if dtype is torch.uint8 else state.to(dtype)
    expected = unpack_int8(wkv) if dtype is torch.uint8 else wkv.float().clone()
    slots = torch.tensor([1, 2, CONTINUES, CONTINUES, 3]), torch.tensor([4, 5, 6, 7, 3])
    y = torch.full((tokens, WIDTH), torch.nan).half()
    args = make_args(layer, given, wkv, slots, y)
    args.rows, args.cu_seqlens = len(lengths), ends.data_ptr()
    call(chunks, "rwkv_wkv_chunk", byref(args), wkv.element_size(), tokens)
    p = Projections(*(given[n].float() for n in ("r", "w", "k", "v", "a", "g", "v_gate")))
    wanted = NaiveOps().time_mix(layer, p, given["first"].float(), expected, StepInputs(ends, ends, *slots, ends, 40))[
        0
    ]
    assert error(y, wanted) < 1e-3
    states = unpack_int8(wkv) if dtype is torch.uint8 else wkv
    assert error(states[4:8], expected[4:8]) < (2e-2 if dtype is torch.uint8 else 2e-3)
    assert torch.equal(states[[1, 2, 8]], expected[[1, 2, 8]].to(states.dtype))
