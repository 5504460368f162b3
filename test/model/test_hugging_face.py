"""Hugging Face's layouts: the same model as the .pth file, in one file or shards, and refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from demo.random_weights import random_weights
from rwkv_batch.model.adapters.files import read_adapter
from rwkv_batch.model.huggingface import native_names
from rwkv_batch.model.weights import expected_shapes, open_weights, weights_from
from test.model.random_older_weights import random_older_weights
from test.model.test_model import feed, pipeline
from test.model.test_weights import PUBLIC, check_refused, public_shape

NATIVE = random_weights(layers=3, width=128, vocab=256, seed=4, first_v=False, ranks=(16, 24, 8, 40))
PROMPT = [3, 77, 200, 5, 9]


def fla_name(name: str) -> str:
    """Return the name by flash-linear-attention's rwkv_layout converter."""
    outside = {"emb": "model.embeddings", "ln_out": "model.norm", "head": "lm_head"}
    first, *rest = name.split(".")
    if first in outside:
        return ".".join([outside[first], *rest])
    number, part, inner, *end = rest
    if part.startswith("ln"):
        return f"model.layers.{number}.{('pre_norm', 'attn_norm', 'ffn_norm')[int(part[2])]}.{inner}"
    if re.fullmatch("[wavg][012]", inner):
        tail = ("2.bias", "0.weight", "2.weight")[int(inner[1])]
        return f"model.layers.{number}.attn.{inner[0]}_lora.lora.{tail}"
    if part == "att":
        proj = {"receptance": "r_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj", "ln_x": "g_norm"}
        return ".".join(["model.layers", number, "attn", proj.get(inner, inner), *end])
    return ".".join(["model.layers", number, "ffn", inner, *end])


