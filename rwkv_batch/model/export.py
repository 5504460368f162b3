"""Writes a model to a `.pth`, `.safetensors` or GGUF file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from native import safetensors
from rwkv_batch.model.files import WRITTEN_DTYPES, WRITTEN_SUFFIXES
from rwkv_batch.model.files.gguf import ARCHITECTURE, RWKV7_ARCHITECTURE
from rwkv_batch.model.files.gguf_blocks import BlockTensor, encode_q8_0
from rwkv_batch.model.files.gguf_writer import Entry, Value, write_gguf
from rwkv_batch.model.gguf_names import names_of_gguf
from rwkv_batch.model.mmap_release import release
from rwkv_batch.model.state import HEAD_SIZE
from rwkv_batch.model.weights import Weights
from rwkv_batch.tokenizer import Tokenizer

_FILE_TYPES = {"float32": 0, "float16": 1, "q8_0": 7, "bfloat16": 32}
"""`general.file_type` of GGUF"""
_PIECE_NUMBERS = 1 << 22
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5
"""Kinds of tokens in GGUF"""
_END_OF_TURN = 261
_CONTEXT = 1 << 20
"""`rwkv7.context_length`; a recurrent state has no limit"""


def default_dtype(weights: Weights) -> str:
    """Return the type of most matrices as WRITTEN_DTYPES names it: "bf16" for blocks and other types."""
    stored = weights.tensors["blocks.0.att.key.weight"].dtype
    found = (name for name, dtype in WRITTEN_DTYPES.items() if str(stored) == f"torch.{dtype}")
    return next(found, "bf16")


def write_model(weights: Weights, path: Path, dtype: str) -> None:
    """Write a model with matrices of `dtype`. The path's suffix chooses the format.

    Raises OSError, and ValueError for an existing file, or a type or a version that the format does not have.
    """
    if path.exists():
        raise ValueError(f"{path} exists; give a new file")
    if path.suffix not in WRITTEN_SUFFIXES:
        raise ValueError(f"{path} ends in {path.suffix!r}; allowed are {', '.join(WRITTEN_SUFFIXES)}")
    if path.suffix == ".gguf" and weights.shape.version != "RWKV-7":
        raise ValueError(f"GGUF is written for RWKV-7 only, not for {weights.shape.version}; write .safetensors")
    if path.suffix != ".gguf" and dtype not in ("fp32", "fp16", "bf16"):
        raise ValueError(f"{path.suffix} has no type {dtype}; give --dtype bf16, fp16 or fp32, or write .gguf")
    partial_file = path.with_name(f".writing-{path.name}")
    try:
        with partial_file.open("wb") as file:
            if path.suffix == ".gguf":
                _write_gguf(file, weights, WRITTEN_DTYPES[dtype], path.stem)
            elif path.suffix == ".safetensors":
                _write_safetensors(file, weights.tensors, WRITTEN_DTYPES[dtype])
            else:
                stored = getattr(torch, WRITTEN_DTYPES[dtype])
                torch.save({name: tensor.to(stored).contiguous() for name, tensor in weights.tensors.items()}, file)
        partial_file.replace(path)
    finally:
        partial_file.unlink(missing_ok=True)


def _write_safetensors(file: IO[bytes], tensors: Mapping[str, Tensor], dtype: str) -> None:
    size = getattr(torch, dtype).itemsize
    entries = {
        name: safetensors.Entry(dtype, tuple(tensor.shape), tensor.numel() * size) for name, tensor in tensors.items()
    }
    file.write(safetensors.header(entries, {"format": "pt"}))
    for tensor in tensors.values():
        file.writelines(_encoded(tensor, dtype))


def _write_gguf(file: IO[bytes], weights: Weights, dtype: str, name: str) -> None:
    """Write matrices as `dtype`. Vectors, norms, shifts and w1, w2 are fp32, as llama.cpp expects."""
    tensors = names_of_gguf(weights.tensors)
    entries = [
        Entry(one, kind, tuple(tensor.shape), partial(_encoded, tensor, kind))
        for one, tensor in tensors.items()
        for kind in (_kind(one, tensor, dtype),)
    ]
    write_gguf(file, {**_metadata(weights, name), "general.file_type": _FILE_TYPES[dtype]}, entries)


def _kind(name: str, tensor: Tensor, dtype: str) -> str:
    if tensor.dim() != 2 or name.endswith(("mix_w1.weight", "mix_w2.weight")):
        return "float32"
    return "float16" if dtype == "q8_0" and tensor.shape[1] % 32 else dtype


def _encoded(tensor: Tensor, dtype: str) -> Iterator[memoryview]:
    """Yield a tensor's bytes [...] in pieces. At the end, release the file's pages from memory."""
    whole = tensor.decode() if isinstance(tensor, BlockTensor) else tensor
    flat = whole.contiguous().reshape(-1)
    for piece in flat.split(_PIECE_NUMBERS):
        stored = encode_q8_0(piece.float().view(-1, 32)) if dtype == "q8_0" else piece.to(getattr(torch, dtype))
        yield stored.reshape(-1).view(torch.uint8).numpy().data
    release(tensor)


def _metadata(weights: Weights, name: str) -> dict[str, Value]:
    shape, prefix = weights.shape, RWKV7_ARCHITECTURE
    table = Tokenizer().byte_table
    tokens = [_token(i, table[i] if i < len(table) else b"") for i in range(shape.vocab)]
    kinds = [_NORMAL if i < len(table) and table[i] else _UNUSED for i in range(shape.vocab)]
    return {
        ARCHITECTURE: prefix,
        "general.name": name,
        f"{prefix}.context_length": _CONTEXT,
        f"{prefix}.embedding_length": shape.width,
        f"{prefix}.block_count": shape.layers,
        f"{prefix}.feed_forward_length": shape.ffn,
        f"{prefix}.attention.head_count": 0,
        f"{prefix}.attention.layer_norm_epsilon": 1e-5,
        f"{prefix}.wkv.head_size": HEAD_SIZE,
        f"{prefix}.attention.decay_lora_rank": shape.decay_rank,
        f"{prefix}.attention.iclr_lora_rank": shape.a_rank,
        f"{prefix}.attention.value_residual_mix_lora_rank": shape.v_rank,
        f"{prefix}.attention.gate_lora_rank": shape.gate_rank,
        "tokenizer.ggml.model": "rwkv",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [_CONTROL, *kinds[1:]],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.eot_token_id": _END_OF_TURN,
        "tokenizer.chat_template": "rwkv-world",
        "general.quantization_version": 2,
    }


def _token(number: int, data: bytes) -> str:
    """Return a token as GGUF has it: the inside of a Python bytes literal."""
    if number == 0:
        return "<s>"
    return repr(data)[2:-1] if data else f"[PAD{number}]"
