"""The command `convert`: writes a model in another format."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from programs.settings import reports_errors
from programs.settings.model_source import resolve
from programs.tools.parsers import convert_parser
from rwkv_batch.errors import StartupError
from rwkv_batch.model.export import default_dtype, write_model
from rwkv_batch.model.weights import open_weights


@reports_errors(StartupError, ValueError, OSError)
def main(arguments: Sequence[str]) -> int:
    """Convert a model. Returns the exit code: 2 for a wrong flag, 1 if it cannot be converted."""
    given, _ = convert_parser().parse(arguments)
    weights = open_weights(Path(resolve(given.source)))
    dtype = given.dtype or default_dtype(weights)
    write_model(weights, given.target, dtype)
    size = given.target.stat().st_size
    sys.stdout.write(f"{given.target}: {weights.shape.describe()}, {dtype}, {size / 1e6:.1f} MB\n")
    return 0
