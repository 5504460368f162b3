"""Checks the int8 kernels to the bit and times them beside fp8.

python program.py check GROUP       one group of plans, in a process of its own: a fault ends that group alone
python program.py time OUT.json     every (shape, rows) cell: all plans, today's fp8 kernels, cuBLASLt fp8
python program.py all FOLDER        both; leaves JSON in FOLDER
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import int8
import torch
from int8 import Codes, Kernels, Plan

FOLDER = Path(__file__).parent
DEVICE = "cuda"
SHAPES = {  # n of each map, K, unsigned inputs
    "cc": ((4096,), 4096, False),
    "rkv": ((4096,) * 3, 4096, False),
    "key": ((16384,), 4096, False),
    "value": ((4096,), 16384, True),
    "head": ((65536,), 4096, False),
}
ROWS = (1, 8, 32, 64, 128, 320, 960, 4096)
FEW = [Plan(rows, splits) for rows in (8, 16, 32, 64) for splits in (1, 2, 4, 8)]
SPLIT = [Plan(128, 2), Plan(128, 4), Plan(160, 2), Plan(320, 4)]
SPLIT += [
    Plan(rows, splits, in_memory=True)
    for rows, splits in ((8, 4), (32, 4), (64, 2), (64, 4), (128, 2), (128, 4), (160, 2), (320, 4))
]
MANY = [Plan(rows, lead=lead) for rows in (80, 128, 160, 240, 256, 320) for lead in (0, 1)]
MANY += [Plan(rows, blocks=2, lead=lead) for rows in (160, 192) for lead in (0, 1)]
MANY += [Plan(rows, warpgroups=3, lead=lead) for rows in (160, 192) for lead in (0, 1)] + [Plan(256, lead=2)]
PAIRS = [Plan(rows, pair=2, lead=lead) for rows in (128, 160, 240, 256, 320) for lead in (0, 1)]
PAIRS += [Plan(rows, pair=2, blocks=2, lead=lead) for rows in (160, 192) for lead in (0, 1)]
GROUPS = {"few": FEW, "split": SPLIT, "many": MANY, "pairs": PAIRS}
CELL_MS = 25
ROTATED_BYTES = 260e6


# Correctness ------------------------------------------------------------------------------------------------------


def random_codes(shape: tuple[int, ...], unsigned: bool, generator: torch.Generator) -> torch.Tensor:
    """Codes over the whole range, the extremes among them."""
    low, high = (0, 256) if unsigned else (-127, 128)
    codes = torch.randint(low, high, shape, generator=generator, device=DEVICE, dtype=torch.int16)
    if torch.rand((), generator=generator, device=DEVICE) < 0.3:
        codes.fill_(high - 1)
    return codes.to(torch.uint8 if unsigned else torch.int8)


def check_rows(plan: Plan) -> list[int]:
    """Row counts that a plan is checked with: full, ragged, several tiles."""
    t = plan.tile_rows
    return sorted({1, 2, t // 2 + 1, t - 1, t, t + 1, 2 * t + 3, 3 * t})


def check_plan(
    kernels: Kernels, plan: Plan, n_maps: tuple[int, ...], k: int, unsigned: bool, seed: int
) -> tuple[int, int]:
    """-> cases run, cases with any wrong bit."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    most = max(check_rows(plan))
    maps = []
    for n in n_maps:
        w = Codes(
            random_codes((n, k), False, generator),
            torch.rand(n, generator=generator, device=DEVICE) * (0.05 / k),
            torch.randint(16, int8.MAX_WEIGHT_RATIO + 1, (n,), generator=generator, device=DEVICE, dtype=torch.int32),
        )
        pitch, top = int8.pitch_of(most), int8.MAX_UNSIGNED_RATIO if unsigned else int8.MAX_RATIO
        x = Codes(
            random_codes((most, k), unsigned, generator),
            torch.rand(pitch, generator=generator, device=DEVICE),
            torch.randint(16, top + 1, (pitch,), generator=generator, device=DEVICE, dtype=torch.int32),
        )
        wanted = int8.product(Codes(x.codes, x.scales[:most], x.ratios[:most]), w)
        assert wanted.isfinite().all() and (wanted != 0).float().mean() > 0.99
        maps.append((x, w, wanted))
    cases = wrong = 0
    for rows in check_rows(plan):
        tiles = -(-rows // plan.tile_rows) * sum(-(-n // 128) for n in n_maps)
        if plan.in_memory and tiles * plan.splits > 132:
            continue  # not all CTAs run at once: refused
        ys = [
            torch.full((rows + 8, len(w.codes)), float("nan"), dtype=torch.float16, device=DEVICE) for _, w, _ in maps
        ]
        torch.cuda.synchronize()  # weights are read without waiting for the kernels before
        kernels.multiply(
            plan, [(x._replace(codes=x.codes[:rows]), w, y[:rows]) for (x, w, _), y in zip(maps, ys, strict=True)]
        )
        torch.cuda.synchronize()
        for (_, _, wanted), y in zip(maps, ys, strict=True):
            cases += 1
            bad = (y[:rows].view(torch.int16) != wanted[:rows].view(torch.int16)).nonzero()
            if len(bad) or not bool(y[rows:].isnan().all()):
                wrong += 1
                if wrong <= 2 and len(bad):
                    t, n = bad[0].tolist()
                    print(
                        f"  {plan} {n_maps} k{k} rows {rows}: {len(bad)} of {y[:rows].numel()} wrong, first {t},{n}: {y[t, n].item()} for {wanted[t, n].item()}; last {bad[-1].tolist()}",
                        flush=True,
                    )
    return cases, wrong


def check_quantise(kernels: Kernels) -> tuple[int, int]:
    """The prologue against the reference, to the bit."""
    generator = torch.Generator(DEVICE).manual_seed(5)
    cases = wrong = 0
    for k in (4096, 16384):
        for rows in (1, 7, 64, 333):
            for dtype in (torch.float16, torch.float32):
                for relu_squared in (False, True):
                    for full in (False, True):
                        x = (torch.randn(rows, k, generator=generator, device=DEVICE) * 3).to(dtype)
                        if rows > 4:
                            x[1] = 0
                            x[2, :64] *= 100
                            x[3, 17] = float("nan")
                            x[4] *= 1e-6
                        factors = torch.rand(k, generator=generator, device=DEVICE) + 0.5 if full else None
                        positions = int8.permutation(x[-1].abs().float().nan_to_num()) if full else None
                        short = None if positions is None else positions.to(torch.int16)
                        code_type = torch.uint8 if relu_squared else torch.int8
                        codes = torch.full((rows, k), 77, dtype=code_type, device=DEVICE)
                        rounded = Codes(
                            codes,
                            torch.full((rows,), -1.0, device=DEVICE),
                            torch.full((rows,), -1, dtype=torch.int32, device=DEVICE),
                        )
                        kernels.quantise(x, factors, short, rounded)
                        wanted = int8.quantise_rows(x, factors, positions, relu_squared)
                        cases += 1
                        same_scales = torch.equal(
                            rounded.scales.nan_to_num(-2), wanted.scales.nan_to_num(-2)
                        ) and torch.equal(rounded.ratios, wanted.ratios)
                        if not torch.equal(codes, wanted.codes) or not same_scales:
                            wrong += 1
                            bad = (codes != wanted.codes).nonzero()
                            print(
                                f"  quantise k{k} rows {rows} {dtype} relu {relu_squared} full {full}: {len(bad)} codes, scales {same_scales}, first {bad[:1].tolist()}",
                                flush=True,
                            )
    return cases, wrong


def check(group: str) -> int:
    """Prints one line of JSON per plan."""
    kernels = Kernels()
    shapes = [((4096,), 4096, False), ((4096,), 16384, True), ((192, 4160, 64), 2048, False)]
    if group == "quantise":
        cases, wrong = check_quantise(kernels)
        print(json.dumps({"plan": "quantise", "cases": cases, "wrong": wrong}), flush=True)
        return wrong > 0
    total = 0
    for plan in GROUPS[group]:
        cases = wrong = 0
        for seed, (n_maps, k, unsigned) in enumerate(shapes):
            c, w = check_plan(kernels, plan, n_maps, k, unsigned, seed)
            cases, wrong = cases + c, wrong + w
        total += wrong
        print(json.dumps({"plan": str(plan), "cases": cases, "wrong": wrong}), flush=True)
    return total > 0


# Timing -----------------------------------------------------------------------------------------------------------


class Meter(threading.Thread):
    """Samples power and SM clock while something runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        import pynvml

        pynvml.nvmlInit()
        self.nvml, self.handle = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
        self.samples: list[tuple[float, int]] = []
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.04):
            watts = self.nvml.nvmlDeviceGetPowerUsage(self.handle) / 1000
            self.samples.append((watts, self.nvml.nvmlDeviceGetClockInfo(self.handle, self.nvml.NVML_CLOCK_SM)))

    def end(self) -> tuple[float, float]:
        """Median of the second half -> W, MHz."""
        self.ended.set()
        self.join()
        late = self.samples[len(self.samples) // 2 :] or [(0.0, 0)]
        return tuple(sorted(s[i] for s in late)[len(late) // 2] for i in range(2))


def capture(launches: list[Callable[[], None]], repeats: int) -> torch.cuda.CUDAGraph:
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for launch in launches:
                launch()
    return graph


def time_us(launches: list[Callable[[], None]], cell_ms: float = CELL_MS) -> float:
    """Median time of one launch in back-to-back graph replays over rotated inputs."""
    repeats = -(-12 // len(launches))
    graph, count = capture(launches, repeats), repeats * len(launches)

    def replay(times: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / times

    once = replay(2)
    times = max(1, round(cell_ms / 3 / once))
    return sorted(replay(times) for _ in range(3))[1] / count * 1000


def sustained(launches: list[Callable[[], None]], seconds: float = 1.0) -> dict[str, float]:
    """Time of a launch at the power limit."""
    graph, count = capture(launches, -(-12 // len(launches))), -(-12 // len(launches)) * len(launches)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    torch.cuda.synchronize()
    t = time.monotonic()
    graph.replay()
    torch.cuda.synchronize()
    once = time.monotonic() - t
    for _ in range(int(seconds / 2 / once)):
        graph.replay()
    meter = Meter()
    meter.start()
    start.record()
    times = max(1, int(seconds / 2 / once))
    for _ in range(times):
        graph.replay()
    end.record()
    end.synchronize()
    watts, clock = meter.end()
    return {"us": start.elapsed_time(end) / times / count * 1000, "watts": watts, "mhz": clock}


def normal_codes(shape: tuple[int, ...], unsigned: bool = False) -> torch.Tensor:
    """As rounding makes them: the largest of a row is 127."""
    v = torch.randn(shape, device=DEVICE, dtype=torch.float16)
    return (
        (v.abs() * 60).clamp(0, 255).to(torch.uint8) if unsigned else (v * 30).round().clamp(-127, 127).to(torch.int8)
    )


class Cell:
    """The tensors of a (shape, rows) cell."""

    def __init__(self, name: str, with_codes: bool = True) -> None:
        self.ns, self.k, self.unsigned = SHAPES[name]
        self.bytes = sum(self.ns) * self.k
        sets = max(2, -(-int(ROTATED_BYTES) // self.bytes))
        self.weights = []
        for i in range(sets):
            of_set = []
            for j, n in enumerate(self.ns):
                codes = normal_codes((n, self.k)) if i == 0 else self.weights[0][j].codes.roll(i, 0)
                of_set.append(
                    Codes(
                        codes,
                        torch.rand(n, device=DEVICE) * 1e-4,
                        torch.randint(16, 40, (n,), device=DEVICE, dtype=torch.int32),
                    )
                )
            self.weights.append(of_set)

    def launches(self, kernels: Kernels, plan: Plan, rows: int) -> list[Callable[[], None]]:
        pitch = int8.pitch_of(rows)
        inputs = [
            Codes(
                normal_codes((rows, self.k), self.unsigned),
                torch.rand(pitch, device=DEVICE),
                torch.randint(16, 40, (pitch,), device=DEVICE, dtype=torch.int32),
            )
            for _ in self.ns
        ]
        ys = [torch.empty(rows, n, dtype=torch.float16, device=DEVICE) for n in self.ns]

        def launch_of(weights: list[Codes]) -> Callable[[], None]:
            maps = list(zip(inputs, weights, ys, strict=True))
            return lambda: kernels.multiply(plan, maps)

        return [launch_of(w) for w in self.weights]


def plans_for(name: str, rows: int) -> list[Plan]:
    """What may be fastest in a cell."""
    if rows <= 64:
        tile = 8 if rows <= 8 else rows
        plans = [Plan(tile, splits) for splits in (1, 2, 4, 8)]
        if rows <= 8:
            return plans + [
                Plan(8, ctas=264),
                Plan(32),
                Plan(32, 2),
                Plan(8, 4, in_memory=True),
                Plan(32, 4, in_memory=True),
            ]
        return plans + (
            [Plan(32, 4, in_memory=True)] if rows == 32 else [Plan(64, 4, in_memory=True), Plan(64, 2, in_memory=True)]
        )
    if rows == 128:
        return (
            [Plan(128, s) for s in (1, 2, 4)]
            + [Plan(128, lead=1), Plan(128, pair=2), Plan(128, pair=2, lead=1), Plan(64), Plan(64, 2), Plan(64, 4)]
            + [Plan(t, n, in_memory=True) for t in (64, 128) for n in (2, 4)]
        )
    both = [(lead, pair) for lead in (0, 1) for pair in (1, 2)]
    wide = [Plan(t, lead=lead, pair=pair, blocks=2) for t in (160, 192) for lead, pair in both]
    if rows == 320:
        plans = [Plan(320, lead=lead, pair=pair) for lead, pair in both] + [
            Plan(320, 4, in_memory=True),
            Plan(160, 2, in_memory=True),
            Plan(160, 2),
            Plan(160),
            Plan(160, lead=1),
            Plan(160, pair=2),
            Plan(80),
            Plan(160, warpgroups=3),
            Plan(160, warpgroups=3, lead=1),
        ]
        return plans + wide[:4]
    if rows == 960:
        plans = [Plan(t, lead=lead, pair=pair) for t in (240, 320, 160) for lead, pair in both]
        return (
            plans + wide + [Plan(160, warpgroups=3), Plan(160, warpgroups=3, lead=1), Plan(192, warpgroups=3, lead=1)]
        )
    plans = [Plan(256, lead=lead, pair=pair) for lead in (0, 1, 2) for pair in (1, 2)]
    return (
        plans
        + wide
        + [Plan(192, warpgroups=3, lead=1), Plan(240, lead=1), Plan(320, lead=1), Plan(320, lead=1, pair=2)]
    )


class Fp8:
    """The project's fp8 products, if built as libbase_fp8.so, and cuBLASLt's."""

    def __init__(self) -> None:
        sys.path.insert(0, str(FOLDER / "base"))
        import ctypes

        from rwkv_batch.kernels.activation import Activation
        from rwkv_batch.kernels.cuda import library, wide, wide_fp8

        names = ("rwkv_wide_fp8", "rwkv_wide_parts")
        signatures = {name: library.HOPPER_SIGNATURES[name] for name in names}
        kernels = library.Kernels(ctypes.CDLL(str(FOLDER / "libbase_fp8.so")), signatures)
        wide.hopper_library = lambda: kernels
        self.wide_fp8, self.none = wide_fp8, Activation.NONE

    def launches(self, cell: Cell, rows: int) -> list[Callable[[], None]]:
        """By the project's own kernels: rows in two parts up to 64, e4m3 up to 320."""
        w = [[m.codes.half().mul(0.03).to(torch.float8_e4m3fn) for m in of_set] for of_set in cell.weights]
        w_scales = [torch.rand(n, device=DEVICE) for n in cell.ns]
        ys = [torch.empty(rows, n, dtype=torch.float16, device=DEVICE) for n in cell.ns]
        parts = rows <= 64
        if parts:
            xs = [torch.randn(rows, 2, cell.k, device=DEVICE).to(torch.float8_e5m2) for _ in cell.ns]
        else:
            xs = [torch.randn(rows, cell.k, device=DEVICE).to(torch.float8_e4m3fn) for _ in cell.ns]
        x_scales = None if parts else torch.rand(rows, device=DEVICE)

        def launch_of(weights: list[torch.Tensor]) -> Callable[[], None]:
            maps = [
                self.wide_fp8.Fp8Map(m, s, x, x_scales, y, self.none)
                for m, s, x, y in zip(weights, w_scales, xs, ys, strict=True)
            ]
            return lambda: self.wide_fp8.launch_wide_fp8(maps)

        return [launch_of(of_set) for of_set in w]

    def cublas(self, cell: Cell, rows: int) -> list[Callable[[], None]]:
        rows = -(-rows // 16) * 16
        x = torch.randn(rows, cell.k, device=DEVICE).to(torch.float8_e4m3fn)
        x_scales = torch.rand(rows, 1, device=DEVICE)
        ws = [
            [
                (m.codes.half().mul(0.03).to(torch.float8_e4m3fn).T, torch.rand(1, m.codes.shape[0], device=DEVICE))
                for m in s
            ]
            for s in cell.weights
        ]
        ys = [torch.empty(rows, n, dtype=torch.bfloat16, device=DEVICE) for n in cell.ns]

        def launch_of(maps: list) -> Callable[[], None]:
            def launch() -> None:
                for (w, s), y in zip(maps, ys, strict=True):
                    torch._scaled_mm(
                        x, w, scale_a=x_scales, scale_b=s, out_dtype=torch.bfloat16, use_fast_accum=True, out=y
                    )

            return launch

        return [launch_of(m) for m in ws]


def rate(cell: Cell, rows: int, us: float) -> str:
    tops, gbs = 2 * rows * cell.bytes / us / 1e6, cell.bytes / us / 1e3
    return f"{us:8.1f} us {tops:6.0f} TOPS {gbs:5.0f} GB/s"


def time_cells(out: Path, deadline: float, wanted: str = "") -> None:
    """Every cell; stops at the deadline (time.monotonic)."""
    torch.manual_seed(0)
    kernels, results = Kernels(), {"cells": [], "sustained": [], "prologue": [], "ceilings": {}}
    results["device"] = torch.cuda.get_device_name()
    try:
        fp8 = Fp8()
    except Exception as error:
        print("no fp8 of base:", repr(error))
        fp8 = None
    data, sink = torch.ones(2 << 30, dtype=torch.uint8, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    us = time_us([lambda: kernels.read(data, sink)])
    results["ceilings"]["read_gb_s"] = data.numel() / us / 1e3
    print(f"read ceiling {data.numel() / us / 1e3:.0f} GB/s", flush=True)
    del data

    def attempt(what: str, make: Callable[[], list], cell: Cell, rows: int, record: dict) -> float | None:
        try:
            us = time_us(make())
        except Exception as error:
            record[what] = str(error).splitlines()[0][:120]
            if "CUDA error" in str(error) or "illegal" in str(error):
                raise
            return None
        record[what] = us
        return us

    for name in SHAPES:
        if wanted and name not in wanted.split(","):
            continue
        cell = Cell(name)
        for rows in ROWS:
            if time.monotonic() > deadline:
                print("deadline")
                break
            if name == "head" and rows > 960:
                continue
            record, best = {}, None
            for plan in plans_for(name, rows):
                us = attempt(str(plan), lambda plan=plan: cell.launches(kernels, plan, rows), cell, rows, record)
                if us is not None and (best is None or us < best[0]):
                    best = (us, plan)
            others = {}
            if fp8 is not None and (rows <= 320 or 512 < rows <= 640):
                attempt("fp8 base", lambda: fp8.launches(cell, rows), cell, rows, others)
            if rows >= 64 and fp8 is not None:
                attempt("fp8 cuBLAS", lambda: fp8.cublas(cell, rows), cell, rows, others)
            line = {"shape": name, "rows": rows, "plans": record, "others": others}
            if best:
                line |= {
                    "best_us": best[0],
                    "best": str(best[1]),
                    "tops": 2 * rows * cell.bytes / best[0] / 1e6,
                    "gb_s": cell.bytes / best[0] / 1e3,
                }
                ranked = sorted((v, k) for k, v in record.items() if isinstance(v, float))[:4]
                print(
                    f"{name:5} {rows:4}: {rate(cell, rows, best[0])} {best[1]} | fp8 "
                    + ", ".join(
                        f"{k.split()[1]} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in others.items()
                    )
                    + " | "
                    + "; ".join(f"{k} {v:.1f}" for v, k in ranked[1:]),
                    flush=True,
                )
                if rows >= 960 and name in ("cc", "key", "value"):
                    by_name = {str(plan): plan for plan in plans_for(name, rows)}
                    entry = {"shape": name, "rows": rows, "int8": {}}
                    for _, text in sorted((v, k) for k, v in record.items() if isinstance(v, float))[
                        : 14 if rows == 4096 else 6
                    ]:
                        entry["int8"][text] = sustained(cell.launches(kernels, by_name[text], rows), 0.5)
                    by_time = sorted(entry["int8"].items(), key=lambda item: item[1]["us"])
                    for text, e in by_time[:3]:
                        print(
                            f"  sustained {rate(cell, rows, e['us'])} {e['watts']:.0f} W {e['mhz']} MHz {text}",
                            flush=True,
                        )
                    print("   ", "; ".join(f"{text} {e['us']:.1f}" for text, e in by_time[3:]), flush=True)
                    if fp8 is not None:
                        e = entry["fp8 cuBLAS"] = sustained(fp8.cublas(cell, rows), 0.7)
                        print(
                            f"  sustained {rate(cell, rows, e['us'])} {e['watts']:.0f} W {e['mhz']} MHz fp8 cuBLAS",
                            flush=True,
                        )
                    results["sustained"].append(entry)
            errors = {k: v for k, v in (record | others).items() if isinstance(v, str) and "memory" not in v}
            if errors:
                print("  errors", errors, flush=True)
            results["cells"].append(line)
            out.write_text(json.dumps(results, indent=1))
        del cell
        torch.cuda.empty_cache()
    for k, relu_squared in ((4096, False), (16384, True)):
        for rows in (1, 32, 320, 4096):
            xs = [torch.randn(rows, k, device=DEVICE, dtype=torch.float16) for _ in range(4)]
            codes = torch.empty(rows, k, dtype=torch.uint8 if relu_squared else torch.int8, device=DEVICE)
            rounded = Codes(
                codes, torch.empty(rows, device=DEVICE), torch.empty(rows, dtype=torch.int32, device=DEVICE)
            )
            positions = int8.permutation(xs[0][0].abs()).to(torch.int16)
            us = time_us([lambda x=x: kernels.quantise(x, None, positions, rounded) for x in xs])
            print(f"quantise {rows} x {k}: {us:.2f} us, {rows * k * 3 / us / 1e3:.0f} GB/s", flush=True)
            results["prologue"].append({"rows": rows, "k": k, "us": us})
    out.write_text(json.dumps(results, indent=1))


def stamp_tiles(out: Path) -> None:
    """Where a tile's cycles go, of CTA 0: key at 4,096 rows, by clock stamps of each warpgroup."""
    kernels = Kernels()
    stamped = int8.ctypes.CDLL(str(FOLDER / "libstamps.so"))
    cell, results = Cell("key"), {}
    for plan in (
        Plan(256),
        Plan(256, lead=1),
        Plan(256, lead=2),
        Plan(256, pair=2, lead=1),
        Plan(192, pair=2, blocks=2),
        Plan(160, warpgroups=3),
        Plan(160, warpgroups=3, lead=1),
    ):
        kernels.library.int8_product = stamped.int8_stamped
        launches = cell.launches(kernels, plan, 4096)
        for _ in range(20):
            for launch in launches:
                launch()
        torch.cuda.synchronize()
        stamps = torch.zeros(4, 64, 8, dtype=torch.int32)
        stamped.int8_read_stamps(int8.c_void_p(stamps.data_ptr()))
        s = stamps[: plan.warpgroups].long() & 0xFFFFFFFF
        tiles = int((s[0, :, 4] > 0).sum())
        d = lambda a, b: ((a - b) & 0xFFFFFFFF).float()  # noqa: E731
        parts = {
            "first": d(s[:, :, 1], s[:, :, 0]),
            "ratios": d(s[:, :, 2], s[:, :, 1]),
            "loop": d(s[:, :, 3], s[:, :, 2]),
            "epilogue": d(s[:, :, 4], s[:, :, 3]),
            "waited": s[:, :, 5].float(),
        }
        last = tiles - 2
        results[str(plan)] = {k: v[:, 1:last].mean(1).tolist() for k, v in parts.items()}
        results[str(plan)]["tile"] = (d(s[:, last, 0], s[:, 1, 0]) / (last - 1)).tolist()
        results[str(plan)]["start_after_first"] = d(s[:, 2, 0], s[0, 2, 0]).tolist()
        floor = plan.tile_rows * plan.warpgroups * plan.blocks * 4096 // 64
        print(
            f"stamps {plan}: {tiles} tiles, floor {floor}; "
            + "; ".join(f"{k} {' '.join(f'{x:.0f}' for x in v)}" for k, v in results[str(plan)].items()),
            flush=True,
        )
    out.write_text(json.dumps(results, indent=1))


def main() -> int:
    command = sys.argv[1]
    if command == "check":
        return check(sys.argv[2])
    if command == "time":
        time_cells(Path(sys.argv[2]), time.monotonic() + float(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else "")
        return 0
    if command == "stamps":
        stamp_tiles(Path(sys.argv[2]))
        return 0
    folder, seconds = Path(sys.argv[2]), float(sys.argv[3])
    start = time.monotonic()
    groups = [*GROUPS, "quantise"]
    logs = {g: (folder / f"check_{g}.log").open("w") for g in groups}
    running = {
        g: subprocess.Popen([sys.executable, __file__, "check", g], stdout=logs[g], stderr=subprocess.STDOUT)
        for g in groups
    }
    for g, process in running.items():
        try:
            process.wait(timeout=max(5, seconds * 0.5 - (time.monotonic() - start)))
        except subprocess.TimeoutExpired:
            process.kill()
        text = (folder / f"check_{g}.log").read_text()
        lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        bad = [line["plan"] for line in lines if line["wrong"]]
        print(
            f"check {g}: rc {process.returncode}, {sum(x['cases'] for x in lines)} cases, {sum(x['wrong'] for x in lines)} wrong {bad}",
            flush=True,
        )
        if process.returncode:
            print(text[-1500:], flush=True)
    print(f"checked after {time.monotonic() - start:.0f} s", flush=True)
    subprocess.run([sys.executable, __file__, "stamps", str(folder / "stamps.json")], timeout=40, check=False)
    time_cells(folder / "times.json", start + seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
