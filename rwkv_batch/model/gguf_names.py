"""RWKV-7 in GGUF files: names and orientations from and to those of .pth files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from rwkv_batch.model.layer import MIX_ORDER
from rwkv_batch.model.state import HEAD_SIZE

_TABLE = "token_embd.weight"
_OUTSIDE = {
    _TABLE: "emb.weight",
    "output.weight": "head.weight",
    "token_embd_norm": "blocks.0.ln0",
    "output_norm": "ln_out",
}
_NORMS = {"attn_norm": "ln1", "attn_norm_2": "ln2", "time_mix_ln": "att.ln_x"}
_LAYER = re.compile(r"^blk\.(\d{1,4})\.(\w+?)(?:\.(weight|bias))?$")
_MATRIX = re.compile(r"(time|channel)_mix_(receptance|key|value|output)")
_FUSED = "time_mix_lerp_fused"
"""The token-shift weights in one tensor [6, 1, 1, C], in MIX_ORDER."""


def names_of_pth(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return a GGUF file's tensors [...] under the names of .pth files. Tensors of other files stay unchanged."""
    if _TABLE not in tensors:
        return tensors
    return {native: converted for name, tensor in tensors.items() for native, converted in _converted(name, tensor)}


def _converted(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor under its names in .pth files. Unknown names stay, to be refused later."""
    layer = _LAYER.match(name)
    if layer is None:
        stem, _, part = name.rpartition(".")
        yield _OUTSIDE.get(name, f"{_OUTSIDE[stem]}.{part}" if stem in _OUTSIDE else name), tensor
        return
    number, inner, part = layer.groups()
    block = f"blocks.{number}"
    if inner in _NORMS:
        yield f"{block}.{_NORMS[inner]}.{part}", tensor
    elif matrix := _MATRIX.fullmatch(inner):
        yield f"{block}.{'att' if matrix[1] == 'time' else 'ffn'}.{matrix[2]}.weight", tensor
    elif inner == _FUSED and tensor.dim() and len(tensor) <= len(MIX_ORDER):
        yield from ((f"{block}.att.x_{letter}", one) for letter, one in zip(MIX_ORDER, tensor, strict=False))
    elif inner == "channel_mix_lerp_k":
        yield f"{block}.ffn.x_k", tensor
    elif lerp := re.fullmatch(f"time_mix_lerp_([{MIX_ORDER}])", inner):
        yield f"{block}.att.x_{lerp[1]}", tensor
    elif low_rank := re.fullmatch(r"time_mix_([wavg][12])", inner):
        if (number, low_rank[1][0]) != ("0", "v"):  # layer 0 has no value residual; files hold another tensor
            yield f"{block}.att.{low_rank[1]}", tensor.t() if tensor.dim() == 2 else tensor
    elif inner == "time_mix_r_k":
        yield f"{block}.att.r_k", tensor.reshape(-1, HEAD_SIZE) if tensor.numel() % HEAD_SIZE == 0 else tensor
    elif vector := re.fullmatch(r"time_mix_([wav]0|k_k|k_a)", inner):
        if (number, vector[1]) != ("0", "v0"):
            yield f"{block}.att.{vector[1]}", tensor
    else:
        yield name, tensor


def names_of_gguf(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a .pth file's tensors [...] under the names of GGUF. They also have the orientations of GGUF."""
    outside = {native: name for name, native in _OUTSIDE.items()}
    norms = {native: name for name, native in _NORMS.items()}
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stem, _, part = name.rpartition(".")
        layer = re.match(r"blocks\.(\d+)\.((att|ffn)\.)?(\w+)", name)
        if name in outside:
            found[outside[name]] = tensor
        elif stem in outside:
            found[f"{outside[stem]}.{part}"] = tensor
        elif layer is not None:
            number, _, mix, inner = layer.groups()
            block = f"blk.{number}"
            norm = norms.get(f"{mix}.{inner}" if mix else inner)
            if norm is not None:
                found[f"{block}.{norm}.{part}"] = tensor
            elif inner in ("receptance", "key", "value", "output"):
                found[f"{block}.{'time' if mix == 'att' else 'channel'}_mix_{inner}.weight"] = tensor
            elif mix == "ffn":
                found[f"{block}.channel_mix_lerp_k.weight"] = tensor.reshape(-1)
            elif not inner.startswith("x_") and (number, inner[0]) != ("0", "v"):
                is_low_rank = re.fullmatch("[wavg][12]", inner) is not None
                found[f"{block}.time_mix_{inner}.weight"] = tensor.t() if is_low_rank else tensor.reshape(-1)
    for number in range(sum(name.endswith(".att.r_k") for name in tensors)):
        block = f"blk.{number}"
        mixes = [tensors[f"blocks.{number}.att.x_{letter}"].reshape(1, 1, -1) for letter in MIX_ORDER]
        found[f"{block}.{_FUSED}.weight"] = torch.stack(mixes)
    for digit in "012":  # llama.cpp reads them but layer 0 does not use them
        found[f"blk.0.time_mix_v{digit}.weight"] = found[f"blk.0.time_mix_a{digit}.weight"]
    return found
