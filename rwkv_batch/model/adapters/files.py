"""Adapter files: which tensors belong to which weight of the model, and with what scale they act.

RWKV-PEFT's and RWKV-Infer's form is a dict of `blocks.0.att.key.lora_A` and the like, with weights of the model's own
names to replace; PEFT's is safetensors with an `adapter_config.json` beside them.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from pydantic_core import SchemaError, SchemaValidator, core_schema
from torch import Tensor

from rwkv_batch.model.huggingface import native_module
from rwkv_batch.model.tensor_files import MAX_VALUE, FileError, FileKind, read_tensors
from rwkv_batch.model.weights import FLOATS
from rwkv_batch.models_folder import ADAPTER_CONFIG

ADAPTER_FILE = FileKind("adapter file", "adapter file", "adapters", "give", (".pth", ".pt", ".bin", ".safetensors"))
_MODEL = "adapter_model"
_NAME = re.compile(
    r"(?:^|\.)(?P<target>(?:blocks\.\d+\.|emb\b|head\b|ln_out\b).*?)"
    r"(?:\.(?P<part>lora_A|lora_B|lora_M|lora_magnitude_vector|init_lora_A|init_lora_B|bone|disha|miss)"
    r"(?:_block)?(?:\.default)?(?:\.weight)?)?$"
)
_EXPERT = re.compile(
    r"(?:^|\.)blocks\.(?P<layer>\d+)\.ffn\.(?:expert_(?P<folder>\d+)\.)?(?P<map>key|value)"
    r"\.(?P<part>lora_A|lora_B|bone)_expert_(?P<number>\d+)$"
)
_ROUTER = re.compile(r"(?:^|\.)blocks\.(\d+)\.ffn\.router\.linear\.weight$")
_MOE_INFO = "moe_info"
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
_SHOWN = 3
_PLAIN = re.compile(r"[\w.]+")
MAX_SCALE = 1000
_FAR = 1e300
"""Stands for all that is farther from zero, which JSON's integers may be."""
_MAX_EXPRESSIONS = 16
"""One may take 10 MB and a tenth of a second."""

Alphas = tuple[tuple[str | SchemaValidator, float], ...]
"""The end of a weight's name, or what it is matched with, and the alpha of those that match."""


@dataclass(slots=True)
class ExpertParts:
    """Of one layer's mixture of experts, as the file has them."""

    router: Tensor | None = None
    """[experts - 1, C]"""
    parts: dict[tuple[int, str], dict[str, Tensor]] = field(default_factory=dict)
    """(expert, "key" or "value") -> part"""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter as its file has it."""

    path: Path
    parts: Mapping[str, Mapping[str, Tensor]]
    """Weight of the model, as the file calls it (without .weight) -> part ("lora_A", "bone", …; "" a whole tensor)"""
    scale: float | None
    """As given with the file; None: what the file says."""
    config: Mapping[str, Any]
    """PEFT's; {}: none"""
    digest: str
    """of all tensors, and of the scale"""
    experts: Mapping[int, ExpertParts] = field(default_factory=dict)
    """of a mixture of experts (MoLE), by layer"""
    active: int = 0
    """experts that are mixed for a token; 0: the file does not say it"""
    alphas: Alphas = ()
    """of single weights; as with PEFT the first that matches counts"""
    modules: Mapping[str, str] = field(default_factory=dict)
    """weight of the model -> what the file calls it, where that is another layout's name"""

    def scale_of(self, target: str) -> float:
        """By which a pair of low-rank matrices acts. Raises FileError if nothing says it."""
        if self.scale is not None:
            return self.scale
        names = (self.modules.get(target, target), target)
        own = (alpha for end, alpha in self.alphas if any(_ends(name, end) for name in names))
        alpha = next(own, self.config.get("lora_alpha"))
        if isinstance(alpha, bool) or not isinstance(alpha, int | float):
            raise FileError(
                f"adapter file {self.path} does not say its scale (alpha / rank, or what it was used with); give it as "
                "scale in a request, or behind the name on a command line, as FILE:2.0"
            )
        rank = self.parts[target]["lora_A"].shape[0]
        scale = max(-_FAR, min(alpha, _FAR)) / (math.sqrt(rank) if self.config.get("use_rslora") else rank)
        return _checked(self.path, scale)


def split_scale(entry: str) -> tuple[Path, float | None]:
    """`FILE:2.0` as a path and a scale; None where there is none."""
    file, _, scale = entry.rpartition(":")
    try:
        return Path(file), float(scale)
    except ValueError:
        return Path(entry), None


def _checked(path: Path, scale: float) -> float:
    if not abs(scale) <= MAX_SCALE:
        raise FileError(f"adapter file {path}: its scale is {scale:g}, {MAX_SCALE} is the most; give another one")
    return scale


def read_adapter(path: Path, scale: float | None = None) -> Adapter:
    """The adapter in a file, or in a folder of PEFT's. Raises FileError, naming the file and what is wrong with it."""
    if scale is not None:
        _checked(path, scale)
    if path.is_dir():
        found = [path / f"{_MODEL}{suffix}" for suffix in (".safetensors", ".bin")]
        path = next((file for file in found if file.exists()), path)
    tensors = read_tensors(path, ADAPTER_FILE)
    config = _config(path)
    parts: dict[str, dict[str, Tensor]] = {}
    experts: dict[int, ExpertParts] = {}
    modules: dict[str, str] = {}
    for name, tensor in tensors.items():
        _check(path, name, tensor)
        if name == _MOE_INFO or _is_of_experts(name, tensor, experts):
            continue
        native = native_module(name)
        found_name = _NAME.search(native)
        if found_name is None:
            raise FileError(f"adapter file {path}: tensor {name!r} belongs to no weight of an RWKV-7 model")
        target = found_name["target"].removesuffix(".weight") if found_name["part"] else found_name["target"]
        parts.setdefault(target, {})[found_name["part"] or ""] = tensor
        if native != name:
            modules[target] = name[: len(name) - len(native) + found_name.end("target")]
    if not parts and not experts:
        raise FileError(f"adapter file {path} has no tensors")
    digest = _digest(tensors, scale, config)
    active = _active(path, tensors.get(_MOE_INFO))
    alphas = _alphas(path.with_name(ADAPTER_CONFIG), config)
    return Adapter(path, parts, scale, config, digest, experts, active, alphas, modules)


