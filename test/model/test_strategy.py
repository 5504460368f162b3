"""Strategies of the `rwkv` package: their meaning here, and refusals by name."""

from __future__ import annotations

import pytest

from programs.settings import SettingsError, parse_settings
from programs.settings.values import Strategy, StrategyError, parse_strategy
from rwkv_batch.runner.layer_split import check_layers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cuda fp16 *10 -> cpu fp32", Strategy(("cuda", "cpu"), (10, 0), "auto")),
        ("cuda:0 fp16 *10 -> cuda:1 fp16 *8 -> cpu fp32", Strategy(("cuda:0", "cuda:1", "cpu"), (10, 8, 0), "auto")),
        ("cuda fp16i8 *20 -> cuda:1 fp16i8", Strategy(("cuda", "cuda:1"), (20, 0), "int8")),
        ("cpu fp32", Strategy(("cpu",), (), "fp32")),
        ("cuda fp16*24", Strategy(("cuda",), (24,), "fp16")),
        ("cpu bf16 *2->cpu bf16 *4", Strategy(("cpu", "cpu"), (2, 4), "bf16")),
        ("cuda fp16 *20+", Strategy(("cuda",), (), "fp16", (20,))),
        ("cuda:1 int8 *0+", Strategy(("cuda:1",), (), "int8", (0,))),
        ("cuda fp16 *8+ -> cpu fp32 *2", Strategy(("cuda", "cpu"), (0, 2), "auto", (8, None))),
    ],
)
def test_their_meaning(text: str, expected: Strategy) -> None:
    assert parse_strategy(text) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("cuda fp16 *20+ -> cpu fp32", "more than one part takes the rest"),
        ("mps fp32", "cuda, cuda:N or cpu"),
        ("cuda fp17", "'fp17'"),
        ("cuda fp16 -> cpu fp32", "every part but the last"),
        ("cuda bf16 *3 -> cpu fp32", "mixes types"),
        ("cuda fp16 *0 -> cpu fp32", "no layers"),
        ("", "device dtype"),
        ("cuda:٣ fp16", "cuda, cuda:N or cpu"),
        ("cpu fp32 *٣ -> cpu fp32", "cuda, cuda:N or cpu"),
        ("cpu fp32 *1001 -> cpu fp32", r"gives cpu more than 1000 layers; give fewer"),
        ("cpu fp32 *" + "9" * 5000, r"^.{60,90} gives cpu more than 1000 layers; give fewer"),
    ],
)
def test_unsupported_parts_are_named(text: str, reason: str) -> None:
    with pytest.raises(StrategyError, match=reason):
        parse_strategy(text)


def test_the_rest_of_the_layers() -> None:
    assert check_layers((10, 0), 24, 2) == [10, 14]
    with pytest.raises(ValueError, match="device, 24,the rest, are 24 in total; the model has 24 layers"):
        check_layers((24, 0), 24, 2)
    with pytest.raises(ValueError, match="30,the rest, are 30 in total"):
        check_layers((30, 0), 24, 2)
    with pytest.raises(ValueError, match=r"7, are 7 in total; the model has 24 layers: .* 24 in total"):
        check_layers((7,), 24, 1)


def test_the_flag_sets_the_other_flags() -> None:
    engine = parse_settings(["--strategy", "cpu fp32 *2 -> cpu fp32"], {}).engine
    assert (engine.devices, engine.layers, engine.dtype) == (("cpu", "cpu"), (2, 0), "fp32")
    with pytest.raises(SettingsError, match="--dtype"):
        parse_settings(["--strategy", "cpu fp32", "--dtype", "bf16"], {})
    assert parse_settings(["--strategy", "cuda fp16 *20+"], {}).engine.resident == (20,)
    assert parse_settings(["--pp-devices", "0,1", "--pp-resident", "8,all"], {}).engine.resident == (8, None)
    with pytest.raises(SettingsError, match=r"--strategy is not a valid strategy.*more than one"):
        parse_settings(["--strategy", "cuda fp16 *20+ -> cpu fp32"], {})
