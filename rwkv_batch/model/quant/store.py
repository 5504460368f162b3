"""Quantised weights on disk next to the weight file. The next start loads them.

    rwkv7-7.2b.pth  ->  rwkv7-7.2b.fp8-1-<fingerprint>/blocks.0.att.key.weight.safetensors, ...

For a Hugging Face folder they are inside it. There is one file per matrix, written atomically, with a checksum. A
damaged file is replaced. If the folder cannot be written, every start quantises again.
"""

from __future__ import annotations

import logging
import os
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from native.files import remove_stale_files, sync
from rwkv_batch.model.quant.formats import Format, Quantised

logger = logging.getLogger(__name__)

VERSIONS = {Format.FP8: 1, Format.W8A8: 3, Format.INT4: 1}
"""Version of a format in the folder's name."""
CHECKSUM = "crc32"
"""Key in a file's metadata: see `_checksum`."""
WEIGHTS = "weights"
"""Key in a file's metadata: the fingerprint of the weights. Earlier versions wrote none."""


class QuantStore:
    """Quantised files of one weight file and one --dtype. Engine thread, at load."""

    def __init__(self, weights_path: Path, fingerprint: str, storage: Format) -> None:
        suffix = f"{storage}-{VERSIONS[storage]}-{fingerprint[:16]}"
        is_folder = weights_path.is_dir()
        self.folder = weights_path / suffix if is_folder else weights_path.with_name(f"{weights_path.stem}.{suffix}")
        self._usable = is_folder or weights_path.is_file()
        self._can_write = self._usable
        remove_stale_files(self.folder)
        self._fingerprint = fingerprint

    def load(self, name: str, shape: tuple[int, ...], format_: Format) -> Quantised | None:
        """Load a quantised tensor to the CPU.

        None: the tensor is missing, unreadable or does not fit.
        """
        tensors = self.load_tensors(name)
        try:
            found = None if tensors is None else Quantised.of(format_, tensors, shape[1])
        except KeyError:
            return None
        return found if found is not None and found.fits(shape) else None

    def save(self, name: str, codes: Quantised) -> None:
        self.save_tensors(name, codes.tensors())

    def load_tensors(self, name: str) -> dict[str, Tensor] | None:
        """Load a file's tensors [...]. None: the file is missing or damaged."""
        path = self._path(name)
        if not self._usable or not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
                metadata = file.metadata() or {}
        except (OSError, SafetensorError) as error:
            logger.warning("%s cannot be read (%s); it is made again", path, error)
            return None
        if CHECKSUM not in metadata:  # older versions wrote no checksum
            return None
        if metadata.get(WEIGHTS, self._fingerprint) != self._fingerprint:
            logger.warning("%s was made from other weights; it is made again", path)
            return None
        if metadata[CHECKSUM] != _checksum(name, tensors):
            logger.warning("%s is damaged (wrong checksum); it is made again", path)
            return None
        return tensors

    def save_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Save tensors [...] to a file. The first error is logged and ends all saving."""
        if not self._can_write:
            return
        try:
            self.folder.mkdir(exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.folder, prefix=".writing-")
            os.close(handle)
            try:
                on_cpu = {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}
                save_file(on_cpu, temporary, {CHECKSUM: _checksum(name, on_cpu), WEIGHTS: self._fingerprint})
                sync(Path(temporary))
                Path(temporary).chmod(0o644)
                Path(temporary).replace(self._path(name))
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
        except (OSError, SafetensorError) as error:
            self._can_write = False
            logger.warning(
                "%s cannot be written (%s), so every start quantises again; free disk space there, or allow this user "
                "to write",
                self.folder,
                error,
            )

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"


def _checksum(name: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the checksum of a matrix's name and its tensors' bytes.

    The tensors are on a CPU. The checksum runs at 2.3 GB/s on one core.
    """
    total = zlib.crc32(name.encode())
    for key in sorted(tensors):
        total = zlib.crc32(tensors[key].contiguous().view(torch.uint8).numpy().data, total)
    return f"{total:08x}"