def _active(path: Path, info: Tensor | None) -> int:
    """Experts mixed for a token, as `moe_info` [experts, active] says; 0: it does not. Raises FileError."""
    if info is None or info.numel() < 2:
        return 0
    active = info.flatten()[1].item()
    if active != int(active):
        raise FileError(
            f"adapter file {path}: {_MOE_INFO} says that {active} experts are active; a whole number is wanted"
        )
    return int(active)


def _is_of_experts(name: str, tensor: Tensor, experts: dict[int, ExpertParts]) -> bool:
    """Whether it is of a mixture of experts, in which it then has its place."""
    if router := _ROUTER.search(name):
        experts.setdefault(int(router[1]), ExpertParts()).router = tensor
        return True
    found = _EXPERT.search(name)
    if found is None:
        return False
    number = int(found["number"] if found["folder"] is None else found["folder"])  # the folder's, where there is one
    of_layer = experts.setdefault(int(found["layer"]), ExpertParts())
    of_layer.parts.setdefault((number, found["map"]), {})[found["part"]] = tensor
    return True


def _check(path: Path, name: str, tensor: Tensor) -> None:
    """Raises FileError for what no adapter of ours has."""
    if name.endswith("att.time_state"):
        raise FileError(f"adapter file {path} has a tuned state ({name!r}); give that by --state")
    if tensor.dtype not in (FLOATS if name != _MOE_INFO else (*FLOATS, *_INTEGERS)):
        raise FileError(f"adapter file {path}: tensor {name!r} is {tensor.dtype}; bf16, fp16, fp32 or fp64 is wanted")
    if not tensor.isfinite().all():
        raise FileError(f"adapter file {path}: tensor {name!r} holds NaN or infinity; the file is damaged")
    if tensor.numel() and (largest := tensor.abs().max().item()) > MAX_VALUE:
        raise FileError(
            f"adapter file {path}: tensor {name!r} holds {largest:.3g}, {MAX_VALUE:.0f} is the most; it is damaged"
        )


def _config(path: Path) -> Mapping[str, Any]:
    """PEFT's configuration beside its file. Raises FileError for what it says and nothing here does."""
    file = path.with_name(ADAPTER_CONFIG)
    if not path.stem.startswith(_MODEL) or not file.is_file():
        return {}
    try:
        config = msgspec.json.decode(file.read_bytes())
    except (OSError, msgspec.MsgspecError) as error:
        raise FileError(f"{file} cannot be read ({error}); fetch the adapter again") from error
    if not isinstance(config, dict):
        raise FileError(f"{file} is no JSON object; fetch the adapter again")
    if config.get("fan_in_fan_out"):
        raise FileError(f"{file} says fan_in_fan_out, which no RWKV-7 weight is")
    started = str(config.get("init_lora_weights", ""))
    if started.startswith(("pissa", "olora", "corda")):
        raise FileError(
            f"{file} says init_lora_weights {started!r}: such an adapter holds for the weights that were left over; "
            "save it with path_initial_model_for_weight_conversion, as a plain LoRA"
        )
    return config


def _alphas(file: Path, config: Mapping[str, Any]) -> Alphas:
    """`alpha_pattern`: ends of weights' names, as regular expressions. Raises FileError.

    Whoever brings the file may write any: they are Rust's, which take time in proportion to the name.
    """
    given = config.get("alpha_pattern") or {}
    if not isinstance(given, dict):
        raise FileError(f"{file}: alpha_pattern must be an object of names with their alphas")
    if sum(not _PLAIN.fullmatch(pattern) for pattern in given) > _MAX_EXPRESSIONS:
        raise FileError(f"{file}: alpha_pattern has more than {_MAX_EXPRESSIONS} regular expressions; write names out")
    found: list[tuple[str | SchemaValidator, float]] = []
    for pattern, alpha in given.items():
        if isinstance(alpha, bool) or not isinstance(alpha, int | float):
            raise FileError(f"{file}: alpha_pattern {pattern[:80]!r} must be a number")
        schema = core_schema.str_schema(pattern=rf"^(?:.*\.)?(?:{pattern})$", regex_engine="rust-regex")
        try:
            found.append((pattern if _PLAIN.fullmatch(pattern) else SchemaValidator(schema), float(alpha)))
        except (SchemaError, OverflowError) as error:
            why = str(error).splitlines()[-1].strip()
            raise FileError(f"{file}: alpha_pattern {pattern[:80]!r} cannot be followed ({why})") from error
    return tuple(found)


def _ends(target: str, end: str | SchemaValidator) -> bool:
    if isinstance(end, str):
        return f".{target}".endswith(f".{end}")
    return end.isinstance_python(target)


def _digest(tensors: Mapping[str, Tensor], scale: float | None, config: Mapping[str, Any]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{scale} {[config.get(name) for name in ('lora_alpha', 'alpha_pattern', 'use_rslora')]};".encode())
    for name in sorted(tensors):
        tensor = tensors[name].float().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)};".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
