"""A digest of all numbers of a weight file.

It is computed once per file and kept in the cache folder.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from native.files import cache_folder
from rwkv_batch.model.files.gguf_blocks import stored
from rwkv_batch.model.mmap_release import release
from rwkv_batch.model.tensor_files import files_of

logger = logging.getLogger(__name__)

MIN_CACHED_BYTES = 64 << 20
"""Smaller files are read at every start: that takes less than 0.1 s."""
_FOLDER = "weight-digests"
_PIECE_BYTES = 1 << 20
_DIGEST_BYTES = 16


def content_digest(tensors: Mapping[str, Tensor], path: Path) -> str:
    """Return a digest of all tensors [...], which were read from `path`.

    It is read from the cache if no file there has changed its size, times or inode.
    """
    if sum(stored(tensor).nbytes for tensor in tensors.values()) < MIN_CACHED_BYTES:
        return _computed(tensors)
    kept = _cache_file(path)
    try:
        if kept is not None:
            return kept.read_text(encoding="ascii")
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        logger.warning("%s cannot be read (%s); the digest is computed again", kept, error)
    logger.info("reading all of %s for its digest, once", path)
    digest = _computed(tensors)
    if kept is not None:
        _keep(kept, digest)
    return digest


def _computed(tensors: Mapping[str, Tensor]) -> str:
    """Return the digest. A core hashes about 0.7 GB/s, and hashing needs no lock of Python."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name in sorted(tensors):
            tensor = tensors[name]
            content = stored(tensor).cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            pieces = (content[start : start + _PIECE_BYTES] for start in range(0, len(content), _PIECE_BYTES))
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
            for piece in pool.map(partial(hashlib.blake2b, digest_size=_DIGEST_BYTES), pieces):
                digest.update(piece.digest())
            release(tensor)
    return digest.hexdigest()


def _cache_file(path: Path) -> Path | None:
    """Return where the files' digest is kept. None: there are no files."""
    try:
        found = [(str(file.resolve()), file.stat()) for file in files_of(path)]
    except OSError:
        return None
    known = [(name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino) for name, stat in found]
    key = hashlib.blake2b(repr(known).encode(), digest_size=_DIGEST_BYTES).hexdigest()
    return cache_folder() / _FOLDER / key if known else None


def _keep(file: Path, digest: str) -> None:
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(digest, encoding="ascii")  # other users may read it
        temporary.replace(file)
    except OSError as error:
        logger.warning("%s cannot be written (%s), so every start reads the whole weights; allow it", file, error)
