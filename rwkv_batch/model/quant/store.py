"""Small weights on disk, beside the weight file they were made from, so that the next start reads these instead.

    rwkv7-7.2b.pth  ->  rwkv7-7.2b.fp8-1-<fingerprint>/blocks.0.att.key.weight.safetensors, ...

Of a folder of Hugging Face's they are within it. A file per matrix, written whole or not at all, with a checksum: one
that is damaged is made anew. Where the folder cannot be written, every start makes them anew.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rwkv_batch.model.quant.formats import Format, Quantised

logger = logging.getLogger(__name__)

VERSION = 1
"""Of the definition in formats.py: another one makes other folders."""
CHECKSUM = "crc32"
"""In the metadata of a file: see `_checksum`."""
STALE_TEMP_S = 3600.0
"""Age from which a file that is half written is one of a process that was killed."""


class QuantStore:
    """The files of one weight file under one --dtype. Engine thread, at load."""

    def __init__(self, weights_path: Path, fingerprint: str, storage: Format) -> None:
        mark = f"{storage}-{VERSION}-{fingerprint[:16]}"
        is_folder = weights_path.is_dir()
        self.folder = weights_path / mark if is_folder else weights_path.with_name(f"{weights_path.stem}.{mark}")
        self._usable = is_folder or weights_path.is_file()
        self._can_write = self._usable
        self._remove_stale_temps()

    def load(self, name: str, shape: tuple[int, ...], format_: Format) -> Quantised | None:
        """The codes of a tensor, on the CPU; None: there are none, or they do not fit or cannot be read."""
        path = self._path(name)
        if not self._usable or not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
                kept = (file.metadata() or {}).get(CHECKSUM)
            zeros = tensors.get("zeros")
            found = Quantised(format_, tensors["codes"], tensors["scales"], zeros, shape[1])
        except (OSError, SafetensorError, KeyError) as error:
            logger.warning("%s cannot be read (%s) and is made anew", path, error)
            return None
        if not found.fits(shape) or kept is None:  # without one: of a version that wrote none
            return None
        if kept != _checksum(name, tensors):
            logger.warning("%s is damaged (its checksum is another) and is made anew", path)
            return None
        return found

    def save(self, name: str, codes: Quantised) -> None:
        """Write the codes of a tensor. What goes wrong is logged once; then no more is written."""
        if not self._can_write:
            return
        tensors = {"codes": codes.codes, "scales": codes.scales}
        if codes.zeros is not None:
            tensors["zeros"] = codes.zeros
        try:
            self.folder.mkdir(exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.folder, prefix=".writing-")
            os.close(handle)
            try:
                tensors = {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}
                save_file(tensors, temporary, {CHECKSUM: _checksum(name, tensors)})
                with open(temporary, "rb") as file:
                    os.fsync(file.fileno())
                Path(temporary).chmod(0o644)
                Path(temporary).replace(self._path(name))
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
        except (OSError, SafetensorError) as error:
            self._can_write = False
            logger.warning(
                "%s cannot be written (%s): small weights that are not in it are made anew at every start; make room "
                "there, or let this user write there",
                self.folder,
                error,
            )

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def _remove_stale_temps(self) -> None:
        """Remove what processes that were killed had half written; another's that is being written is younger."""
        with contextlib.suppress(OSError):  # no folder, or one that is not ours to change
            for temp_path in self.folder.glob(".*"):
                if time.time() - temp_path.stat().st_mtime > STALE_TEMP_S:
                    temp_path.unlink()


def _checksum(name: str, tensors: Mapping[str, Tensor]) -> str:
    """Of a matrix's name and of the bytes of its tensors, which are on the CPU: 2.3 GB/s on one core."""
    total = zlib.crc32(name.encode())
    for key in sorted(tensors):
        total = zlib.crc32(tensors[key].contiguous().view(torch.uint8).numpy().data, total)
    return f"{total:08x}"
