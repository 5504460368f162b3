"""Decode and prefill of llama.cpp's own programs, for comparison on the same CPU."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

from rwkv_batch.model.export import write_model
from rwkv_batch.model.weights import Weights

TYPES = {"fp32": "f32", "bf16": "bf16", "int8": "q8_0", "int4": "q4_0"}
"""Our --dtype -> the type of a GGUF file with about as many bits."""
PROMPTS = ((1, 512), (16, 128))
"""Rows and tokens of each."""


class LlamaCpp:
    """llama-batched-bench of a build of llama.cpp, on one model in each of `TYPES`.

    `folder`: its build, which also has llama-quantize. Raises OSError or CalledProcessError.
    """

    def __init__(self, folder: Path, weights: Weights, work: Path, threads: int) -> None:
        self._program = folder / "bin" / "llama-batched-bench"
        self._threads = threads
        self._files = {dtype: work / f"{name}.gguf" for dtype, name in TYPES.items()}
        for dtype in ("fp32", "bf16", "int8"):
            write_model(weights, self._files[dtype], {"int8": "q8_0"}.get(dtype, dtype))
        quantize = folder / "bin" / "llama-quantize"
        subprocess.run(
            [quantize, "--pure", self._files["fp32"], self._files["int4"], TYPES["int4"]],
            check=True, capture_output=True,
        )  # fmt: skip

    def tasks(self, dtype: str, batches: tuple[int, ...]) -> dict[str, Callable[[], float]]:
        """Return tokens/s of decoding rows and of reading prompts, by the names of our own tasks; a process each."""
        found = {f"decode_{rows} llama.cpp {dtype}": partial(self._decode, dtype, rows) for rows in batches}
        for rows, length in PROMPTS:
            found[f"prefill_{rows}x{length} llama.cpp {dtype}"] = partial(self._prefill, dtype, rows, length)
        return found

    def _decode(self, dtype: str, rows: int) -> float:
        return median(
            self._speeds("tg", dtype, 4, (1,) * 5, 16) if rows == 1 else self._speeds("tg", dtype, 4, (rows,), 8)
        )

    def _prefill(self, dtype: str, rows: int, length: int) -> float:
        return self._speeds("pp", dtype, length, (rows,), 1)[0]

    def _speeds(self, what: str, dtype: str, prompt: int, rows: tuple[int, ...], new_tokens: int) -> list[float]:
        """Return tokens/s of the prompts (pp) or of the new tokens (tg), for each number of rows."""
        counts = {"-npp": prompt, "-ntg": new_tokens, "-c": max(rows) * (prompt + new_tokens), "-t": self._threads}
        flags = [str(part) for pair in counts.items() for part in pair]
        done = subprocess.run(
            [self._program, "-m", self._files[dtype], *flags, "-npl", ",".join(map(str, rows)), "-b", "2048",
             "-ub", "512", "--output-format", "jsonl"],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith('{"n_kv_max"')]
        return [float(json.loads(line)[f"speed_{what}"]) for line in lines]
