"""The readers of weight files' headers, in processes without torch that may take 256 MiB.

    python -m test.fuzzing.headers --count 250000 --seed 1 --processes 2

`--count` is per format. A file is refused with a short text, or each place of a tensor is inside the file. Anything
else is a fault: an exception, the limit of memory (of addresses, not only of pages) or of CPU time.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rwkv_batch.model.files.place import TensorIndex
from rwkv_batch.model.tensor_index import find_or_refuse
from test.fuzzing.mutate import mutate_gguf, mutate_pth, mutate_safetensors

MEMORY_BYTES = 256 << 20
PER_PROCESS = 10_000
CPU_S = 120
MAX_REFUSAL = 3000
TOO_LARGE = "takes more than"
"""Begins the refusal of a file whose header does not fit the memory."""
FORMATS = {"gguf": mutate_gguf, "st": mutate_safetensors, "safetensors": mutate_safetensors, "pth": mutate_pth}


def write_corpora(folder: Path) -> None:
    """Write small valid files of each format: `FORMAT.NUMBER`."""
    from test.fuzzing.readers import READERS  # imports torch, which the children must not

    for name in FORMATS:
        for number, data in enumerate(READERS["safetensors" if name == "st" else name].corpus(folder)):
            (folder / f"{name}.{number}").write_bytes(data)


def fuzz(folder: Path, name: str, seed: str, count: int) -> dict[str, Any]:
    """Read `count` changed headers. Returns figures, or the first fault."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    rng, read = random.Random(f"{name} {seed}"), 0
    corpus = [path.read_bytes() for path in sorted(folder.glob(f"{name}.*"))]
    with tempfile.TemporaryDirectory(dir=folder) as own:
        path = Path(own) / f"m.{name}"
        for number in range(count):
            data = rng.choice(corpus)
            for _ in range(rng.choice((1, 1, 1, 2, 3))):
                data = FORMATS[name](rng, data)
            path.write_bytes(data)
            found = find_or_refuse(path)
            if isinstance(found, TensorIndex):
                read += 1
                fits = all(0 <= place.begin <= place.begin + place.num_bytes <= len(data) for place in found.places)
            else:
                fits = len(found) <= MAX_REFUSAL and not found.startswith(TOO_LARGE)
            if not fits:
                return {"fault": str(found)[:MAX_REFUSAL], "number": number, "seed": seed}
    assert "torch" not in sys.modules
    return {"read": read, "peak_kib": _peak_kib()}


def _peak_kib() -> int:
    """Return the largest memory of this process; `ru_maxrss` begins with its parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def run(folder: Path, name: str, seed: int, count: int, processes: int = 1) -> dict[str, Any]:
    """`fuzz` in processes, `processes` at a time. Returns the sums, or the first fault."""

    def part(number: int) -> dict[str, Any]:
        size = min(PER_PROCESS, count - number * PER_PROCESS)
        command = [sys.executable, "-m", "test.fuzzing.headers"]
        command += ["--child", str(folder), name, f"{seed} {number}", str(size)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return {"fault": f"exit code {done.returncode}: {done.stderr[-MAX_REFUSAL:]}", "seed": f"{seed} {number}"}
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    read = peak = 0
    with ThreadPoolExecutor(processes) as pool:
        for found in pool.map(part, range(-(-count // PER_PROCESS))):
            if "fault" in found:
                pool.shutdown(cancel_futures=True)
                return {"format": name, **found}
            read, peak = read + found["read"], max(peak, found["peak_kib"])
    return {"format": name, "inputs": count, "read": read, "peak_mib": round(peak / 1024, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=250_000, help="inputs per format")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        folder, name, seed, count = args.child
        print(json.dumps(fuzz(Path(folder), name, seed, int(count))))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_corpora(Path(folder))
        for name in FORMATS:
            started = time.monotonic()
            found = run(Path(folder), name, args.seed, args.count, args.processes)
            print(json.dumps({**found, "seconds": round(time.monotonic() - started, 1)}), flush=True)


if __name__ == "__main__":
    main()
