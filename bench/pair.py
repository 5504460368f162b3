"""Tokens/s of two engines over HTTP, against one engine.

    python -m bench.pair --streams 300 320 --model-path /dev/shm/random.safetensors

Two services run at the same time, one with one engine and one with two. Each engine of a service has its own GPU. The
services share the GPUs: the single engine gets half of the first one's memory. For each number of `--streams`, that
many streams per engine start at once. Three cases alternate: `http_1` and `http_2`, and `total_1`, which is one engine
with the streams of two.

- `ratio`: `http_2` over `http_1`, the median over the rounds. `ok`: at least 1.9 with each number of streams.
- `total_ratio`: `http_2` over `total_1`, with the same streams.
- `tokens_per_s`: all tokens over all seconds. `steady`: the sum over the streams of tokens after the first delta, over
  the time from the first delta to the last. It leaves out the start and the end of a run.
- `shares`: tokens of each engine. `cores`: of each process the cores that it used in the last run, and its busiest
  thread; 1.0 is a thread that never waited.

On a CPU the engines of both services share the cores, so the ratio has no meaning. Further flags go to the services.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import operator
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.tools.cpu_time import Used, cores, used
from bench.tools.http_load import Load, fetch, over_http
from bench.tools.record import Arguments, finish, origin
from bench.tools.service import percentile, service

ROUTE = "/v1/chat/completions"
LEAST_RATIO = 1.9
PROMPT_WORDS = 16
MEMORY_OF_ONE = "0.45"
WARM_TOKENS = 32
READY_S = 180.0
LOOKS = 8
"""Times in a row that /readyz must say ready: each request meets one of the HTTP workers."""
CASES = {"http_1": (1, 1), "http_2": (2, 2), "total_1": (1, 2)}
"""Name -> engines of the service, streams as a multiple of one engine's."""
RATIOS = {"ratio": ("http_2", "http_1"), "total_ratio": ("http_2", "total_1")}


@dataclass
class Figures:
    tokens_per_s: list[float] = field(default_factory=list)
    steady: list[float] = field(default_factory=list)
    ttft_ms_p50: list[float | None] = field(default_factory=list)
    ttft_ms_p99: list[float | None] = field(default_factory=list)
    shares: list[list[int]] = field(default_factory=list)
    errors: int = 0
    cores: dict[str, list[float]] = field(default_factory=dict)


@contextlib.contextmanager
def running(count: int, flags: list[str], log: Path) -> Iterator[str]:
    """Run a service with `count` ready engines; yields its URL."""
    arguments = ["--replicas", str(count), "--access-log", "no", "--max-streams-per-client", "480", *flags]
    with log.open("ab") as file, service(arguments, file) as url:
        wait_ready(url)
        yield url


def wait_ready(url: str) -> None:
    """Wait until every HTTP worker sees all engines ready. Raises SystemExit after READY_S seconds."""
    deadline, looks = time.monotonic() + READY_S, 0
    while looks < LOOKS:
        if time.monotonic() > deadline:
            raise SystemExit(f"the engines were not all ready within {READY_S:.0f} s")
        with contextlib.suppress(OSError):
            looks = looks + 1 if json.loads(fetch(url, "/readyz", ""))["status"] == "ready" else 0
        time.sleep(0.05)


def processes(url: str) -> dict[str, Used]:
    """CPU seconds of each process of the service."""
    status = json.loads(fetch(url, "/status", ""))
    pids = {one["engine"]: int(one["pid"]) for one in status["engines"]}
    pids |= {worker["name"]: worker["pid"] for worker in status["processes"]["http_workers"]}
    return {name: used(pid) for name, pid in sorted(pids.items())}


def tokens_by_engine(url: str) -> dict[str, float]:
    """Return the tokens that each engine generated after its start."""
    found: dict[str, float] = {}
    for line in fetch(url, "/metrics", "").splitlines():
        if line.startswith("rwkv_completion_tokens_total{") and 'engine="' in line:
            labels, _, value = line.rpartition(" ")
            engine = labels.rpartition('engine="')[2].partition('"')[0]
            found[engine] = found.get(engine, 0.0) + float(value)
    return found


