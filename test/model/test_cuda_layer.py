"""A layer's layout for the CUDA kernels: each map in its place, each number once. No GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from demo.random_weights import random_weights
from rwkv_batch.kernels.cuda.layer import CudaLayer, prepare_layer
from rwkv_batch.kernels.cuda.ops import CudaOps, check_sizes
from rwkv_batch.kernels.naive import NaiveOps
from rwkv_batch.kernels.registry import make_deterministic
from rwkv_batch.model.layer import Layer, Linear
from rwkv_batch.model.loader import LayerLoader, Precision
from rwkv_batch.model.ops import Ops
from rwkv_batch.model.quant.formats import Format
from rwkv_batch.model.state import StateFormat
from rwkv_batch.model.weights import Weights, weights_from

WIDTH = 640
"""More than one slice of ffn.value."""
RANKS = (96, 64, 32, 160)
CPU, META = torch.device("cpu"), torch.device("meta")


def stored(dtype: torch.dtype = torch.float16) -> Weights:
    return weights_from(random_weights(2, WIDTH, 256, seed=5, ranks=RANKS, dtype=dtype))


def loaded(weights: Weights, index: int, device: torch.device = CPU) -> Layer:
    precision = Precision(device, torch.float16, torch.float16, StateFormat.FP16)
    return LayerLoader(weights, precision, moves_matrices=False).layer(index)


@pytest.mark.parametrize(
    ("capability", "twice"), [((9, 0), None), ((8, 9), Format.FP8), ((12, 0), Format.FP8)], ids=str
)
def test_layers_are_split_by_the_bytes_of_second_copies(
    capability: tuple[int, int], twice: Format | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ffn.value, a third of the numbers, for fp8 without Hopper."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    half, states = torch.float16, StateFormat.FP16
    sizes = {f: Precision(torch.device("cuda"), half, half, states, f).weight_bytes for f in Format}
    assert all(size > 1.35 if format_ is twice else size < 1.15 for format_, size in sizes.items())


def linears(layer: Layer) -> dict[str, Linear]:
    found = {name: getattr(layer, name) for name in Layer.__slots__ if isinstance(getattr(layer, name), Linear)}
    if layer.v_residual is not None:
        found |= {"v1": layer.v_residual.v1, "v2": layer.v_residual.v2}
    return found


def padded(weight: Tensor, outputs: int, inputs: int) -> Tensor:
    return torch.nn.functional.pad(weight, (0, inputs - weight.shape[1], 0, outputs - weight.shape[0]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("index", [0, 1])
def test_each_map_is_in_its_place(index: int, dtype: torch.dtype) -> None:
    weights = stored(dtype)
    before = {name: tensor.clone() for name, tensor in weights.tensors.items()}
    plain = linears(loaded(weights, index))
    layer = prepare_layer(loaded(weights, index))
    w1, a1, w2, a2 = (plain[name].weight for name in ("w1", "a1", "w2", "a2"))
    down_weights, up_weights = [w1, a1], [w2, a2]
    if index > 0:
        down_weights, up_weights = [plain["v1"].weight, *down_weights], [plain["v2"].weight, *up_weights]
    assert torch.equal(layer.rkv, torch.stack([plain[name].weight for name in ("receptance", "key", "value")]))
    assert torch.equal(layer.low_in, torch.stack([padded(weight, 128, WIDTH) for weight in down_weights]))
    assert torch.equal(layer.low_out, torch.stack([padded(weight, WIDTH, 128) for weight in up_weights]))
    assert torch.equal(layer.gate_in, padded(plain["g1"].weight, 192, WIDTH))
    assert torch.equal(layer.gate_out, padded(plain["g2"].weight, WIDTH, 192))
    assert torch.equal(layer.value_rows, plain["ffn_value"].weight.T)
    for name, linear in linears(layer).items():
        assert torch.equal(linear.weight, plain[name].weight), name
    for name, tensor in weights.tensors.items():
        assert torch.equal(tensor, before[name]), "what is stored is not written to"


def storages(layer: CudaLayer) -> dict[int, int]:
    """Return address -> bytes of all memory of a layer."""
    tensors = [getattr(layer, name) for name in ("rkv", "low_in", "low_out", "gate_in", "gate_out", "value_rows")]
    tensors += [linear.weight for linear in linears(layer).values()]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def test_each_number_is_stored_once() -> None:
    """The only other bytes are the padding of ranks, twice."""
    layer = prepare_layer(loaded(stored(), 1))
    maps = sum(linear.weight.numel() for linear in linears(layer).values())
    padding = 2 * WIDTH * (3 * 128 - 96 - 64 - 32 + 192 - 160)
    assert sum(storages(layer).values()) == 2 * (maps + padding)


def test_matrices_stay_on_the_host_until_placed() -> None:
    """Vectors go to the device at once. Matrices go only to their final places, so nothing on the device is freed."""
    weights = stored()
    layer = loaded(weights, 1, META)
    assert layer.ln1.weight.device == layer.att_mix.device == META
    assert layer.ffn_key.weight.data_ptr() == weights.tensors["blocks.1.ffn.key.weight"].data_ptr()
    prepared = prepare_layer(layer)
    assert {linear.weight.device for linear in linears(prepared).values()} == {META}
    assert {prepared.rkv.device, prepared.low_in.device, prepared.value_rows.device, prepared.att_mix.device} == {META}


@pytest.mark.parametrize(("width", "ffn"), [(4160, 16640), (4097, 16384), (768, 3080), (100, 400)])
def test_unsupported_sizes_are_refused_by_name(width: int, ffn: int) -> None:
    with pytest.raises(ValueError, match=f"not {width} and {ffn}; use --kernels naive"):
        check_sizes(width, ffn)


@pytest.mark.parametrize("width", [768, 1024, 2048, 2560, 4096])
def test_released_sizes_are_supported(width: int) -> None:
    check_sizes(width, 4 * width)


def test_other_dtypes_are_refused() -> None:
    precision = Precision(CPU, torch.bfloat16, torch.float16, StateFormat.FP16)
    with pytest.raises(ValueError, match=r"fp16 weights only, got torch\.bfloat16"):
        prepare_layer(LayerLoader(stored(), precision).layer(0))


@pytest.mark.parametrize(
    ("ops", "storage", "reason"),
    [
        (CudaOps(), Format.FP8, "--deterministic is for --dtype fp16 and int8, not fp8; omit one"),
        (NaiveOps(), None, "--deterministic is for --kernels cuda on GPUs, not naive; omit one"),
        (CudaOps(), Format.W8A8, "--deterministic cannot run on cpu: .* sm_90 .*; omit it"),
    ],
)
def test_deterministic_is_refused_where_it_cannot_hold(ops: Ops, storage: Format | None, reason: str) -> None:
    precision = Precision(CPU, torch.float16, torch.float16, StateFormat.FP16, storage)
    with pytest.raises(ValueError, match=reason):
        make_deterministic(ops, precision)


def test_deterministic_is_refused_for_widths_without_one_order() -> None:
    with pytest.raises(ValueError, match="the model's width is 640; on a GPU --deterministic takes multiples of 256"):
        prepare_layer(loaded(stored(), 0), is_deterministic=True)
