"""The WKV of few rows with the low ranks' exits, its kernel run thread by thread on the CPU, against plain torch."""

from __future__ import annotations

import ctypes
from ctypes import byref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from native import cuda_check
from rwkv_batch.kernels.cuda_library import LowExits, WkvArgs
from rwkv_batch.kernels.naive import NaiveOps
from rwkv_batch.model.layer import Projections
from rwkv_batch.model.step_inputs import StepInputs
from test.model.emulated.library import call, emulated

pytestmark = pytest.mark.skipif(cuda_check.why_not() is not None, reason="no CUDA headers")
HEADS, RANK, GATE_RANK = 2, 128, 192
WIDTH = 64 * HEADS


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernel on the CPU."""
    return emulated("wkv_few", tmp_path_factory.mktemp("emulated"))


def make_layer() -> Any:
    """The constants of a time mix and its low ranks' exits."""
    vectors = {name: torch.randn(WIDTH) for name in ("w0", "a0", "k_k", "k_a")}
    ln_x = SimpleNamespace(weight=torch.randn(WIDTH), bias=torch.randn(WIDTH))
    low_out, gate_out = torch.randn(3, WIDTH, RANK).half() / 11, torch.randn(WIDTH, GATE_RANK).half() / 14
    residual = SimpleNamespace(v0=torch.randn(WIDTH))
    return SimpleNamespace(
        **vectors, r_k=torch.randn(HEADS, 64), ln_x=ln_x, v_residual=residual, low_out=low_out, gate_out=gate_out
    )


def run(
    library: ctypes.CDLL, layer: Any, given: dict[str, Tensor], wkv: Tensor, slots: tuple[Tensor, Tensor]
) -> Tensor:
    """y [rows, WIDTH]; wkv is updated. Without `first` the layer is the model's first."""
    rows, first = len(given["r"]), given.get("first")
    y = torch.full((rows, WIDTH), torch.nan).half()
    at = lambda tensor: None if tensor is None else tensor.data_ptr()  # noqa: E731
    args = WkvArgs(
        **{name: at(given[name]) for name in ("r", "k", "v")},
        v_first=at(first),
        **{name: at(getattr(layer, name)) for name in ("w0", "a0", "k_k", "k_a", "r_k")},
        v0=at(layer.v_residual.v0),
        ln_weight=at(layer.ln_x.weight),
        ln_bias=at(layer.ln_x.bias),
        y=at(y),
        state=at(wkv),
        read_slots=at(slots[0]),
        write_slots=at(slots[1]),
        slot_stride=wkv.stride(0),
        rows=rows,
        heads=HEADS,
    )
    skipped = 0 if first is not None else 1
    low, low_out = given["low"][skipped:].contiguous(), layer.low_out[skipped:].contiguous()
    exits = LowExits(at(low), at(given["gate"]), at(low_out), at(layer.gate_out), 3 - skipped, RANK, GATE_RANK)
    call(library, "rwkv_wkv_few", byref(args), byref(exits), wkv.element_size())
    return y


def true(layer: Any, given: dict[str, Tensor], wkv: Tensor, slots: tuple[Tensor, Tensor]) -> Tensor:
    """The same in fp32."""
    rows, first = len(given["r"]), given.get("first")
    gate, w, a = (low.float() @ out.float().T for low, out in zip(given["low"], layer.low_out, strict=True))
    g = given["gate"].float() @ layer.gate_out.float().T
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


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "first_layer"), [(1, False), (1, True), (5, False)])
def test_a_step(library: ctypes.CDLL, rows: int, first_layer: bool, dtype: torch.dtype) -> None:
    layer, given = make_layer(), make_inputs(rows, first_layer)
    state = 0.3 * torch.randn(2 * rows, HEADS, 64, 64)
    slots = torch.arange(rows), torch.arange(rows).flip(0) + rows
    wkv, wanted = state.to(dtype), state.to(dtype).float()
    kept = wkv[:rows].clone()
    y, wanted_y = run(library, layer, given, wkv, slots), true(layer, given, wanted, slots)
    assert error(y, wanted_y) < 2e-3
    assert error(wkv, wanted) < 1e-3
    assert torch.equal(wkv[:rows], kept)


def test_a_row_has_the_same_bits_alone_and_in_company(library: ctypes.CDLL) -> None:
    layer, given = make_layer(), make_inputs(8, False)
    state = 0.3 * torch.randn(16, HEADS, 64, 64).half()
    slots = torch.arange(8), torch.arange(8) + 8
    together = state.clone()
    y = run(library, layer, given, together, slots)
    row = 6
    mine = slice(row, row + 1)
    alone = {name: (x[:, mine] if name == "low" else x[mine]).contiguous() for name, x in given.items()}
    wkv = state.clone()
    assert torch.equal(run(library, layer, alone, wkv, (slots[0][mine], slots[1][mine])), y[mine])
    assert torch.equal(wkv[8 + row], together[8 + row])


def test_ranks_beyond_the_registers_are_refused(library: ctypes.CDLL) -> None:
    args, exits = WkvArgs(rows=1, heads=HEADS), LowExits(groups=3, rank=256, gate_rank=320)
    function = library["rwkv_wkv_few"]
    assert function(byref(args), byref(exits), 2, None) != 0
