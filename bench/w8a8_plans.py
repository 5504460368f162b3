"""Times every plan of the W8A8 kernel, and writes the launch table.

    python -m bench.w8a8_plans OUT --seconds 240 --widths 4096
    cp OUT/launch_table.json rwkv_batch/kernels/cuda/w8a8/

Each cell is a matrix of the model and a number of rows. Every compiled tile that takes the launch is timed in graphs
over rotated weights. From 960 rows on, power binds, so the fastest plans are timed again at the power limit. Writes
OUT/times.json and OUT/launch_table.json; the table has the product's lines for cells that were not timed.
test/gpu/test_gpu_w8a8.py checks the results.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from bench.tools.timers import device_ms
from rwkv_batch.kernels.cuda.w8a8.plans import TILES, Launch, Plan, TableLine, fits, launch_table, plan_w8a8
from rwkv_batch.kernels.cuda.w8a8.products import W8A8Gemm, W8A8Weights, multiply, pitch_of, prepare_w8a8
from rwkv_batch.model.quant.w8a8 import Codes, InputTransform

GPU = torch.device("cuda", 0)
ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 320, 512, 640, 960, 1024, 2048, 4096)
VOCAB = 65536
SUSTAINED_ROWS = 960
RANKED_AT_POWER_LIMIT = 6
BURST_MS, SUSTAINED_MS = 7, 500
ROTATED_BYTES = 260e6
MAX_LEAD = 1


def launches_of(width: int) -> dict[str, tuple[tuple[int, ...], int, bool]]:
    """Return name -> n of each GEMM, k, whether inputs are u8."""
    return {
        "output": ((width,), width, False),
        "rkv": ((width,) * 3, width, False),
        "key": ((4 * width,), width, False),
        "value": ((width,), 4 * width, True),
        "head": ((VOCAB,), width, False),
    }


def plans_of(launch: Launch, num_sms: int) -> Iterator[Plan]:
    """Yield the plans that take a launch. Skips plans that are hopeless for its rows."""
    for tile in TILES[launch.is_unsigned]:
        too_large = tile.tile_rows > 32 and tile.tile_rows >= 4 * launch.rows
        too_small = launch.rows >= 8 * tile.tile_rows and tile.tile_rows < 128
        if too_large or too_small or not fits(Plan(tile), launch, num_sms):
            continue
        yield Plan(tile)
        if tile.tile_rows <= 16 and tile.splits == 1:
            yield Plan(tile, ctas_per_sm=2)
        if tile.tile_rows >= 160 and tile.splits == 1:
            yield Plan(tile, lead=MAX_LEAD)


def normal_codes(shape: tuple[int, ...], unsigned: bool = False) -> torch.Tensor:
    """Codes as rounding makes them from normal values: power depends on the data."""
    v = torch.randn(shape, device=GPU, dtype=torch.float16)
    if unsigned:
        return (v.abs() * 60).clamp(0, 255).to(torch.uint8)
    return (v * 30).round().clamp(-127, 127).to(torch.int8)


def scales_and_ratios(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(count, device=GPU) * 1e-3, torch.randint(16, 40, (count,), device=GPU, dtype=torch.int32)


class Cell:
    """The tensors of a matrix: enough copies of the weights to miss in L2."""

    def __init__(self, ns: tuple[int, ...], k: int, unsigned: bool) -> None:
        self.ns, self.k, self.unsigned = ns, k, unsigned
        self.bytes = sum(ns) * k
        identity = InputTransform(torch.ones(k, device=GPU), torch.arange(k, device=GPU, dtype=torch.int32))
        first = [normal_codes((n, k)) for n in ns]
        self.weights = [
            [W8A8Weights.prepare(Codes(c.roll(i, 0), *scales_and_ratios(len(c))), identity) for c in first]
            for i in range(max(2, -(-int(ROTATED_BYTES) // self.bytes)))
        ]

    def graph(self, plan: Plan, rows: int) -> tuple[torch.cuda.CUDAGraph, int]:
        """Return a graph of at least 12 launches over the copies of the weights, and their number."""
        inputs = [
            Codes(normal_codes((rows, self.k), self.unsigned), *scales_and_ratios(pitch_of(rows))) for _ in self.ns
        ]
        ys = [torch.empty(rows, n, dtype=torch.float16, device=GPU) for n in self.ns]
        groups = [[W8A8Gemm(*gemm) for gemm in zip(inputs, of_set, ys, strict=True)] for of_set in self.weights]
        self._replayed = groups  # a graph does not keep its tensors
        for gemms in groups:
            multiply(gemms, plan)
        torch.cuda.synchronize()
        graph, repeats = torch.cuda.CUDAGraph(), -(-12 // len(groups))
        with torch.cuda.graph(graph):
            for gemms in groups * repeats:
                multiply(gemms, plan)
        return graph, repeats * len(groups)

    def burst_us(self, plan: Plan, rows: int) -> float:
        """Return the median time of one launch in replays that are too short to reach the power limit."""
        graph, count = self.graph(plan, rows)
        times = max(1, round(BURST_MS / device_ms(graph.replay, 2)))
        return sorted(device_ms(graph.replay, times) for _ in range(3))[1] / count * 1000

    def sustained_us(self, plan: Plan, rows: int) -> float:
        """Return one launch's time at the power limit."""
        graph, count = self.graph(plan, rows)
        times = max(1, round(SUSTAINED_MS / 2 / device_ms(graph.replay, 2)))
        device_ms(graph.replay, times)
        return device_ms(graph.replay, times) / count * 1000


