"""Several GPUs compared with one: the engine alone, with clients that send a request after each answer.

    python -m bench.pipeline --size 7.2b --devices 1,2,4 --clients 1,32,320,960,1920,3840

One run measures the same random model and load (bench/traffic.py) on the first 1, 2, 4 ... GPUs:
- tokens/s, time to first token, and their ratio to one GPU with the same number of clients;
- the busy share of each GPU, from nvidia-smi's samples, which count any kernel as busy;
- `step_ms`, and `host_ms`: the part of it in which the engine's thread did not wait for a GPU.

Bounds: the slowest stage (stages have whole layers, the last has the head), transfers between devices, and the host,
which schedules every row and reads every token.

"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.tools.gpu_model import SIZES, write_random_file
from bench.tools.record import Arguments, commit, finish, save
from bench.tools.timers import nvidia_smi
from bench.traffic import measure, numbers
from programs.settings import parse_settings
from rwkv_batch.engine import Engine
from rwkv_batch.ipc.process import freeze_garbage_collector


@contextmanager
def busy_shares(devices: int) -> Iterator[list[float]]:
    """Yield the median utilisation of each GPU, 0..1.

    The list is filled when the block ends. It covers the later half of the block. Without nvidia-smi it stays empty.
    """
    shares: list[float] = []
    with nvidia_smi("index,utilization.gpu", 200) as samples:
        yield shares
    for index in range(devices if samples else 0):
        busy = [float(percent) / 100 for card, percent in samples if card == str(index) and percent.isdigit()]
        shares.append(round(statistics.median(busy[len(busy) // 2 :]), 2) if busy else 0.0)


class HostTime:
    """Measures the part of a step without waits for a GPU. The waits are those of the engine's thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waited = 0.0
        self.figures: dict[str, float] = {}
        read = engine.model_runner.read

        def timed(step: Any) -> Any:
            began = time.perf_counter()
            try:
                return read(step)
            finally:
                self._waited += time.perf_counter() - began

        engine.model_runner.read = timed  # type: ignore[method-assign]

    def measure(self, seconds: float) -> None:
        """Measure running steps for `seconds`. Any thread."""
        started, waited, first = time.perf_counter(), self._waited, self._engine._next_step
        time.sleep(seconds)
        steps = max(1, self._engine._next_step - first)
        step_ms = (time.perf_counter() - started) * 1e3 / steps
        wait_ms = (self._waited - waited) * 1e3 / steps
        self.figures = {"step_ms": round(step_ms, 3), "host_ms": round(step_ms - wait_ms, 3)}


def run_on(
    devices: list[int], model: Path, folder: Path, args: argparse.Namespace, flags: list[str]
) -> Iterator[dict[str, Any]]:
    """Measure all client counts on these GPUs; yields each result."""
    named = ",".join(map(str, devices))
    own = ["--model-path", str(model), "--state-db", str(folder / f"{named}.db"), "--pp-devices", named]
    engine = Engine(parse_settings([*own, *flags], os.environ).engine)
    engine.start()
    host = HostTime(engine)
    try:
        layers = [stage.share for stage in engine.model_runner.pipeline.stages]
        freeze_garbage_collector()  # as the service does
        for clients in args.clients:
            if clients > 2 * engine.model_runner.limits.max_running:
                continue  # most of them would wait in the queue
            with busy_shares(len(devices)) as shares:
                figures = measure(engine, clients, args, lambda: host.measure(0.9 * args.seconds))
            result = {"devices": len(devices), "layers": layers, **figures, **host.figures, "busy": shares}
            print(json.dumps(result), flush=True)
            yield result
    finally:
        engine.stop()
        del engine
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()


def with_ratios(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add each result's ratio to one GPU with as many clients."""
    alone = {one["clients"]: one["tokens_per_s"] for one in results if one["devices"] == 1}
    for one in results:
        if one["clients"] in alone:
            one["ratio"] = round(one["tokens_per_s"] / alone[one["clients"]], 3)
    return results


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--size", choices=SIZES, default="7.2b")
    parser.add_argument("--model-path", type=Path, help="instead of a random model of --size")
    parser.add_argument("--devices", type=numbers, default=(1, 2, 4))
    parser.add_argument("--clients", type=numbers, default=(1, 32, 320, 960, 1920, 3840))
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--prompt-tokens", type=int, default=20)
    parser.add_argument("--drawn", type=numbers, default=(128, 256))
    parser.add_argument("--folder", type=Path, help="folder for the random model, which is kept")
    args, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="rwkv-bench-") as temporary:
        folder = args.folder or Path(temporary)
        model = args.model_path or folder / f"random-{args.size}.safetensors"
        if not model.exists():
            write_random_file(args.size, model, torch.device("cuda:0"))
            torch.cuda.empty_cache()
        head = {"machine": torch.cuda.get_device_name(0), "torch": torch.__version__, "commit": commit(args.commit)}
        head |= {"size": args.size, "prompt_tokens": args.prompt_tokens, "drawn": args.drawn, "seconds": args.seconds}
        results: list[dict[str, Any]] = []
        for count in args.devices:
            for result in run_on(list(range(count)), model, Path(temporary), args, flags):
                results.append(result)
                save({**head, "results": with_ratios(results)}, args.out)
    finish({**head, "results": results}, args.out)


if __name__ == "__main__":
    main()
