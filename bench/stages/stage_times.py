"""What each stage of a pipeline takes for steps of each kind, alone on its GPU: `pipeline_model` reckons with it.

    python -m bench.stages.stage_times --devices 0,0,0,0 --layers 9,8,8,7 --layers 8.5,8.5,8,7

The graphs that serve, replayed one stage after the other for `--seconds` each, over rows with states of their own. One
GPU may be named several times: stages do not work at once here, so four stages of one GPU take what they would on four,
but for what runs at the same time on the same host and the clock that a GPU that works without a pause keeps.

Last line: JSON, milliseconds by stage: `decode` by rows; `prompts` by rows and tokens, as steps of their own; `mixed`
by rows that decode, rows and tokens of prompts in the same graph.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from bench.tools.gpu_model import SIZES, write_random_file
from bench.tools.origin import commit
from bench.traffic import SAMPLING
from rwkv_batch.config import EngineConfig
from rwkv_batch.core.limits import Limits
from rwkv_batch.model.step_inputs import StepInputs, step_inputs
from rwkv_batch.runner.memory import Memory
from rwkv_batch.runner.model_runner import ModelRunner
from state_pool.arena import FIRST_FREE_SLOT
from state_pool.config import PoolConfig

ROWS = (1, 32, 64, 80, 96, 240, 256, 480, 960)
PROMPTS = ((1, 20), (2, 40), (3, 60), (4, 80), (5, 100), (6, 120), (7, 140), (9, 180), (12, 240), (15, 300), (24, 480))
MIXED = ((80, 1, 20), (80, 2, 40), (80, 5, 100), (240, 1, 20))
"""Rows that decode, rows and tokens of prompts."""
WARM_S = 0.1
PIECE = 10
"""Replays between two looks at the clock."""


def loaded(model: Path, devices: tuple[str, ...], layers: tuple[float, ...]) -> ModelRunner:
    """The runner with these stages, nothing captured; one group of rows, so that a step may have all of them."""
    limits = Memory.limits

    def riding(memory: Memory) -> Limits:
        return replace(limits(memory), mixed_rows=512)

    pool = PoolConfig(state_db="", prefix_cache_slots=4, l1_sessions=4)
    config = EngineConfig(
        model_path=str(model),
        devices=devices,
        layers=layers,
        micro_batches=1,
        max_running=max(ROWS),
        warmup=False,
        pool=pool,
    )
    with mock.patch.object(Memory, "limits", riding):
        return ModelRunner(config, lambda: None)


def timed(device: torch.device, replay: Callable[[], None], seconds: float) -> float:
    """Milliseconds of one replay of many in a row, the median over pieces of them."""
    pieces: list[float] = []
    with torch.cuda.device(device):
        for limit in (WARM_S, seconds):
            pieces, spent = [], 0.0
            while spent < limit * 1e3:
                events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                events[0].record()
                for _ in range(PIECE):
                    replay()
                events[1].record()
                events[1].synchronize()
                pieces.append(events[0].elapsed_time(events[1]))
                spent += pieces[-1]
    return sorted(pieces)[len(pieces) // 2] / PIECE


def prompts_of(rows: int, tokens: int, first_slot: int) -> StepInputs:
    """So many prompts of equal length, which begin at the zero state."""
    slots = list(range(first_slot, first_slot + rows))
    return step_inputs([[300 + i for i in range(tokens // rows)]] * rows, [0] * rows, slots, list(range(rows)))


class Case(NamedTuple):
    """Graphs of one kind of step."""

    kind: str
    name: str
    tokens: int
    """of it, padding included"""
    capture: Callable[[int], torch.cuda.CUDAGraph]
    """of a stage"""
    fill: Callable[[], None]
    """bring what they read to the devices"""


def cases(runner: ModelRunner) -> Iterator[Case]:
    """All that are measured."""
    graphs, prefill, mixed = runner.graphs.decode, runner.graphs.prompts, runner.graphs.mixed
    assert graphs is not None and prefill is not None and mixed is not None, runner.graphs.refusal

    def decoding(rows: int) -> dict[str, list[int]]:
        slots = list(range(FIRST_FREE_SLOT, FIRST_FREE_SLOT + rows))
        return {"read_slots": slots, "write_slots": slots, "seats": list(range(rows))}

    for rows in ROWS:
        size = next(size for size in graphs.sizes if size >= rows)
        capture = partial(graphs._graph, size=size, sampled=True, adapters=False)
        yield Case("decode", f"{rows}", size, capture, partial(graphs._fill, size, decoding(rows)))
    for rows, tokens in PROMPTS:
        inputs = prompts_of(rows, tokens, FIRST_FREE_SLOT)
        fits = prefill.size_for(inputs)
        assert fits is not None, "each has a graph"
        fill = partial(prefill._staged.fill, inputs, fits)
        yield Case("prompts", f"{rows},{tokens}", fits.tokens, partial(prefill._graph, size=fits), fill)
    for rows, reading, tokens in MIXED:
        fitting = mixed.size_for(rows, reading, tokens)
        if fitting is not None:
            inputs, seats = prompts_of(reading, tokens, FIRST_FREE_SLOT + rows), list(range(rows, rows + reading))
            fill = partial(mixed._fill, fitting, decoding(rows), inputs, seats)
            name, capture = f"{rows},{reading},{tokens}", partial(mixed._graph, size=fitting)
            yield Case("mixed", name, fitting.tokens, capture, fill)


def measured(runner: ModelRunner, seconds: float) -> dict[str, dict[str, list[float]]]:
    """See the top of this file."""
    assert runner.graphs.decode is not None, runner.graphs.refusal
    for seat in range(runner.limits.num_seats):
        runner.sampler("").admit(seat, SAMPLING)
    places = runner.graphs.decode.places
    found: dict[str, dict[str, list[float]]] = {}
    for case in cases(runner):
        captured = [case.capture(number) for number in range(len(places))]
        pairs = list(zip(places, captured, strict=True))
        case.fill()
        before = None
        for place, graph in pairs:  # what a stage is given is what the one before makes of it
            place.run(graph.replay, case.tokens, before)
            before = place
        for place in places:
            torch.cuda.synchronize(place.device)
        took = [round(timed(place.device, graph.replay, seconds), 4) for place, graph in pairs]
        found.setdefault(case.kind, {})[case.name] = took
        print(json.dumps({case.kind: {case.name: took}}), flush=True)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="7.2b")
    parser.add_argument("--model-path", type=Path, help="instead of a random model of --size")
    parser.add_argument("--devices", default="0,0,0,0", help="as --pp-devices; a GPU may be named several times")
    parser.add_argument("--layers", action="append", default=[], help="as --pp-layers; once for each deal to measure")
    parser.add_argument("--seconds", type=float, default=0.4, help="of each graph")
    parser.add_argument("--out", type=Path, help="file for the last line, there from the first deal on")
    parser.add_argument("--commit", default="", help="to be written down where git is not at hand")
    args = parser.parse_args()
    devices = tuple(args.devices.split(","))
    head = {"machine": torch.cuda.get_device_name(0), "torch": torch.__version__, "commit": args.commit or commit()}
    head |= {"size": args.size, "devices": args.devices, "seconds": args.seconds}
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="rwkv-bench-") as folder:
        model = args.model_path or write_random_file(args.size, Path(folder) / "m.safetensors", torch.device("cuda:0"))
        torch.cuda.empty_cache()
        for deal in args.layers or [""]:
            layers = tuple(float(count) for count in deal.split(",")) if deal else ()
            runner = loaded(model, devices, layers)
            dealt = [stage.share for stage in runner.pipeline.stages]
            results.append({"layers": dealt, "ms": measured(runner, args.seconds)})
            if args.out:
                args.out.write_text(json.dumps({**head, "results": results}) + "\n")
            runner.pool.close()
            del runner
            gc.collect()
            torch.cuda.empty_cache()
    print(json.dumps({**head, "results": results}))


if __name__ == "__main__":
    main()
