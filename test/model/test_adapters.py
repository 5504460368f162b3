"""Merged adapters: every kind against its formula, and the model against the reference package."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from demo.random_weights import random_weights
from rwkv_batch.model.adapters.files import read_adapter, split_scale
from rwkv_batch.model.adapters.merge import merge_adapters
from rwkv_batch.model.tensor_files import FileError
from rwkv_batch.model.weights import weights_from
from test.model.test_model import feed, oracle, pipeline

LAYERS, WIDTH = 2, 128
BASE = random_weights(LAYERS, WIDTH, vocab=304, seed=3, dtype=torch.float32)
GENERATOR = torch.Generator().manual_seed(5)
R = 8


def normal(*size: int, scale: float = 0.1) -> Tensor:
    return torch.randn(*size, generator=GENERATOR) * scale


def targets() -> list[str]:
    """Square, tall and wide matrices."""
    return ["blocks.0.att.key", "blocks.1.att.receptance", "blocks.0.ffn.key", "blocks.1.ffn.value", "head"]


def sizes(target: str) -> tuple[int, int]:
    out, inputs = BASE[f"{target}.weight"].shape
    return out, inputs


def lora(target: str) -> dict[str, Tensor]:
    out, inputs = sizes(target)
    return {"lora_A": normal(R, inputs), "lora_B": normal(out, R)}


def plain_lora(w: Tensor, p: dict[str, Tensor], s: float) -> Tensor:
    return w + s * sum(torch.outer(p["lora_B"][:, i], p["lora_A"][i]) for i in range(R))


def dora(target: str) -> dict[str, Tensor]:
    return {**lora(target), "lora_M": normal(1, sizes(target)[1]).abs() + 1}


def plain_dora(w: Tensor, p: dict[str, Tensor], s: float) -> Tensor:
    moved = plain_lora(w, p, s)
    columns = [moved[:, j] * p["lora_M"][0, j] / (moved[:, j].square().sum().sqrt() + 1e-6) for j in range(w.shape[1])]
    return torch.stack(columns, dim=1)


def dora_of_rows(target: str) -> dict[str, Tensor]:
    return {**lora(target), "lora_magnitude_vector": normal(sizes(target)[0]).abs() + 1}


def plain_dora_of_rows(w: Tensor, p: dict[str, Tensor], s: float) -> Tensor:
    moved = plain_lora(w, p, s)
    return torch.stack(
        [row * m / row.square().sum().sqrt() for row, m in zip(moved, p["lora_magnitude_vector"], strict=True)]
    )


def pissa(target: str) -> dict[str, Tensor]:
    first = lora(target)
    return {**lora(target), "init_lora_A": first["lora_A"], "init_lora_B": first["lora_B"]}


def plain_pissa(w: Tensor, p: dict[str, Tensor], s: float) -> Tensor:
    return w - p["init_lora_B"] @ p["init_lora_A"] + p["lora_B"] @ p["lora_A"]


def bone(target: str) -> dict[str, Tensor]:
    return {"bone": normal(sizes(target)[1] // R, R, R)}


def plain_bone(w: Tensor, p: dict[str, Tensor], s: float) -> Tensor:
    g, changed = p.get("bone", p.get("disha")), w.clone()
    assert g is not None
    for a in range(0, w.shape[0], R):
        for b in range(0, w.shape[1], R):
            changed[a : a + R, b : b + R] += w[a : a + R, b : b + R] @ g[b // R] + g[b // R]
    return changed


def disha(target: str) -> dict[str, Tensor]:
    return {"disha": normal(sizes(target)[1] // R, R, R)}


def miss(target: str, rank: int = R) -> dict[str, Tensor]:
    return {"disha": normal(rank, sizes(target)[0])}


def plain_miss(w: Tensor, p: dict[str, Tensor], s: float) -> Tensor:
    (d,) = p.values()
    return torch.stack([w[:, j] + d[j % len(d)] for j in range(w.shape[1])], dim=1)


def plain_whole(w: Tensor, p: dict[str, Tensor], s: float) -> Tensor:
    return p[""]


Make = Callable[[str], dict[str, Tensor]]
Plain = Callable[[Tensor, dict[str, Tensor], float], Tensor]
KINDS: dict[str, tuple[Make, Plain]] = {
    "LoRA": (lora, plain_lora),
    "DoRA": (dora, plain_dora),
    "DoRA of rows": (dora_of_rows, plain_dora_of_rows),
    "PiSSA": (pissa, plain_pissa),
    "Bone": (bone, plain_bone),
    "DiSHA": (disha, plain_bone),
    "MiSS": (miss, plain_miss),
    "MiSS, the last block short": (lambda target: miss(target, 24), plain_miss),
    "whole tensors": (lambda target: {"": normal(*sizes(target))}, plain_whole),
}


def file_of(parts: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return tensors under RWKV-PEFT's names; whole ones under the model's own."""
    return {
        f"{target}.{part}" if part else f"{target}.weight": tensor
        for target, found in parts.items()
        for part, tensor in found.items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_equals_its_formula_and_the_reference(tmp_path: Path, kind: str) -> None:
    make, plain = KINDS[kind]
    scale = None if "lora_A" not in make("head") or kind == "PiSSA" else 1.7
    parts = {target: make(target) for target in targets()}
    torch.save(file_of(parts), tmp_path / "a.pth")
    base = weights_from(BASE)
    weights = merge_adapters(base, [read_adapter(tmp_path / "a.pth", scale)])
    changed = dict(BASE)
    for target, found in parts.items():
        expected = plain(BASE[f"{target}.weight"], found, scale or 1.0)
        changed[f"{target}.weight"] = expected
        assert (weights.tensor(f"{target}.weight") - expected).abs().max() < 1e-4
        assert (expected - BASE[f"{target}.weight"]).abs().max() > 1e-2
    untouched = "blocks.0.att.value.weight"
    assert weights.tensor(untouched) is BASE[untouched]
    assert weights.fingerprint != base.fingerprint and weights.num_parameters == base.num_parameters
    torch.save(changed, tmp_path / "merged.pth")
    prompt = [5, 17, 256, 3]
    with torch.inference_mode():
        expected, _ = oracle(tmp_path / "merged.pth").forward(list(prompt), None)
    assert (feed(pipeline(weights, "naive"), prompt, (4,))[0] - expected.float()).abs().max() < 1e-4


def test_vectors_are_replaced_whole(tmp_path: Path) -> None:
    torch.save({"blocks.0.att.x_r": normal(WIDTH), "blocks.1.ln1.bias": normal(WIDTH)}, tmp_path / "a.pth")
    weights = merge_adapters(weights_from(BASE), [adapter := read_adapter(tmp_path / "a.pth")])
    assert torch.equal(weights.tensor("blocks.0.att.x_r").flatten(), adapter.parts["blocks.0.att.x_r"][""])
    assert weights.tensor("blocks.0.att.x_r").shape == BASE["blocks.0.att.x_r"].shape
    feed(pipeline(weights, "naive"), [1, 2], (2,))


def test_adapters_merge_in_order(tmp_path: Path) -> None:
    first, second = {"head": lora("head")}, {"head": bone("head")}
    for name, parts in (("1", first), ("2", second)):
        torch.save(file_of(parts), tmp_path / f"{name}.pth")
    adapters = [read_adapter(tmp_path / "1.pth", 2.0), read_adapter(tmp_path / "2.pth")]
    weights = merge_adapters(weights_from(BASE), adapters)
    expected = plain_bone(plain_lora(BASE["head.weight"], first["head"], 2.0), second["head"], 1.0)
    assert (weights.tensor("head.weight") - expected).abs().max() < 1e-4
    assert weights.fingerprint != merge_adapters(weights_from(BASE), adapters[::-1]).fingerprint


def test_the_fingerprint_covers_scale_and_numbers(tmp_path: Path) -> None:
    tensors = file_of({"head": lora("head")})
    torch.save(tensors, tmp_path / "a.pth")
    tensors["head.lora_B"][7, 3] += 1e-3
    torch.save(tensors, tmp_path / "b.pth")
    files = [("a", 1.0), ("a", 2.0), ("b", 1.0)]
    found = [
        merge_adapters(weights_from(BASE), [read_adapter(tmp_path / f"{name}.pth", scale)]).fingerprint
        for name, scale in files
    ]
    assert len({*found, weights_from(BASE).fingerprint}) == 4


def peft(folder: Path, parts: dict[str, dict[str, Tensor]], config: dict[str, Any]) -> Path:
    from safetensors.torch import save_file

    folder.mkdir()
    names = {
        name if name == "lora_magnitude_vector" else f"{name}.weight" for found in parts.values() for name in found
    }
    tensors = {
        f"base_model.model.{target}.{part}" + (".weight" if f"{part}.weight" in names else ""): tensor
        for target, found in parts.items()
        for part, tensor in found.items()
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({"lora_alpha": 32}, 32 / R),
        ({"lora_alpha": 32, "use_rslora": True}, 32 / R**0.5),
        ({"lora_alpha": 32, "alpha_pattern": {"att.key": 4}}, 4 / R),
        ({"lora_alpha": 32, "alpha_pattern": {"ffn.key": 4}}, 32 / R),
        ({"lora_alpha": 32, "alpha_pattern": {"ffn.key|att.k[a-z]+": 4, "key": 5}}, 4 / R),
        (
            {"lora_alpha": 32, "alpha_pattern": {r"(([a-z0-9.]+)+)+\x00": 4}},
            32 / R,
        ),  # exponential time in Python's `re`
    ],
)
def test_a_peft_folder_has_its_scale(tmp_path: Path, config: dict[str, Any], scale: float) -> None:
    parts = {"blocks.0.att.key": lora("blocks.0.att.key")}
    folder = peft(tmp_path / "adapter", parts, {"peft_type": "LORA", "r": R, **config})
    for path in (folder, folder / "adapter_model.safetensors"):
        weights = merge_adapters(weights_from(BASE), [read_adapter(path)])
        expected = plain_lora(BASE["blocks.0.att.key.weight"], parts["blocks.0.att.key"], scale)
        assert (weights.tensor("blocks.0.att.key.weight") - expected).abs().max() < 1e-4
    assert read_adapter(folder, 9.0).scale_of("blocks.0.att.key") == 9.0


