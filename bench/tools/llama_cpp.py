"""Decode and prefill of llama.cpp's own programs, for comparison on the same CPU."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rwkv_batch.model.export import write_model
from rwkv_batch.model.weights import Weights

TYPES = {"fp32": "f32", "bf16": "bf16", "int8": "q8_0", "int4": "q4_0"}
"""Our --dtype -> the type of a GGUF file with about as many bits."""


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
        """Return tokens/s of decoding rows and of reading prompts, by the names of our own tasks."""
        found: dict[str, Callable[[], float]] = {
            f"decode_{rows} llama.cpp {dtype}": partial(self._speed, "tg", dtype, 4, rows, 24) for rows in batches
        }
        for rows, length in ((1, 512), (16, 128)):
            found[f"prefill_{rows}x{length} llama.cpp {dtype}"] = partial(self._speed, "pp", dtype, length, rows, 1)
        return found

    def _speed(self, what: str, dtype: str, prompt: int, rows: int, new_tokens: int) -> float:
        """Return tokens/s of the prompts (pp) or of the new tokens (tg)."""
        tokens = rows * (prompt + new_tokens)
        counts = {"-npp": prompt, "-ntg": new_tokens, "-npl": rows, "-c": tokens, "-t": self._threads}
        flags = [str(part) for pair in counts.items() for part in pair]
        done = subprocess.run(
            [self._program, "-m", self._files[dtype], *flags, "-b", "2048", "-ub", "512", "--output-format", "jsonl"],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith('{"n_kv_max"')]
        return float(json.loads(lines[-1])[f"speed_{what}"])
