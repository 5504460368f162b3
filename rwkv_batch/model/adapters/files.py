"""Reads adapter files: the tensors of each weight, and their scale.

RWKV-PEFT and RWKV-Infer store a dict of `blocks.0.att.key.lora_A` and the like, and whole tensors under the model's own
names. PEFT stores safetensors next to an `adapter_config.json`.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic_core import SchemaError, SchemaValidator, core_schema
from torch import Tensor

from rwkv_batch.model.huggingface import native_module
from rwkv_batch.model.tensor_files import MAX_VALUE, FileError, FileKind, read_json_file, read_tensors
from rwkv_batch.model.weights import FLOATS
from rwkv_batch.models_folder import ADAPTER_CONFIG

ADAPTER_FILE = FileKind(
    "adapter file", "adapter file", "adapters", ".pth or .safetensors", (".pth", ".pt", ".bin", ".safetensors")
)
ADAPTER_MODEL = "adapter_model"
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
_PLAIN = re.compile(r"[\w.]+")
MAX_SCALE = 1000
_FAR = 1e300
"""Larger integers of JSON are clamped to this."""
_MAX_PATTERNS = 4096
_MAX_EXPRESSIONS = 16
"""Largest number of regular expressions. One may take 10 MB and 0.1 s."""

Alphas = tuple[tuple[str | SchemaValidator, float], ...]
"""(end of a weight's name or a validator, alpha of the matching weights)"""


@dataclass(slots=True)
class ExpertParts:
    """Tensors of one layer's mixture of experts, as in the file."""

    router: Tensor | None = None
    """[experts - 1, C]"""
    parts: dict[tuple[int, str], dict[str, Tensor]] = field(default_factory=dict)
    """(expert, "key" or "value") -> part"""


@dataclass(frozen=True, slots=True)
class Adapter:
    path: Path
    parts: Mapping[str, Mapping[str, Tensor]]
    """Weight of the model by the file's name (without .weight) -> part ("lora_A", "bone", ...; "": a whole tensor)"""
    scale: float | None
    """as given with the file; None: as the file says"""
    config: Mapping[str, Any]
    """PEFT's; {}: none"""
    digest: str
    """of all tensors, and of the scale"""
    experts: Mapping[int, ExpertParts] = field(default_factory=dict)
    """of a mixture of experts (MoLE), by layer"""
    active: int = 0
    """experts per token; 0: not in the file"""
    alphas: Alphas = ()
    """of single weights; the first match counts, as in PEFT"""
    modules: Mapping[str, str] = field(default_factory=dict)
    """weight of the model -> its name in the file, if the file uses another layout"""

    def scale_of(self, target: str) -> float:
        """Return a low-rank pair's scale. Raises FileError if neither the request nor the file has a scale."""
        if self.scale is not None:
            return self.scale
        names = (self.modules.get(target, target), target)
        matching = (alpha for end, alpha in self.alphas if any(_ends(name, end) for name in names))
        alpha = next(matching, self.config.get("lora_alpha"))
        if isinstance(alpha, bool) or not isinstance(alpha, int | float):
            raise FileError(
                f"adapter file {self.path} has no scale (alpha / rank); give one: `scale` in a request, or FILE:2.0 "
                "on a command line"
            )
        rank = self.parts[target]["lora_A"].shape[0]
        scale = max(-_FAR, min(alpha, _FAR)) / (math.sqrt(rank) if self.config.get("use_rslora") else rank)
        return _checked(self.path, scale)


def split_scale(entry: str) -> tuple[Path, float | None]:
    """Split `FILE:2.0`; None without a scale."""
    file, _, scale = entry.rpartition(":")
    try:
        return Path(file), float(scale)
    except ValueError:
        return Path(entry), None


def _checked(path: Path, scale: float) -> float:
    if not abs(scale) <= MAX_SCALE:
        raise FileError(f"adapter file {path}: the scale {scale:g} is larger than {MAX_SCALE}; give a smaller one")
    return scale


def read_adapter(path: Path, scale: float | None = None) -> Adapter:
    """Read an adapter's file.

    `path`: a file, or a PEFT folder. Raises FileError with the file and the reason.
    """
    if scale is not None:
        _checked(path, scale)
    if path.is_dir():
        found = [path / f"{ADAPTER_MODEL}{suffix}" for suffix in (".safetensors", ".bin")]
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
            raise FileError(f"adapter file {path}: tensor {name!r} does not belong to a weight of an RWKV-7 model")
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
    """Return the experts per token of `moe_info` [experts, active]; 0 without it. Raises FileError."""
    if info is None or info.numel() < 2:
        return 0
    active = info.flatten()[1].item()
    if active != int(active):
        raise FileError(f"adapter file {path}: {_MOE_INFO} has {active} active experts; it must be a whole number")
    return int(active)


def _is_of_experts(name: str, tensor: Tensor, experts: dict[int, ExpertParts]) -> bool:
    """Adds a tensor of a mixture of experts to `experts`. Returns False for any other tensor."""
    if router := _ROUTER.search(name):
        experts.setdefault(int(router[1]), ExpertParts()).router = tensor
        return True
    found = _EXPERT.search(name)
    if found is None:
        return False
    number = int(found["number"] if found["folder"] is None else found["folder"])  # the folder's number has priority
    of_layer = experts.setdefault(int(found["layer"]), ExpertParts())
    of_layer.parts.setdefault((number, found["map"]), {})[found["part"]] = tensor
    return True


def _check(path: Path, name: str, tensor: Tensor) -> None:
    """Check a file's tensor names. Raises FileError for a tensor that no supported adapter has."""
    if name.endswith("att.time_state"):
        raise FileError(f"adapter file {path} has a tuned state ({name!r}); load it with --state")
    if tensor.dtype not in (FLOATS if name != _MOE_INFO else (*FLOATS, *_INTEGERS)):
        raise FileError(f"adapter file {path}: tensor {name!r} is {tensor.dtype}; it must be bf16, fp16, fp32 or fp64")
    if not tensor.isfinite().all():
        raise FileError(f"adapter file {path}: tensor {name!r} has NaN or infinity; the file is damaged")
    if tensor.numel() and (largest := tensor.abs().max().item()) > MAX_VALUE:
        raise FileError(
            f"adapter file {path}: tensor {name!r} has {largest:.3g}, at most {MAX_VALUE:.0f} is valid; it is damaged"
        )


def _config(path: Path) -> Mapping[str, Any]:
    """Read PEFT's settings next to the file. Raises FileError for unsupported settings."""
    file = path.with_name(ADAPTER_CONFIG)
    if not path.stem.startswith(ADAPTER_MODEL) or not file.is_file():
        return {}
    config = read_json_file(file, dict[str, Any], "adapter")
    if config.get("fan_in_fan_out"):
        raise FileError(f"{file} sets fan_in_fan_out, which no RWKV-7 weight uses")
    init = str(config.get("init_lora_weights", ""))
    if init.startswith(("pissa", "olora", "corda")):
        raise FileError(
            f"{file} has init_lora_weights {init!r}, which needs modified base weights; save it with "
            "path_initial_model_for_weight_conversion, as a plain LoRA"
        )
    return config


def _alphas(file: Path, config: Mapping[str, Any]) -> Alphas:
    """Return the alphas of `alpha_pattern`. Raises FileError.

    Its keys are regular expressions for ends of weights' names. The patterns are untrusted, so they are Rust's, which
    run in linear time.
    """
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise FileError(f"{file}: alpha_pattern must be an object of names with their alphas")
    if len(patterns) > _MAX_PATTERNS:
        raise FileError(f"{file}: alpha_pattern has {len(patterns)} names; at most {_MAX_PATTERNS} are allowed")
    if sum(not _PLAIN.fullmatch(pattern) for pattern in patterns) > _MAX_EXPRESSIONS:
        raise FileError(f"{file}: alpha_pattern has more than {_MAX_EXPRESSIONS} regular expressions; use plain names")
    found: list[tuple[str | SchemaValidator, float]] = []
    for pattern, alpha in patterns.items():
        if isinstance(alpha, bool) or not isinstance(alpha, int | float):
            raise FileError(f"{file}: alpha_pattern {pattern[:80]!r} must be a number")
        schema = core_schema.str_schema(pattern=rf"^(?:.*\.)?(?:{pattern})$", regex_engine="rust-regex")
        try:
            found.append((pattern if _PLAIN.fullmatch(pattern) else SchemaValidator(schema), float(alpha)))
        except (SchemaError, OverflowError) as error:
            why = str(error).splitlines()[-1].strip()
            raise FileError(
                f"{file}: alpha_pattern {pattern[:80]!r} is not a valid pattern with its alpha ({why})"
            ) from error
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
