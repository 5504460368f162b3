"""RWKV-7 in Hugging Face folders: two layouts of names, in one file or in shards. Also the layout of ai00's files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from torch import Tensor

from rwkv_batch.model.layer import MIX_ORDER
from rwkv_batch.model.state import ModelShape
from rwkv_batch.model.tensor_files import FileError, read_json_file, read_tensors

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
_PREFIX = "rwkv7."
"""Prefix of RWKV's own names, which are those of .pth files."""
_LAYER = re.compile(r"^model\.layers\.(\d+)\.(.+)$")
_MODULE = re.compile(r"\bmodel\.layers\.(\d+)\.(attn\.[rkvo]_proj|ffn\.(?:key|value))\b")
_OUTSIDE = {
    "model.embeddings.weight": "emb.weight",
    "model.norm.weight": "ln_out.weight",
    "model.norm.bias": "ln_out.bias",
    "lm_head.weight": "head.weight",
}
_PARTS = {"pre_norm": "ln0", "attn_norm": "ln1", "ffn_norm": "ln2", "attn": "att", "ffn": "ffn"}
_PROJECTIONS = {"r_proj": "receptance", "k_proj": "key", "v_proj": "value", "o_proj": "output", "g_norm": "ln_x"}
_LOW_RANK = {"0.weight": "1", "2.weight": "2", "2.bias": "0"}
"""End of a low-rank pair's name -> the number after its letter: w1, w2 and their bias w0."""
_PAIR = re.compile(r"\.att\.([wavg]|time_maa_w|time_decay_w)[12]$")
_ALL_MIXES = "attn.x_x"
"""Older files store the six token-shift weights as one tensor [6, C], in MIX_ORDER."""


class _Index(msgspec.Struct):
    """The shard of each tensor."""

    weight_map: dict[str, str]


class _Config(msgspec.Struct):
    """Sizes in a folder's config.json."""

    num_hidden_layers: int | None = None
    hidden_size: int | None = None
    head_dim: int | None = None


def is_folder(path: Path) -> bool:
    return path.is_dir() and ((path / INDEX).is_file() or (path / WHOLE).is_file())


def read_folder(path: Path) -> dict[str, Tensor]:
    """Returns the tensors [...] by the names in the folder's files.

    Raises FileError with the missing file or tensor.
    """
    index = path / INDEX
    if not index.is_file():
        return dict(read_tensors(path / WHOLE))
    shard_of = read_json_file(index, _Index, "model").weight_map
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(shard_of.values())):
        if Path(shard).name != shard:
            raise FileError(f"{index} names the shard {shard!r}, which is not a file of its folder; download it again")
        tensors |= read_tensors(path / shard)
    missing = [name for name in shard_of if name not in tensors]
    if missing:
        raise FileError(f"{index} names {len(missing)} tensors that its shards lack ({missing[0]}); download it again")
    return tensors


def check_config(path: Path, shape: ModelShape) -> None:
    """Check that a folder's config.json, if there is one, describes this model. Raises FileError."""
    file = path / CONFIG
    if not file.is_file():
        return
    config = read_json_file(file, _Config, "model")
    real = {"num_hidden_layers": shape.layers, "hidden_size": shape.width, "head_dim": shape.head_size}
    for name, size in real.items():
        if (given := getattr(config, name)) not in (None, size):
            raise FileError(f"{file} has {name} {given}, the tensors have {size}; download the model again")


def native_names(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the tensors [...] under the names of .pth files.

    They also have the shapes of .pth files. The given tensors may have any layout.
    """
    if any(name.startswith(f"{_PREFIX}blocks.") for name in tensors):
        return {_OUTSIDE.get(name, name.removeprefix(_PREFIX)): tensor for name, tensor in tensors.items()}
    if not any(_LAYER.match(name) and ".attn.w_lora." in name for name in tensors):
        return _from_web_rwkv(tensors)
    return {native: converted for name, tensor in tensors.items() for native, converted in _converted(name, tensor)}


def _from_web_rwkv(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the tensors [...] of a .st file as in .pth files.

    The .st file is one of ai00 or web-rwkv; others stay unchanged. Low-rank pairs are transposed there, and RWKV-5 and
    6 have older names.
    """
    is_6 = is_transposed = "blocks.0.att.time_mix_w1" in tensors
    if is_6 or {"blocks.0.att.time_first", "blocks.0.att.gate.weight"} <= tensors.keys():
        tensors = {_older_name(name, is_6): tensor for name, tensor in tensors.items()}
    width, first = (tensors.get(name) for name in ("blocks.0.ln1.weight", "blocks.0.att.w1"))
    if width is not None and first is not None and first.dim() == 2:
        is_transposed = len(first) != width.numel() == first.shape[1]
    if not is_transposed:
        return tensors
    return {
        name: tensor.transpose(-1, -2) if _PAIR.search(name) and tensor.dim() > 1 else tensor
        for name, tensor in tensors.items()
    }


def _older_name(name: str, is_6: bool) -> str:
    name = name.replace(".time_first", ".time_faaaa")
    return name.replace(".time_mix_", ".time_maa_") if is_6 else name


def native_module(name: str) -> str:
    """Replace the module in an adapter's tensor name. The new name is the module's name in .pth files."""

    def module(found: re.Match[str]) -> str:
        part, _, last = found[2].partition(".")
        return f"blocks.{found[1]}.{_PARTS[part]}.{_PROJECTIONS.get(last, last)}"

    return re.sub(r"\blm_head\b", "head", _MODULE.sub(module, name))


def huggingface_module(name: str) -> str:
    """Return the module's name in Hugging Face's files, for a matrix `blocks.{i}.att.key` or `blocks.{i}.ffn.key`."""
    _, layer, part, last = name.split(".")
    theirs = next(one for one, own in _PROJECTIONS.items() if own == last) if part == "att" else last
    return f"model.layers.{layer}.{'attn' if part == 'att' else part}.{theirs}"


def _converted(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor under this project's names. Unknown names stay, to be refused later."""
    layer = _LAYER.match(name)
    if layer is None:
        yield _OUTSIDE.get(name, name), tensor
        return
    block, rest = f"blocks.{layer[1]}", layer[2]
    if rest == _ALL_MIXES:
        yield from ((f"{block}.att.x_{letter}", one) for letter, one in zip(MIX_ORDER, tensor, strict=True))
        return
    part, _, inner = rest.partition(".")
    low_rank = re.fullmatch(r"([wavg])_lora\.lora\.(\d\.\w+)", inner)
    if low_rank is not None and low_rank[2] in _LOW_RANK:
        transposed = tensor.t() if tensor.dim() == 2 else tensor
        yield f"{block}.att.{low_rank[1]}{_LOW_RANK[low_rank[2]]}", transposed
        return
    first, dot, last = inner.partition(".")
    first = _PROJECTIONS.get(first, first) if part == "attn" else first
    yield f"{block}.{_PARTS.get(part, part)}.{first}{dot}{last}", tensor
