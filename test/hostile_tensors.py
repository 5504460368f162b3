"""Tensor files as an attacker would write them: small, and expensive for a reader that trusts them."""

from __future__ import annotations

import json
import pickle
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch

_TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"
_STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQ"
"""The persistent id of a storage of one number."""
_8_GIB = b"\x8a\x05\x00\x00\x00\x00\x02"
_NAME = b"X\x01\x00\x00\x00w"


def write_pth(path: Path, code: bytes, storages: dict[str, bytes] | None = None, **more: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", code)
        archive.writestr("archive/version", "3\n")  # torch.load opens no archive without it
        archive.writestr("archive/byteorder", "little")
        for key, content in ({"0": b"\0" * 4} if storages is None else storages).items():
            archive.writestr(f"archive/data/{key}", content)
        for name, content in more.items():
            archive.writestr(f"archive/{name}", content)
    return path


def write_safetensors(path: Path, header: object, body: bytes = b"") -> Path:
    """Write a safetensors file; `header` may be encoded text."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path


def _tensor(shape: bytes, strides: bytes, offset: bytes = b"K\x00") -> bytes:
    return b"\x80\x02}" + _NAME + _TENSOR + b"(" + _STORAGE + offset + shape + strides + b"\x89N" + b"tRs."


def _nested_tuple(depth: int) -> bytes:
    """Return code for nested tuples whose hash takes 2^depth steps. Each tuple has two references to the next one."""
    return b")" + b"".join(b"q%c" % i + b"h%c" % i + b"\x86" for i in range(depth))


PICKLES = {
    "bytearray": b"\x80\x02}" + _NAME + b"cbuiltins\nbytearray\n" + _8_GIB + b"\x85Rs.",
    "a long bytearray": b"\x80\x05}\x96" + struct.pack("<Q", 1 << 40) + b"x.",
    "a far memo": b"\x80\x02}r\xff\xff\xff\x7f]s.",
    "a key that is slow to hash": b"\x80\x02}" + _nested_tuple(40) + b"K\x01s.",
    "a storage of any size": b"\x80\x02}" + _NAME + b"ctorch\nFloatStorage\n" + _8_GIB + b"\x85Rs.",
    "a tensor beyond its storage": _tensor(b"J\x00\x00\x00\x40\x85", b"K\x01\x85"),
    "a negative offset": _tensor(b"K\x01\x85", b"K\x01\x85", b"J\xff\xff\xff\xff"),
    "a negative stride": _tensor(b"K\x02\x85", b"J\xff\xff\xff\xff\x85"),
    "one number for all": _tensor(b"J\x00\x00\x00\x40\x85", b"K\x00\x85"),
    "many dimensions": _tensor(b"(" + b"K\x01" * 1000 + b"t", b"(" + b"K\x01" * 1000 + b"t"),
    "code": pickle.dumps({"w": pickle.Pickler}, protocol=2),
    "no end": b"\x80\x02}",
    "nothing to take": b"\x80\x02s.",
    "no mark": b"\x80\x02}u.",
    "a set": b"\x80\x04\x8f.",
    "an unknown storage": _tensor(b"K\x01\x85", b"K\x01\x85").replace(b"\x00\x00\x000X", b"\x00\x00\x009X"),
}


def hostile_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Write hostile files into a folder; yield each with its name."""
    entry = b'{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    header = b"{" + b",".join(b'"%06d":' % i + entry for i in range(100_000)) + b"}"
    yield "a header of many names", write_safetensors(folder / "names.safetensors", header)
    yield "a header of lists", write_safetensors(folder / "lists.safetensors", b"[" + b"[]," * 2_000_000 + b"[]]")
    yield "deep nesting", write_safetensors(folder / "deep.safetensors", b"[" * 1_000_000)
    (folder / "beyond.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    yield "a header beyond the file", folder / "beyond.safetensors"
    bad = {"w": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4]}}
    yield "a shape beyond its bytes", write_safetensors(folder / "shape.safetensors", bad, b"\0" * 4)

    for name, code in PICKLES.items():
        yield name, write_pth(folder / f"{name}.pth", code)
    many = b"\x80\x02}(" + b"".join(b"X\x06\x00\x00\x00%06dN" % i for i in range(60_000)) + b"u."
    yield "a pickle of many names", write_pth(folder / "names.pth", many)
    yield "a long pickle", write_pth(folder / "long.pth", b"\x80\x02}" + b"N0" * (5 << 20) + b".")
    with zipfile.ZipFile(folder / "members.pth", "w") as archive:
        for i in range(17_000):
            archive.writestr(f"archive/data/{i}", b"")
    yield "an archive of many files", folder / "members.pth"
    with zipfile.ZipFile(folder / "bomb.pth", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}" + b"N" * (16 << 20))
    yield "a compressed pickle", folder / "bomb.pth"
    for name, content in gguf_files():
        (folder / f"{name}.gguf").write_bytes(content)
        yield name, folder / f"{name}.gguf"


