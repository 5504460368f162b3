"""Weights that stay int8 or fp8: gradients, the estimate of memory, and the served model with the tuned state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from demo.random_weights import write_random_model
from routes.fine_tuning.data import read_data, split
from rwkv_batch.errors import StartupError
from rwkv_batch.model.quant.formats import Format, dequantise
from rwkv_batch.model.state import ModelShape
from rwkv_batch.model.weights import Weights
from rwkv_batch.runner.calibration import MeasuredInputs
from rwkv_batch.tuning import COMPACT_DTYPES
from rwkv_batch.tuning.run import Place, open_model, plan_memory, prepare
from rwkv_batch.tuning.trainer import TuneOptions, Tuning

pytestmark = pytest.mark.slow

CPU = Place(torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model") / "m.pth", 2, 192)  # int8 has 128 large channels


def tuning(model: Path, dtype: str, method: str = "state+lora") -> Tuning:
    torch.set_num_threads(1)
    lines = [{"prompt": f"Say {i}.", "completion": f" The number is {i}."} for i in range(12)]
    data = read_data("\n".join(map(json.dumps, lines)).encode(), "d.jsonl").examples
    weights = open_model(str(model), [])
    options = TuneOptions(method, rank=4, epochs=2, batch_tokens=256, seed=1, dtype=dtype)
    return prepare(
        weights, *split(data, 0.2), options, CPU, None, largest_inputs=MeasuredInputs(weights, torch.device("cpu"))
    )


@pytest.mark.parametrize("dtype", COMPACT_DTYPES)
def test_gradients_are_those_of_weights_that_were_dequantised_before(model: Path, dtype: str) -> None:
    compact, plain = (tuning(model, dtype) for _ in range(2))
    assert (
        len(plain.trainer.model.compact) == 12 and not plain.trainer.model.weights.keys() & plain.trainer.model.compact
    )
    all_weights = {name: dequantise(one) for name, one in plain.trainer.model.compact.items()}
    plain.trainer.model.weights = {**plain.trainer.model.weights, **all_weights}
    plain.trainer.model.compact = {}
    losses, grads = [], []
    for one in (compact, plain):
        with torch.no_grad():  # else the gradients of A are zero
            for _, b in one.trainer.model.tunables.pairs.values():
                b += 0.01
        losses.append(one.trainer.backward(one.first_batch()))
        grads.append([parameter.grad for parameter in one.trainer.model.tunables.parameters])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for found, expected in zip(*grads, strict=True):
        assert found is not None and expected is not None
        assert float((found - expected).norm() / expected.norm().clamp_min(1e-12)) < 1e-5


def test_all_weights_cannot_stay_quantised(model: Path) -> None:
    with pytest.raises(StartupError, match="--method full changes all weights, which cannot stay int8"):
        tuning(model, "int8", "full")


@pytest.mark.parametrize("dtype", COMPACT_DTYPES)
def test_the_estimate_of_memory_counts_the_compact_bytes(dtype: str) -> None:
    """7.2B: 6.44e9 of its numbers have a byte less; a product needs 0.66e9 bytes for its matrix."""
    weights = Weights(Path("random"), {}, ModelShape(32, 4096, 65536, 16384, 128, 128, 96, 480), "")

    def plan(chosen: str) -> float:
        place = Place(torch.device("cpu"), torch.bfloat16)
        return plan_memory(weights, TuneOptions(dtype=chosen), place, 1, 16, None).needed_bytes / 1e9

    assert plan("auto") - plan(dtype) == pytest.approx(6.44 - 0.67, abs=0.1)


@pytest.mark.parametrize("dtype", COMPACT_DTYPES)
def test_a_state_tuned_on_compact_weights_serves_them(model: Path, dtype: str) -> None:
    """The codes are the served ones, and the loss of the tuned lines falls with the served model."""
    one = tuning(model, dtype, "state")
    assert {stored.format for stored in one.trainer.model.compact.values()} == {Format(dtype)}
    assert one.run(lambda _: True) and one.final is not None
    assert one.final.loss < one.progress.evaluations[0][1]
    assert list(model.parent.glob(f"m.{dtype}-*/blocks.1.ffn.value.weight.safetensors")), "the service reads the same"
