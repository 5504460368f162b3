"""Several GPUs against one: the engine alone under clients who ask again as soon as they are answered, side by side.

    python -m bench.pipeline --size 7.2b --devices 1,2,4 --clients 1,32,320,960,1920,3840

The same random model and the same load (bench/traffic.py) on the first 1, 2, 4 ... GPUs of the machine, in one run:
tokens/s, time to first token, the busy share of each GPU (of nvidia-smi's samples, which count any kernel as busy), and
each figure against that of one GPU with as many clients. `--trace` adds what each stage and the host did in half a
second of each case (bench/pipeline_trace.py). What bounds it: the slowest stage (layers are dealt whole, and
the head counts), the hand-over between devices, and the host, which schedules and reads every row's every token.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.gpu import commit
from bench.gpu_model import SIZES, write_random_file
from bench.pipeline_trace import Trace, summary
from bench.traffic import measure, numbers
from rwkv_batch.engine import Engine
from rwkv_batch.ipc.process import settle_garbage_collector
from settings import parse_settings


@contextmanager
def busy_shares(devices: int) -> Iterator[list[float]]:
    """Median of nvidia-smi's utilisation of each GPU, 0..1, over the block's later half; empty without nvidia-smi."""
    shares: list[float] = []
    command = ["nvidia-smi", "--query-gpu=index,utilization.gpu", "--format=csv,noheader,nounits", "-lms", "200"]
    try:
        sampler = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        yield shares
        return
    try:
        yield shares
    finally:
        sampler.terminate()
        seen: dict[int, list[float]] = {}
        for line in sampler.communicate()[0].splitlines():
            index, _, percent = line.partition(",")
            if index.strip().isdigit() and percent.strip().isdigit():
                seen.setdefault(int(index), []).append(float(percent) / 100)
        for index in range(devices):
            late = seen.get(index, [])[len(seen.get(index, [])) // 2 :]
            shares.append(round(statistics.median(late), 2) if late else 0.0)


def run_on(
    devices: int, model: Path, folder: Path, args: argparse.Namespace, flags: list[str]
) -> Iterator[dict[str, Any]]:
    """All client counts on the first so many GPUs, each when it is there."""
    named = ",".join(map(str, range(devices)))
    own = ["--model-path", str(model), "--state-db", str(folder / f"{devices}.db"), "--pp-devices", named]
    engine = Engine(parse_settings([*own, *flags], os.environ).engine)
    engine.start()
    try:
        layers = [stage.share for stage in engine.machine.pipeline.stages]
        settle_garbage_collector()  # as the service does
        for clients in args.clients:
            if clients > 2 * engine.machine.limits.max_running:
                continue  # most of them would wait for a place: a measurement of the queue
            with busy_shares(devices) as shares:
                figures = measure(engine, clients, args)
            result = {"devices": devices, "layers": layers, **figures, "busy": shares}
            if args.trace and clients in (args.trace_clients or args.clients) and devices in args.trace_devices:
                result["trace"] = traced(engine, clients, args, f"{devices} GPUs, {clients} clients")
            print(json.dumps(result), flush=True)
            yield result
    finally:
        engine.stop()
        del engine
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()


def traced(engine: Engine, clients: int, args: argparse.Namespace, name: str) -> dict[str, Any]:
    """What a trace of half a second says (`pipeline_trace.summary`); the whole of it goes to the file `--trace`."""
    with Trace(engine) as trace:
        measure(engine, clients, argparse.Namespace(**{**vars(args), "seconds": 1.0}), trace.follow)
    with args.trace.open("a") as file:
        file.write(json.dumps({"case": name, "stages": trace.stages, "host": trace.host}) + "\n")
    return summary(trace.host, trace.stages)


def with_ratios(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each figure against one device's with as many clients."""
    alone = {one["clients"]: one["tokens_per_s"] for one in results if one["devices"] == 1}
    for one in results:
        if one["clients"] in alone:
            one["ratio"] = round(one["tokens_per_s"] / alone[one["clients"]], 3)
    return results


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="7.2b")
    parser.add_argument("--model-path", type=Path, help="instead of a random model of --size")
    parser.add_argument("--devices", type=numbers, default=(1, 2, 4))
    parser.add_argument("--clients", type=numbers, default=(1, 32, 320, 960, 1920, 3840))
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--prompt-tokens", type=int, default=20)
    parser.add_argument("--drawn", type=numbers, default=(128, 256))
    parser.add_argument("--folder", type=Path, help="where the random model is written (and kept)")
    parser.add_argument("--out", type=Path, help="file for the last line, there from the first figure on")
    parser.add_argument("--trace", type=Path, help="file for a timeline of each case, taken in a run of its own")
    parser.add_argument("--trace-clients", type=numbers, default=(), help="of these cases only")
    parser.add_argument("--trace-devices", type=numbers, default=(1, 2, 3, 4, 8), help="and of these")
    parser.add_argument("--commit", default="", help="to be written down where git is not at hand")
    args, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="rwkv-bench-") as temporary:
        folder = args.folder or Path(temporary)
        model = args.model_path or folder / f"random-{args.size}.safetensors"
        if not model.exists():
            write_random_file(args.size, model, torch.device("cuda:0"))
            torch.cuda.empty_cache()
        head = {"machine": torch.cuda.get_device_name(0), "torch": torch.__version__, "commit": args.commit or commit()}
        head |= {"size": args.size, "prompt_tokens": args.prompt_tokens, "drawn": args.drawn, "seconds": args.seconds}
        results: list[dict[str, Any]] = []
        for count in args.devices:
            for result in run_on(count, model, Path(temporary), args, flags):
                results.append(result)
                line = json.dumps({**head, "results": with_ratios(results)})
                if args.out:
                    args.out.write_text(line + "\n")  # a run that is ended early keeps what it has
    print(line)


if __name__ == "__main__":
    main()
