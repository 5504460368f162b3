"""The shipped model: a compact file. The first start expands it to a standard `.safetensors` file.

The compact file holds bf16 weights as two byte planes, compressed with LZMA. Its tables have one row per used id and a
last row for all other ids. Expanding repeats the last row, so the standard file has all 65,536 rows.
"""

from __future__ import annotations

import hashlib
import json
import logging
import lzma
import os
import struct
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from native import safetensors
from native.files import cache_folder

Bits = NDArray[np.uint16]  # bf16 values by their bits

MAGIC = b"RWKV7CMP"
VOCAB = 65536
TABLES = ("emb.weight", "head.weight")
MODEL = Path(__file__).parent / "rwkv7-demo.compact"
log = logging.getLogger(__name__)


def compress(tensors: dict[str, Bits], ids: NDArray[np.int64]) -> bytes:
    """Return the compact file of bf16 tensors. Their tables have len(ids) + 1 rows."""
    header = json.dumps(
        {"ids": len(ids), "tensors": [[name, list(t.shape)] for name, t in tensors.items()]}, separators=(",", ":")
    ).encode()
    values = np.concatenate([ids.astype("<u2"), *(t.astype("<u2").ravel() for t in tensors.values())])
    planes = values.view(np.uint8).reshape(-1, 2).T.tobytes()
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 0, "lp": 0, "pb": 0}]
    return MAGIC + struct.pack("<I", len(header)) + header + lzma.compress(planes, filters=filters)


def decompress(data: bytes) -> tuple[dict[str, Bits], NDArray[np.int64]]:
    """Return the tensors and ids of a compact file. Raises ValueError for another format."""
    if data[:8] != MAGIC:
        raise ValueError(f"not a compact RWKV-7 file: it starts with {data[:8]!r}, expected {MAGIC!r}")
    size = struct.unpack("<I", data[8:12])[0]
    header = json.loads(data[12 : 12 + size])
    planes = np.frombuffer(lzma.decompress(data[12 + size :]), dtype=np.uint8).reshape(2, -1)
    values = np.ascontiguousarray(planes.T).view("<u2").ravel()
    ids, at = values[: header["ids"]].astype(np.int64), header["ids"]
    tensors = {}
    for name, shape in header["tensors"]:
        count = int(np.prod(shape))
        tensors[name] = values[at : at + count].reshape(shape)
        at += count
    return tensors, ids


def expand(tensors: dict[str, Bits], ids: NDArray[np.int64]) -> dict[str, Bits]:
    """Return the tensors with all 65,536 table rows."""
    full = dict(tensors)
    for name in TABLES:
        table = np.repeat(tensors[name][-1:], VOCAB, axis=0)
        table[ids] = tensors[name][:-1]
        full[name] = table
    return full


def ensure_model(cache_dir: Path | None = None, source: Path = MODEL) -> Path:
    """Return the demo model's `.safetensors` file.

    Expands it into the cache folder if it is missing there. Raises FileNotFoundError without a compact file and OSError
    if the folder cannot be written.
    """
    if not source.is_file():
        raise FileNotFoundError(f"no demo model: {source} is missing; restore it or train one with demo/train.py")
    data = source.read_bytes()
    folder = cache_dir or cache_folder()
    path = folder / f"rwkv7-demo-{hashlib.sha256(data).hexdigest()[:12]}.safetensors"
    if path.is_file():
        return path
    log.info("expanding the demo model to %s (first start only)", path)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = expand(*decompress(data))
    entries = {name: safetensors.Entry("bfloat16", one.shape, one.nbytes) for name, one in tensors.items()}
    handle, name = tempfile.mkstemp(dir=folder, prefix=".expanding-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(safetensors.header(entries, {"format": "pt"}))
            file.writelines(one.astype("<u2").tobytes() for one in tensors.values())
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    log.info("the demo model is ready: %.1f MB", path.stat().st_size / 1e6)
    return path
