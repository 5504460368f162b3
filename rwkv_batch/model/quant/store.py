"""Small weights on disk, beside the weight file they were made from, so that the next start reads these instead.

    rwkv7-7.2b.pth  ->  rwkv7-7.2b.fp8-1-<fingerprint>/blocks.0.att.key.weight.safetensors, ...

A file per matrix, written whole or not at all. Where the folder cannot be written, every start makes them anew.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rwkv_batch.model.quant.formats import Format, Quantised

logger = logging.getLogger(__name__)

VERSION = 1
"""Of the definition in formats.py: another one makes other folders."""


class QuantStore:
    """The files of one weight file under one --dtype. Engine thread, at load."""

    def __init__(self, weights_path: Path, fingerprint: str, storage: Format) -> None:
        self.folder = weights_path.with_name(f"{weights_path.stem}.{storage}-{VERSION}-{fingerprint[:16]}")
        self._usable = weights_path.is_file()

    def load(self, name: str, shape: tuple[int, ...], format_: Format) -> Quantised | None:
        """The codes of a tensor, on the CPU; None: there are none, or they do not fit or cannot be read."""
        path = self._path(name)
        if not self._usable or not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
            zeros = tensors.get("zeros")
            found = Quantised(format_, tensors["codes"], tensors["scales"], zeros, shape[1])
        except (OSError, SafetensorError, KeyError) as error:
            logger.warning("%s cannot be read (%s) and is made anew", path, error)
            return None
        return found if found.fits(shape) else None

    def keep(self, name: str, codes: Quantised) -> None:
        """Write the codes of a tensor. What goes wrong is logged once; then no more is written."""
        if not self._usable:
            return
        tensors = {"codes": codes.codes, "scales": codes.scales}
        if codes.zeros is not None:
            tensors["zeros"] = codes.zeros
        try:
            self.folder.mkdir(exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.folder, prefix=".writing-")
            os.close(handle)
            try:
                save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, temporary)
                with open(temporary, "rb") as file:
                    os.fsync(file.fileno())
                Path(temporary).chmod(0o644)
                Path(temporary).replace(self._path(name))
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
        except (OSError, SafetensorError) as error:
            self._usable = False
            logger.warning("%s cannot be written (%s): small weights are made anew at every start", self.folder, error)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"