def fla(tensors: dict[str, Tensor] = NATIVE, older: bool = False) -> dict[str, Tensor]:
    """Convert a model to flash-linear-attention's layout. older: token-shift weights in one tensor."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        low_rank = re.search(r"\.att\.[wavg][12]$", name) is not None
        flat = (
            tensor if ".x_" in name and not older else tensor.reshape(tensor.shape[2:]) if tensor.dim() == 3 else tensor
        )
        found[fla_name(name)] = flat.t() if low_rank else flat
    if older:
        for i in range(sum(name.endswith(".att.x_r") for name in tensors)):
            mixes = [found.pop(f"model.layers.{i}.attn.x_{letter}") for letter in "rwkvag"]
            found[f"model.layers.{i}.attn.x_x"] = torch.stack(mixes)
    return found


def rwkv_layout(tensors: dict[str, Tensor] = NATIVE) -> dict[str, Tensor]:
    """Convert a model to the layout of RWKV's rwkv_layout folders."""
    return {name if name.startswith("head") else f"rwkv7.{name}": tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", list(PUBLIC)[:4])
@pytest.mark.parametrize("layout", [fla, partial(fla, older=True), rwkv_layout])
def test_public_sizes(name: str, layout: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """By shapes only, in the names of model hubs."""
    shape = public_shape(name)
    sizes = {key: (1, 1, *size) if ".x_" in key else size for key, size in expected_shapes(shape).items()}
    native = {key: torch.ones(1, dtype=torch.bfloat16).expand(size) for key, size in sizes.items()}
    assert weights_from(native_names(layout(native))).shape == shape


def sharded(folder: Path, tensors: dict[str, Tensor], count: int = 3) -> Path:
    folder.mkdir(exist_ok=True)
    names = sorted(tensors)
    places = {name: f"model-{1 + i % count:05}-of-{count:05}.safetensors" for i, name in enumerate(names)}
    for shard in set(places.values()):
        save_file({name: tensors[name].contiguous() for name in names if places[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


@pytest.mark.parametrize(
    "tensors",
    [fla(), fla(older=True), rwkv_layout()],
    ids=["flash-linear-attention", "its older form", "RWKV's rwkv_layout"],
)
@pytest.mark.parametrize("form", ["one file", "a folder", "shards"])
def test_it_equals_the_pth_file(tmp_path: Path, tensors: dict[str, Tensor], form: str) -> None:
    path = tmp_path / "model.safetensors"
    if form == "shards":
        path = sharded(tmp_path, tensors)
    else:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        path = path if form == "one file" else tmp_path
    found, native = open_weights(path), weights_from(NATIVE)
    assert found.shape == native.shape and found.tensors.keys() == native.tensors.keys()
    for name, tensor in native.tensors.items():
        assert torch.equal(found.tensors[name].reshape(tensor.shape), tensor), name
    logits = [feed(pipeline(weights, "naive"), PROMPT, (len(PROMPT),)) for weights in (found, native)]
    assert torch.equal(*logits)


@pytest.mark.parametrize("version", ["7", "6", "5.2"])
def test_a_file_of_ai00(tmp_path: Path, version: str) -> None:
    """Its names and orientations are those of web-rwkv's converter."""
    source = NATIVE if version == "7" else random_older_weights(version, 2, 128)
    half = {name: tensor.half() for name, tensor in source.items()}
    stored = {}
    for name, tensor in half.items():
        shown = name.replace("time_faaaa", "time_first").replace("time_maa", "time_mix")
        pair = re.search(r"\.([wavg]|time_mix_w|time_decay_w)[12]$", shown)
        stored[shown] = (tensor.transpose(-1, -2) if pair else tensor).contiguous()
    save_file(stored, tmp_path / "model.st")
    found, native = open_weights(tmp_path / "model.st"), weights_from(half)
    assert found.shape == native.shape and found.fingerprint == native.fingerprint


def test_missing_shards(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "a", fla())
    (folder / "model-00002-of-00003.safetensors").unlink()
    check_refused(folder, r"model-00002-of-00003\.safetensors does not exist")
    folder = sharded(tmp_path / "b", fla())
    index = folder / "model.safetensors.index.json"
    reported = json.loads(index.read_text())
    for name, shard, why in (
        ("model.layers.9.x", "model-00001-of-00003.safetensors", "1 tensors that its shards lack"),
        ("x", "../../etc/passwd", "not a file of its folder"),
    ):
        index.write_text(json.dumps({"weight_map": {**reported["weight_map"], name: shard}}))
        check_refused(folder, why)
    index.write_text("{")
    check_refused(folder, "cannot be read")


def test_the_config_describes_the_tensors(tmp_path: Path) -> None:
    folder = sharded(tmp_path, fla())
    config = {"model_type": "rwkv7", "num_hidden_layers": 3, "hidden_size": 128, "head_dim": 64, "vocab_size": 256}
    (folder / "config.json").write_text(json.dumps(config))
    assert open_weights(folder).shape.layers == 3
    for content, why in (
        (json.dumps(config | {"num_hidden_layers": 4}), "num_hidden_layers 4, the tensors have 3"),
        (json.dumps(config | {"head_dim": 128}), "head_dim 128, the tensors have 64"),
        ('{"hidden_size": "x"}', "cannot be read"),
        ("{", "cannot be read"),
    ):
        (folder / "config.json").write_text(content)
        check_refused(folder, rf"config\.json .*{why}")


def test_other_transformers_models_are_named(tmp_path: Path) -> None:
    save_file({"model.layers.0.self_attn.q_proj.weight": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    check_refused(tmp_path, "a transformers model other than RWKV-7")
    (tmp_path / "model.safetensors").unlink()
    check_refused(tmp_path, "is a folder")


def test_the_folder_of_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    check_refused(tmp_path, "is the folder of an adapter; load it with --adapter FILE")


def test_an_adapter_trained_on_a_layout_of_transformers(tmp_path: Path) -> None:
    pair = {"lora_A.weight": torch.ones(4, 128), "lora_B.weight": torch.ones(128, 4)}
    names = ["model.layers.1.attn.r_proj", "model.layers.0.ffn.key", "lm_head"]
    tensors = {f"base_model.model.{n}.{p}": t.clone() for n in names for p, t in pair.items()}
    save_file(tensors, tmp_path / "a.safetensors")
    found = read_adapter(tmp_path / "a.safetensors", 1.0)
    assert set(found.parts) == {"blocks.1.att.receptance", "blocks.0.ffn.key", "head"}


@pytest.mark.parametrize(
    "pattern", ["attn.r_proj", "r_proj", "model.layers.1.attn.r_proj", r"layers\.(1|2)\.attn\.r_proj", "att.receptance"]
)
def test_an_adapters_alphas_use_the_names_of_its_layout(tmp_path: Path, pattern: str) -> None:
    pair = {"lora_A.weight": torch.ones(4, 128), "lora_B.weight": torch.ones(128, 4)}
    names = ["model.layers.1.attn.r_proj", "model.layers.1.attn.k_proj"]
    tensors = {f"base_model.model.{n}.{p}": t.clone() for n in names for p, t in pair.items()}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"lora_alpha": 8, "alpha_pattern": {pattern: 2}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    found = read_adapter(tmp_path)
    assert [found.scale_of(f"blocks.1.att.{name}") for name in ("receptance", "key")] == [2 / 4, 8 / 4]
