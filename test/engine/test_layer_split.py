"""The split of layers between devices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rwkv_batch.model.weights import open_weights
from rwkv_batch.runner.layer_split import (
    balance_half_layers,
    balance_layers,
    check_layers,
    head_cost,
    relative_speeds,
    split_layers,
    to_layer_ranges,
)
from rwkv_batch.runner.pipeline import Pipeline

CPU = torch.device("cpu")


def test_the_head_has_a_cost() -> None:
    assert balance_layers(32, 1.24, [1.0] * 4, [32] * 4) == [8, 8, 9, 7]
    assert balance_layers(32, 2.6, [1.0] * 4, [32] * 4) == [8, 9, 9, 6]
    assert balance_layers(32, 1.24, [1.0] * 2, [32] * 2) == [17, 15]
    assert balance_layers(12, 0.0, [1.0] * 4, [12] * 4) == [3, 3, 3, 3]


def test_the_head_costs_less_with_two_stages() -> None:
    size = 65536 * 4096 / 215e6  # of 7.2B
    assert balance_layers(32, head_cost(size, 2), [1.0] * 2, [32] * 2) == [16, 16]
    assert balance_layers(32, head_cost(size, 4), [1.0] * 4, [32] * 4) == [8, 8, 9, 7]


def test_a_layer_is_cut_if_that_helps_the_slowest_stage() -> None:
    size = 65536 * 4096 / 215e6
    for stages, expected in [
        (2, [16, 16]),  # 16.5 instead of 16.7
        (3, [11, 11, 10]),
        (4, [8, 8.5, 8.5, 7]),
        (6, [5.5, 5.5, 5.5, 5.5, 5.5, 4.5]),
    ]:
        head, speeds, maximum = head_cost(size, stages), [1.0] * stages, [32] * stages
        assert balance_half_layers(balance_layers(32, head, speeds, maximum), head, speeds, maximum) == expected


def test_a_layer_is_not_cut_without_memory_on_both_stages() -> None:
    head = head_cost(65536 * 4096 / 215e6, 4)
    for maximum, expected in [([8, 8, 9, 8], [8, 8, 8.5, 7.5]), ([8, 8, 8, 8], [8, 8, 8, 8])]:
        assert balance_half_layers(balance_layers(32, head, [1.0] * 4, maximum), head, [1.0] * 4, maximum) == expected


def test_both_stages_keep_a_cut_layer() -> None:
    assert to_layer_ranges([8.5, 8, 8.5, 7]) == [
        (0, 9, (False, True)),
        (8, 17, (True, True)),
        (16, 25, (True, False)),
        (25, 32, (False, False)),
    ]


def test_a_faster_device_gets_more() -> None:
    assert balance_layers(30, 0.0, [2.0, 1.0], [30, 30]) == [20, 10]


def test_memory_limits_a_stage_and_the_others_take_the_rest() -> None:
    assert balance_layers(32, 1.5, [1.0, 1.0], [10, 32]) == [10, 22]
    with pytest.raises(ValueError, match="memory for 10, 20 layers, in total 30; the model has 32"):
        balance_layers(32, 1.5, [1.0, 1.0], [10, 20])


def test_every_stage_has_a_layer_despite_a_large_head() -> None:
    assert balance_layers(3, 9.0, [1.0] * 3, [3] * 3) == [1, 1, 1]


@pytest.mark.parametrize("given", [(2, 2), (1, 1, 1, 1), (4, 0, -1), (1, 1), (0.5, 1, 1.5), (1.25, 1.25, 1.5)])
def test_counts_that_do_not_match_the_model_are_refused(given: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"--pp-layers .* for 3 devices|the layers per device, .* in total"):
        check_layers(given, 3, 3)


def test_given_counts_are_used(model: Path) -> None:
    weights = open_weights(model)
    whole = (False, False)
    assert split_layers(weights, [CPU] * 2, [4, 4], (2, 1)) == [(0, 2, whole), (2, 3, whole)]
    pipeline = Pipeline(weights, ("cpu", "cpu"), layers=(1, 2))
    assert [len(stage.layers) for stage in pipeline.stages] == [1, 2]
    pipeline = Pipeline(weights, ("cpu", "cpu"), layers=(1.5, 1.5))
    assert [stage.share for stage in pipeline.stages] == [1.5, 1.5]
    state_bytes = Pipeline(weights, ("cpu",)).slot_bytes
    shifts = 2 * weights.shape.width * 4
    assert pipeline.slot_bytes == state_bytes + shifts, "only token shifts of the cut layer are there twice"


def test_equal_devices_are_not_measured() -> None:
    assert relative_speeds([CPU, CPU]) == [1.0, 1.0]
