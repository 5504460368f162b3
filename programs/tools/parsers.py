"""The command lines of `inspect`, `plan`, `convert` and `doctor`. They do not import torch, so help is fast."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

from programs.settings import CommandParser
from rwkv_batch.model.files import WRITTEN_DTYPES, WRITTEN_SUFFIXES

BYTES_PER_NUMBER: Mapping[str, float] = {"fp16": 2, "bf16": 2, "fp32": 4, "fp8": 1.1, "int8": 1.3, "int4": 0.6}
"""Bytes per number of a large matrix on a GPU, with scales. int8 stores ffn.value twice on Hopper."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:GB|GiB|G)?", re.IGNORECASE)
_MAX_GB, _MAX_ROWS = 10_000, 1_000_000


def inspect_parser() -> CommandParser:
    parser = CommandParser(
        "inspect", "Describes a model, a tuned state, an adapter or a session file.", "model.gguf --checksum"
    )
    parser.add_argument(
        "file",
        metavar="FILE",
        help="the file, a Hugging Face or PEFT folder, or a name as --model-path of serve, as demo",
    )
    parser.add_argument("--checksum", action="store_true", help="also print the SHA-256 of each file")
    return parser


def plan_parser() -> CommandParser:
    parser = CommandParser(
        "plan",
        "Says how much memory a model needs, and what fits on this machine, on a GPU or on a CPU.",
        "--model model.pth --gpu 24GB --rows 320 --dtype fp8 --wkv-state int8\n--model model.pth --cpu 16GB --rows 32",
    )
    parser.add_argument(
        "--model", required=True, metavar="FILE", help="a model, as --model-path of serve; demo: the demo model"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--gpu", type=_gigabytes, metavar="SIZE", help="memory of a GPU, as 24GB; default: this machine")
    where.add_argument("--cpu", type=_gigabytes, metavar="SIZE", help="no GPU: the machine's free memory, as 16GB")
    parser.add_argument("--rows", type=_rows, default=320, metavar="N", help="--max-running; default: 320")
    parser.add_argument("--dtype", choices=[*BYTES_PER_NUMBER], help="default: fp16, on a CPU fp32")
    parser.add_argument("--wkv-state", choices=["fp32", "fp16", "int8"], help="default: fp16, on a CPU fp32")
    return parser


def convert_parser() -> CommandParser:
    parser = CommandParser(
        "convert", "Writes a model in the format of the new file's name.", "model.pth model.gguf --dtype q8_0"
    )
    parser.add_argument("source", metavar="IN", help="a model, as --model-path of serve; demo: the demo model")
    suffixes = ", ".join(WRITTEN_SUFFIXES)
    parser.add_argument("target", type=Path, metavar="OUT", help=f"a new file that ends in {suffixes}")
    parser.add_argument(
        "--dtype",
        choices=sorted(WRITTEN_DTYPES),
        help="type of the matrices; q8_0 is for .gguf (default: the source's; bf16 for quantised ones)",
    )
    return parser


def doctor_parser() -> CommandParser:
    return CommandParser(
        "doctor",
        "Checks Python, packages, GPUs, compilers, CPU, memory, disk, ports and the model. Each line is ok, or "
        "says what to do. The exit code is 0 if all lines are ok. Takes all flags of serve.",
        "--model-path model.pth --port 8000",
        takes_settings=True,
    )


def _gigabytes(text: str) -> float:
    found = _SIZE.fullmatch(text.strip())
    if found is None or not 0 < float(found[1]) <= _MAX_GB:
        raise argparse.ArgumentTypeError(f"takes a size as 24GB, up to {_MAX_GB} GB, got {text!r}")
    return float(found[1])


def _rows(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MAX_ROWS:
        raise argparse.ArgumentTypeError(f"takes a number of rows from 1 to {_MAX_ROWS}, got {text!r}")
    return int(text)
