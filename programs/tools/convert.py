"""The command `convert`: writes a model in another format."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from programs.settings import CommandParser, reports_errors
from programs.settings.model_source import resolve
from rwkv_batch.errors import StartupError
from rwkv_batch.model.export import DTYPES, SUFFIXES, default_dtype, write_model
from rwkv_batch.model.weights import open_weights


def build_parser() -> CommandParser:
    """Returns the parser of `convert`."""
    parser = CommandParser(
        "convert",
        "Writes a model in the format of the new file's name.",
        "model.pth model.gguf --dtype q8_0",
    )
    parser.add_argument("source", metavar="IN", help="a model, as --model-path of serve")
    parser.add_argument("target", type=Path, metavar="OUT", help=f"a new file that ends in {', '.join(SUFFIXES)}")
    parser.add_argument(
        "--dtype",
        choices=sorted(DTYPES),
        help="type of the matrices; q8_0 is for .gguf (default: the source's; bf16 for quantised ones)",
    )
    return parser


@reports_errors(StartupError, ValueError, OSError)
def main(arguments: Sequence[str]) -> int:
    """Convert a model. Returns the exit code: 2 for a wrong flag, 1 if it cannot be converted."""
    given, _ = build_parser().parse(arguments)
    weights = open_weights(Path(resolve(given.source)))
    dtype = given.dtype or default_dtype(weights)
    write_model(weights, given.target, dtype)
    size = given.target.stat().st_size
    sys.stdout.write(f"{given.target}: {weights.shape.describe()}, {dtype}, {size / 1e6:.1f} MB\n")
    return 0
