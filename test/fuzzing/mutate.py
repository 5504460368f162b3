"""Changes files at random: their bytes, the values of their JSON, the opcodes of their pickles."""

from __future__ import annotations

import json
import pickletools
import random
import re
import struct
import tomllib
import zipfile
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from typing import Any

NUMBERS = (0, 1, -1, 2, 127, 128, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**32, 2**53, 2**63, -(2**63), 10**40)
VALUES: tuple[Any, ...] = (
    *NUMBERS,
    None,
    True,
    1.5,
    float("nan"),
    float("inf"),
    1e308,
    "",
    "x",
    "x" * 300,
    "\ud800",
    "\0",
    "\u2028",
    [],
    {},
    [1],
    [[[[]]]],
    {"a": 1},
    "F32",
    "[1,2]",
    "[" * 300,
)
PIECES = (
    b"",
    b"\0",
    b"\xff" * 8,
    b"[" * 300,
    b"{" * 300,
    b'"',
    b"\n",
    b"\r\n",
    b"\xef\xbb\xbf",
    b"\x80",
    b",,",
    b"\t",
    b"1e999",
)
OPCODES = (
    *(b"\x80\x02", b"}", b"]", b")", b"(", b"t", b"u", b"s", b"e", b"a", b"R", b"b", b"Q", b".", b"0", b"2", b"N"),
    *(b"q\0", b"h\0", b"r\xff\xff\xff\x7f", b"j\0\0\0\0", b"\x85", b"\x86", b"\x87", b"K\0", b"K\xff", b"\x88"),
    *(b"ctorch\nFloatStorage\n", b"ccollections\nOrderedDict\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"\x8f"),
    *(
        b"cbuiltins\nbytearray\n",
        b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"X\x01\0\0\x000",
        b"X\x02\0\0\0\xff\xff",
    ),
    *(b"J\xff\xff\xff\xff", b"\x94"),
)
Mutate = Callable[[random.Random, bytes], bytes]


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Change, remove, repeat or insert a few bytes."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, length = rng.randrange(len(out) + 1), rng.choice((1, 1, 2, 4, 8, 64))
        match rng.randrange(6):
            case 0 if out:
                out[min(at, len(out) - 1)] = rng.randrange(256)
            case 1:
                del out[at : at + length]
            case 2:
                out[at:at] = out[at : at + length] * rng.choice((1, 2, 50))
            case 3:
                out[at:at] = rng.choice(PIECES)
            case 4:
                out[at : at + 8] = struct.pack("<Q", rng.choice(NUMBERS) % 2**64)
            case _:
                del out[at:]
    return bytes(out)


def mutate_value(rng: random.Random, value: Any) -> Any:
    """Replace, remove, rename or repeat something in a JSON value; texts that hold JSON are changed inside, too."""
    if rng.random() < 0.3 or not isinstance(value, dict | list) or not value:
        if isinstance(value, str) and value.startswith("[") and rng.random() < 0.7:
            return _mutate_json(rng, value.encode()).decode("utf-8", "replace")
        return rng.choice(VALUES)
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    key = rng.choice(list(copy)) if isinstance(copy, dict) else rng.randrange(len(copy))
    match rng.randrange(5):
        case 0:
            del copy[key]
        case 1 if isinstance(copy, dict):
            copy[rng.choice(("", "x" * 300, "__metadata__", "\ud800", "0"))] = copy.pop(key)
        case 1:
            copy = copy * 50
        case _:
            copy[key] = mutate_value(rng, copy[key])
    return copy


def _mutate_json(rng: random.Random, data: bytes) -> bytes:
    if rng.random() < 0.3:
        return mutate_bytes(rng, data)
    try:
        return json.dumps(mutate_value(rng, json.loads(data))).encode()
    except (ValueError, RecursionError):
        return mutate_bytes(rng, data)


def mutate_json(rng: random.Random, data: bytes) -> bytes:
    return _mutate_json(rng, data)


def mutate_keys(rng: random.Random, data: bytes) -> bytes:
    """Change the tables of a keys file, or its bytes. JSON's texts, numbers and lists are TOML's."""
    try:
        tables = tomllib.loads(data.decode())["key"]
    except (ValueError, KeyError, RecursionError):
        return mutate_bytes(rng, data)
    changed = data if rng.random() < 0.3 else mutate_value(rng, tables)
    if changed is data:
        return mutate_bytes(rng, data)
    if not isinstance(changed, list) or not all(isinstance(table, dict) for table in changed):
        return f"key = {json.dumps(changed)}\n".encode()
    lines = [[f"{json.dumps(name)} = {json.dumps(value)}" for name, value in table.items()] for table in changed]
    return "\n".join("\n".join(["[[key]]", *table]) for table in lines).encode()


def mutate_safetensors(rng: random.Random, data: bytes) -> bytes:
    """Change a safetensors file's header, its length or the bytes."""
    if len(data) < 8 or rng.random() < 0.2:
        return mutate_bytes(rng, data)
    (length,) = struct.unpack_from("<Q", data)
    header, body = _mutate_json(rng, data[8 : 8 + length]), data[8 + length :]
    if rng.random() < 0.2:
        body = mutate_bytes(rng, body)
    return struct.pack("<Q", len(header)) + header + body


def mutate_gguf(rng: random.Random, data: bytes) -> bytes:
    """Change a number of a GGUF file, or its bytes. The number is where texts and lists have theirs."""
    if len(data) < 32 or rng.random() < 0.4:
        return mutate_bytes(rng, data)
    out = bytearray(data)
    starts = [found.start() for found in re.finditer(rb"\0\0\0", data[:4096])] or [8]
    at = max(4, rng.choice(starts) - rng.choice((1, 4, 5)))
    form, bits = rng.choice((("<B", 8), ("<I", 32), ("<Q", 64)))
    number = rng.choice((*NUMBERS, rng.randrange(40))) % (1 << bits)
    struct.pack_into(form, out, min(at, len(out) - 8), number)
    return bytes(out)


def mutate_named(rng: random.Random, data: bytes) -> bytes:
    """Change a file whose name is its first line: a part of an archive, JSON, or its bytes."""
    name, _, content = data.partition(b"\n")
    with suppress(Exception):
        if rng.random() < 0.8:
            return name + b"\n" + _mutate_part(rng, content)
    if name.endswith((b"json", b"jsonl", b"arb", b"xcstrings")) and rng.random() < 0.7:
        return name + b"\n" + _mutate_json(rng, content)
    return name + b"\n" + mutate_bytes(rng, content)


def _mutate_part(rng: random.Random, data: bytes) -> bytes:
    """Change the bytes of one file in an archive. Raises BadZipFile."""
    out = BytesIO()
    with zipfile.ZipFile(BytesIO(data)) as source, zipfile.ZipFile(out, "w") as target:
        changed = rng.choice(source.namelist())
        for name in source.namelist():
            target.writestr(name, mutate_bytes(rng, source.read(name)) if name == changed else source.read(name))
    return out.getvalue()


def mutate_pth(rng: random.Random, data: bytes) -> bytes:
    """Change a .pth's pickle opcodes, its storages, or the archive's bytes."""
    try:
        return mutate_bytes(rng, data) if rng.random() < 0.2 else _mutate_archive(rng, data)
    except Exception:
        return mutate_bytes(rng, data)


def _mutate_archive(rng: random.Random, data: bytes) -> bytes:
    out = BytesIO()
    with zipfile.ZipFile(BytesIO(data)) as source, zipfile.ZipFile(out, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if name.endswith("data.pkl"):
                content = _mutate_pickle(rng, content)
            elif rng.random() < 0.05:
                content = mutate_bytes(rng, content)
            elif rng.random() < 0.03:
                continue
            target.writestr(name, content, zipfile.ZIP_DEFLATED if rng.random() < 0.02 else zipfile.ZIP_STORED)
    return out.getvalue()


def _mutate_pickle(rng: random.Random, code: bytes) -> bytes:
    starts = [at for _, _, at in pickletools.genops(code) if at is not None]
    steps = [code[begin:end] for begin, end in zip(starts, [*starts[1:], len(code)], strict=True)]
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(steps))
        match rng.randrange(5):
            case 0:
                steps[at] = rng.choice(OPCODES)
            case 1:
                steps.insert(at, rng.choice(OPCODES))
            case 2 if len(steps) > 1:
                del steps[at]
            case 3:
                steps[at:at] = steps[at : at + rng.choice((1, 5, 20))] * rng.choice((1, 3))
            case _:
                steps[at] = mutate_bytes(rng, steps[at])
    return b"".join(steps)