def gguf_files() -> Iterator[tuple[str, bytes]]:
    """Yield small GGUF files of an attacker."""
    count = struct.Struct("<Q").pack

    def text(data: bytes) -> bytes:
        return struct.pack("<Q", len(data)) + data

    start, kind = b"GGUF" + struct.pack("<I", 3), text(b"general.architecture") + struct.pack("<I", 8) + text(b"rwkv7")
    far, many = count(1 << 62), count(1 << 40)
    listed = text(b"a") + struct.pack("<I", 9)

    def tensor(*sizes: int, offset: int = 0) -> bytes:
        return text(b"w") + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, 0, offset)

    yield "a gguf of many values", start + count(0) + many + kind
    yield "a gguf of many tensors", start + many + count(1) + kind
    yield "a gguf of small values", start + count(0) + count(1 << 19) + kind + (count(0) + b"\0\0\0\0\0") * (1 << 19)
    yield "a gguf of small tensors", start + count(1 << 17) + count(1) + kind + tensor(1) * (1 << 17)
    yield "a gguf with a far text", start + count(0) + count(1) + far
    yield "a gguf with a long list", start + count(0) + count(2) + kind + listed + struct.pack("<I", 10) + far
    yield "a gguf with a list of many texts", start + count(0) + count(2) + kind + listed + struct.pack("<I", 8) + many
    texts = struct.pack("<I", 8) + count(1 << 20) + count(0) * (1 << 20)
    yield "a gguf of empty texts", start + count(0) + count(2) + kind + listed + texts
    lists = struct.pack("<I", 9) + count(1)
    yield "a gguf with nested lists", start + count(0) + count(2) + kind + listed + lists * 1000
    yield "a gguf of a large tensor", start + count(1) + count(1) + kind + tensor(1 << 31, 1 << 31) + b"\0" * 64
    yield "a gguf of an impossible tensor", start + count(1) + count(1) + kind + tensor(*[1 << 47] * 4)
    yield "a gguf of many dimensions", start + count(1) + count(1) + kind + tensor(*[1] * 1000)
    yield "a gguf with a far tensor", start + count(1) + count(1) + kind + tensor(4, offset=1 << 47) + b"\0" * 64
    yield "a gguf of equal tensors", start + count(2) + count(1) + kind + tensor(4) * 2 + b"\0" * 64


def valid_files(folder: Path) -> Iterator[Path]:
    from safetensors.torch import save_file

    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4).to(torch.int64), "c": torch.ones(1).half()}
    save_file(tensors, folder / "valid.safetensors", metadata={"about": "numbers"})
    yield folder / "valid.safetensors"
    torch.save(tensors | {"t": torch.arange(6.0).view(2, 3).t()}, folder / "valid.pth")
    yield folder / "valid.pth"
    torch.save(torch.nn.Linear(2, 3).state_dict(), folder / "module.pth")
    yield folder / "module.pth"