def test_peft_dora(tmp_path: Path) -> None:
    parts = {"head": dora_of_rows("head")}
    folder = peft(tmp_path / "adapter", parts, {"lora_alpha": R, "use_dora": True})
    weights = merge_adapters(weights_from(BASE), [read_adapter(folder)])
    expected = plain_dora_of_rows(BASE["head.weight"], parts["head"], 1.0)
    assert (weights.tensor("head.weight") - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"lora_alpha": 8, "init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
        ({"lora_alpha": 8, "fan_in_fan_out": True}, "fan_in_fan_out"),
        ([], "Expected `object`, got `array`.*download the adapter"),
        ({"alpha_pattern": ["att.key"]}, "must be an object"),
        ({"alpha_pattern": {"att.key": "4"}}, "'att.key' must be a number"),
        ({"alpha_pattern": {"att.key": 10**400}}, "'att.key' is not a valid pattern"),
        ({"alpha_pattern": {"(att.key": 4}}, r"'\(att.key' is not a valid pattern .*unclosed"),
        ({"alpha_pattern": {"(a{999}){999}": 4}}, "exceeds size limit"),
        ({"alpha_pattern": {f"a{i}+": 4 for i in range(17)}}, "more than 16 regular expressions"),
    ],
)
def test_unsupported_configurations(tmp_path: Path, config: Any, why: str) -> None:
    with pytest.raises(FileError, match=why):
        read_adapter(peft(tmp_path / "adapter", {"head": lora("head")}, config))