def time_cell(cell: Cell, rows: int, num_sms: int) -> tuple[Plan, dict[str, Any]]:
    """Time all plans of a cell; return the best, and the record."""
    launch = Launch(cell.ns, cell.k, cell.unsigned, rows)
    us = {plan: cell.burst_us(plan, rows) for plan in plans_of(launch, num_sms)}
    record: dict[str, Any] = {"n": cell.ns, "k": cell.k, "rows": rows, "us": {str(plan): t for plan, t in us.items()}}
    if rows >= SUSTAINED_ROWS:
        us = {plan: cell.sustained_us(plan, rows) for plan in sorted(us, key=us.__getitem__)[:RANKED_AT_POWER_LIMIT]}
        record["sustained"] = {str(plan): t for plan, t in us.items()}
    best = min(us, key=us.__getitem__)
    record |= {"best": str(best), "best_us": us[best], "chosen_now": str(plan_w8a8(launch, num_sms))}
    return best, record | {"tops": 2 * rows * cell.bytes / us[best] / 1e6, "gb_s": cell.bytes / us[best] / 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--widths", type=int, nargs="+", default=[4096])
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + args.seconds
    torch.manual_seed(0)
    num_sms = prepare_w8a8(GPU).num_sms
    table = {(*shape, rows): plan for shape, plans in launch_table().items() for rows, plan in plans}
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "cells": []}
    for width in args.widths:
        for name, (ns, k, unsigned) in launches_of(width).items():
            cell = Cell(ns, k, unsigned)
            for rows in args.rows:
                if time.monotonic() > deadline or (name == "head" and rows > SUSTAINED_ROWS):
                    continue
                best, record = time_cell(cell, rows, num_sms)
                table[ns, k, unsigned, rows] = best
                results["cells"].append({"matrix": name, **record})
                now = record["us"].get(record["chosen_now"], 0)
                speed = f"{record['best_us']:.1f} us {record['tops']:.0f} TOPS {record['gb_s']:.0f} GB/s"
                print(f"{name} {width} {rows}: {speed} {best}; now {now:.1f} us", flush=True)
                (args.out / "times.json").write_text(json.dumps(results, indent=1))
            del cell
            torch.cuda.empty_cache()
    lines = [
        TableLine(ns, k, unsigned, rows, **plan.tile._asdict(), lead=plan.lead, ctas_per_sm=plan.ctas_per_sm)
        for (ns, k, unsigned, rows), plan in sorted(table.items())
    ]
    text = ",\n".join(msgspec.json.encode(line).decode() for line in lines)
    (args.out / "launch_table.json").write_text(f"[\n{text}\n]\n")


if __name__ == "__main__":
    main()