def run(url: str, streams: int, options: argparse.Namespace, figures: Figures) -> None:
    load = Load(ROUTE, streams, 1, 1, options.max_tokens, PROMPT_WORDS, options.chunk_size, True, "")
    before, tokens, begun = processes(url), tokens_by_engine(url), time.perf_counter()
    ran = over_http(load, url, options.client_processes)
    figures.cores = cores(before, processes(url), time.perf_counter() - begun)
    now = tokens_by_engine(url)
    figures.shares.append([int(now[name] - tokens.get(name, 0.0)) for name in sorted(now)])
    busiest = round(max(ran["clients_cpu_s"]) / ran["seconds"], 2)
    figures.cores["clients"] = [round(sum(ran["clients_cpu_s"]) / ran["seconds"], 2), busiest]
    firsts = [first for first, _, _ in ran["figures"] if first]
    figures.tokens_per_s.append(round(ran["tokens"] / ran["seconds"], 1))
    figures.ttft_ms_p50.append(percentile(firsts, 0.5))
    figures.ttft_ms_p99.append(percentile(firsts, 0.99))
    later = options.max_tokens - options.chunk_size
    figures.steady.append(round(sum(later / sum(gaps) for _, gaps, _ in ran["figures"] if gaps), 1))
    figures.errors += sum(bool(error) for _, _, error in ran["figures"])


def measure(urls: dict[int, str], options: argparse.Namespace) -> dict[str, Any]:
    """Measure all cases with each number of streams. One warm-up run of each case comes first."""
    found = {streams: {name: Figures() for name in CASES} for streams in options.streams}
    short = argparse.Namespace(**{**vars(options), "max_tokens": WARM_TOKENS})
    for engines, times in CASES.values():
        run(urls[engines], times * max(options.streams), short, Figures())
    for turn in range(options.rounds):
        for streams in options.streams:
            for name in CASES if turn % 2 else reversed(CASES):
                (engines, times), figures = CASES[name], found[streams][name]
                run(urls[engines], times * streams, options, figures)
                print(
                    streams, name, figures.tokens_per_s[-1], figures.shares[-1], json.dumps(figures.cores), flush=True
                )
    by_streams = {streams: compared(cases) for streams, cases in found.items()}
    return {"ok": all(one["ok"] for one in by_streams.values()), "by_streams": by_streams}


def compared(cases: dict[str, Figures]) -> dict[str, Any]:
    ratios = {}
    for name, (one, other) in RATIOS.items():
        if one in cases and other in cases:
            ratios[name] = round(_ratio(cases[one].tokens_per_s, cases[other].tokens_per_s), 3)
            ratios[f"steady_{name}"] = round(_ratio(cases[one].steady, cases[other].steady), 3)
    errors = sum(figures.errors for figures in cases.values())
    is_ok = ratios.get("ratio", 0.0) >= LEAST_RATIO and not errors
    return {"ok": is_ok, **ratios, **{name: vars(figures) for name, figures in cases.items()}}


def _ratio(ones: list[float], others: list[float]) -> float:
    return float(statistics.median(map(operator.truediv, ones, others)))


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Our flags, and the rest for the services."""
    parser = Arguments(__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[64], help="per engine")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--chunk-size", type=int, default=4)
    parser.add_argument("--client-processes", type=int, default=2)
    parser.add_argument("--log", type=Path, default=Path("/dev/null"), help="file for the services' logs")
    return parser.parse_known_args()


def main() -> None:
    options, flags = parse()
    single_flags = ["--gpu-memory-utilization", MEMORY_OF_ONE, *flags]
    with running(1, single_flags, options.log) as single, running(2, flags, options.log) as double:
        figures = measure({1: single, 2: double}, options)
    asked = {name: value for name, value in vars(options).items() if name not in ("log", "commit", "out")}
    finish({"bench": "pair", **asked, "flags": flags, **figures, **origin(options.commit)}, options.out)


if __name__ == "__main__":
    main()