KEY = "blocks.0.att.key"
REFUSED: dict[str, tuple[dict[str, Tensor], str]] = {
    "no scale": (file_of({KEY: lora(KEY)}), "has no scale"),
    "half a pair": ({f"{KEY}.lora_A": normal(R, WIDTH)}, "has lora_A, which is not a supported kind"),
    "another width": (
        {f"{KEY}.lora_A": normal(R, 64), f"{KEY}.lora_B": normal(WIDTH, R)},
        r"\(8, 64\), which does not",
    ),
    "ranks that differ": ({f"{KEY}.lora_A": normal(R, WIDTH), f"{KEY}.lora_B": normal(WIDTH, 4)}, r"\(128, 4\)"),
    "blocks of another width": ({f"{KEY}.bone": normal(4, R, R)}, r"\(4, 8, 8\), which does not fit"),
    "a shard of another width": ({f"{KEY}.disha": normal(R, 64)}, r"\(8, 64\), which does not fit"),
    "more layers": ({"blocks.9.att.key.bone": normal(16, R, R)}, "no weight 'blocks.9.att.key'"),
    "a vector": ({"blocks.0.att.x_r.lora_A": normal(R, 1), "blocks.0.att.x_r.lora_B": normal(1, R)}, "is a vector"),
    "a mixture": ({"blocks.0.ffn.key.lora_A_expert_0": normal(R, WIDTH)}, "mixture of experts"),
    "a tuned state": ({"blocks.0.att.time_state": normal(2, 64, 64)}, "load it with --state"),
    "another architecture": (
        {"model.layers.0.self_attn.q_proj.lora_A": normal(R, WIDTH)},
        "does not belong to a weight",
    ),
    "NaN": ({f"{KEY}.bone": normal(16, R, R) * float("nan")}, "NaN or infinity"),
    "1e30": ({f"{KEY}.bone": torch.full((16, R, R), -1e30)}, r"has 1e\+30, at most 65504 is valid"),
    "integers": ({f"{KEY}.bone": torch.ones(16, R, R, dtype=torch.int32)}, "torch.int32"),
    "nothing": ({}, "has no tensors"),
    "a pair of no rank": ({f"{KEY}.lora_A": normal(0, WIDTH), f"{KEY}.lora_B": normal(WIDTH, 0)}, "does not fit"),
    "a shard of no rows": ({f"{KEY}.disha": normal(0, WIDTH)}, r"\(0, 128\), which does not fit"),
    "blocks of no width": ({f"{KEY}.bone": normal(4, 0, 0)}, r"\(4, 0, 0\), which does not fit"),
    "a number for a shard": ({f"{KEY}.disha": torch.ones(())}, r"\(\), which does not fit"),
    "experts that are no numbers": (
        {"moe_info": torch.tensor([True, True]), f"{KEY}.disha": normal(R, WIDTH)},
        "torch.bool",
    ),
    "a whole tensor that does not fit": ({f"{KEY}.weight": normal(64, 64)}, r"\(64, 64\), which does not fit"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path: Path, case: str) -> None:
    tensors, why = REFUSED[case]
    torch.save(tensors, tmp_path / "a.pth")
    with pytest.raises(FileError, match=why) as refused:
        merge_adapters(weights_from(BASE), [read_adapter(tmp_path / "a.pth")])
    assert f"adapter file {tmp_path / 'a.pth'}" in str(refused.value)


@pytest.mark.parametrize("alpha", [1e300, -(10**400), 10**400])
def test_scales_are_limited(tmp_path: Path, alpha: float) -> None:
    folder = peft(tmp_path / "adapter", {"head": lora("head")}, {"lora_alpha": alpha})
    with pytest.raises(FileError, match="larger than 1000"):
        read_adapter(folder).scale_of("head")
    for scale in (float("inf"), float("nan"), -1001.0):
        with pytest.raises(FileError, match="larger than 1000"):
            read_adapter(folder, scale)


def test_a_scale_after_the_name() -> None:
    assert split_scale("a.pth:2.5") == (Path("a.pth"), 2.5)
    assert split_scale("/x/a.pth") == (Path("/x/a.pth"), None)
    assert split_scale("c:/x/a.pth") == (Path("c:/x/a.pth"), None)
    assert split_scale("c:/x/a.pth:-1") == (Path("c:/x/a.pth"), -1.0)
