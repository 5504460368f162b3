"""What a second engine is worth: tokens/s of two engines against one, over HTTP and without it, by turns.

Two services run at the same time, one with one engine and one with two; each engine of a service has a GPU of its own,
and those of both services share them: half of the memory of the first is the single engine's.
For each number of `--streams`, so many for each engine come at once. Six ways take turns: `http_1` and `http_2` from
client processes, `link_1` and `link_2` from this process through `cluster.fleet` on the engines' own sockets, `bare_1`
likewise without a fleet, and `total_1`: `http_1` with the streams of two engines. `ratio` is the median over the rounds
of two against one by HTTP, `link_ratio` without it: what both have in common is the engines' and not that of HTTP.
`fleet_ratio`: of one engine behind a fleet against its bare link. `total_ratio`: of `http_2` against `total_1`, where
both have the same streams. `ok`: 1.9 at least by HTTP, with each number of streams.

`tokens_per_s` is all tokens by all seconds; `steady`, by HTTP, the sum over the streams of tokens after the first delta
by the time from the first delta to the last: what start and end of a run do not dilute. `engines`: of each engine most
rows at once, a step's time with all of them and seconds busy (bench.tools.step_watch). A step is as long as the graph
for its rows, so an engine with more than its half may have longer ones throughout: `shares` are the tokens of each.
What binds is told by `cores`: of each process the cores that it used in the way's last run, and its busiest thread,
where 1.0 is a thread that never waited (client processes: the busiest alone). On a CPU both services' engines share the
cores, and the ratio says nothing.

    python -m bench.pair --streams 300 320 --model-path /dev/shm/random.safetensors

Further flags are the services'. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import operator
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bench.tools.cpu_time import Used, cores, used
from bench.tools.engine_load import Streams, run_streams
from bench.tools.engines import Engines
from bench.tools.http_load import Load, fetch, over_http
from bench.tools.origin import origin
from bench.tools.service import percentile, service
from bench.tools.step_watch import StepWatch
from cluster.fleet import Fleet, FleetLimits
from rwkv_batch.ipc.client import EngineClient, at_socket
from rwkv_batch.ipc.served_model import ModelStatus, ModelWish, ServedModel
from rwkv_batch.protocol import EngineProtocol

ROUTE = "/v1/chat/completions"
LEAST_RATIO = 1.9
PROMPT_WORDS = 16
MEMORY_OF_ONE = "0.45"
WARM_TOKENS = 32


@dataclass
class Service:
    """A running service with so many engines."""

    count: int
    engines: Engines
    link: Fleet
    """to its engines from this process"""
    bare: EngineClient
    """to the first of them"""

    @property
    def url(self) -> str:
        """Where it listens."""
        return self.engines.url

    def used(self) -> dict[str, Used]:
        """What its processes have used."""
        pids = {name: one["pid"] for name, one in self.engines.listed().items()}
        processes = json.loads(fetch(self.url, "/status", ""))["processes"]
        pids |= {worker["name"]: worker["pid"] for worker in processes["http_workers"] if worker["name"] != "bench"}
        return {name: used(pid) for name, pid in sorted(pids.items())}


@dataclass
class Figures:
    """Of one way."""

    tokens_per_s: list[float] = field(default_factory=list)
    steady: list[float] = field(default_factory=list)
    ttft_ms_p50: list[float | None] = field(default_factory=list)
    ttft_ms_p99: list[float | None] = field(default_factory=list)
    shares: list[list[int]] = field(default_factory=list)
    errors: int = 0
    cores: dict[str, list[float]] = field(default_factory=dict)
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, tokens: float, seconds: float, first_s: list[float]) -> None:
        """A run."""
        self.tokens_per_s.append(round(tokens / seconds, 1))
        self.ttft_ms_p50.append(percentile(first_s, 0.5))
        self.ttft_ms_p99.append(percentile(first_s, 0.99))


@contextlib.contextmanager
def running(count: int, flags: list[str], log: Path) -> Iterator[Service]:
    """A service with so many engines, all ready, and links to them."""
    folder = Path(tempfile.gettempdir())
    before = set(folder.glob("rwkv-*/engine-*"))
    arguments = ["--replicas", str(count), "--access-log", "no", "--max-streams-per-client", "480", *flags]
    with log.open("ab") as file, service(arguments, file) as url:
        engines = Engines(url)
        engines.wait_ready()
        link = Fleet(FleetLimits())
        sockets = sorted(path for path in set(folder.glob("rwkv-*/engine-*")) - before if path.is_socket())
        if len(sockets) != count:
            raise SystemExit(f"{len(sockets)} engines have come, not {count}: does another service start meanwhile?")
        link.update([_served(path) for path in sockets])
        bare = EngineClient(at_socket(str(sockets[0])))
        link.start("bench")
        bare.start("bench")
        while link.lost or len(link.members) != count or not bare.is_connected:
            time.sleep(0.05)
        yield Service(count, engines, link, bare)
        link.stop()
        bare.stop()


def _served(path: Path) -> ServedModel:
    wish = ModelWish(name="bench", file="")
    return ServedModel(wish=wish, status=ModelStatus.READY, address=str(path), since=0, engine=path.name)


class Run(NamedTuple):
    """What one run is asked for."""

    one: Service
    streams: int
    """of all its engines"""
    options: argparse.Namespace
    name: str


def by_http(run: Run, figures: Figures) -> None:
    """One run over HTTP."""
    one, options = run.one, run.options
    load = Load(ROUTE, run.streams, 1, 1, options.max_tokens, PROMPT_WORDS, options.chunk_size, True, "")
    with watched(run, figures):
        ran = over_http(load, one.url, options.client_processes)
    busiest = round(max(ran["clients_cpu_s"]) / ran["seconds"], 2)
    figures.cores["clients"] = [round(sum(ran["clients_cpu_s"]) / ran["seconds"], 2), busiest]
    figures.add(ran["tokens"], ran["seconds"], [first for first, _, _ in ran["figures"] if first])
    later = options.max_tokens - options.chunk_size
    figures.steady.append(round(sum(later / sum(gaps) for _, gaps, _ in ran["figures"] if gaps), 1))
    figures.errors += sum(bool(error) for _, _, error in ran["figures"])


def by_link(run: Run, figures: Figures) -> None:
    """One run without HTTP."""
    _without_http(run.one.link, run, figures)


def by_bare_link(run: Run, figures: Figures) -> None:
    """One run with neither HTTP nor a fleet."""
    _without_http(run.one.bare, run, figures)


def _without_http(engine: EngineProtocol, run: Run, figures: Figures) -> None:
    streams = Streams(run.streams, run.options.max_tokens, run.options.chunk_size)
    ours, process = time.process_time(), time.perf_counter()
    with watched(run, figures):
        ran = run_streams(engine, streams, run.name)
    ours = (time.process_time() - ours) / (time.perf_counter() - process)
    figures.cores = {name: used for name, used in figures.cores.items() if name.startswith("engine")}
    figures.cores["this process"] = [round(ours, 2)]
    figures.add(streams.tokens, ran.seconds, ran.first_s)


@contextlib.contextmanager
def watched(run: Run, figures: Figures) -> Iterator[None]:
    """Notes what each engine and process does meanwhile."""
    one, watch = run.one, StepWatch(run.one.link)
    before, drawn, begun = one.used(), one.engines.metric("rwkv_completion_tokens_total"), time.perf_counter()
    watch.start()
    yield
    figures.cores = cores(before, one.used(), time.perf_counter() - begun)
    figures.engines = watch.stop()
    figures.shares.append(_since(drawn, one))


def _since(drawn: dict[str, float], one: Service) -> list[int]:
    """Tokens that each engine has drawn since then."""
    now = one.engines.metric("rwkv_completion_tokens_total")
    return [int(now[name] - drawn.get(name, 0.0)) for name in sorted(now)]


WAYS: dict[str, tuple[Callable[[Run, Figures], None], int, int]] = {
    "http_1": (by_http, 1, 1), "http_2": (by_http, 2, 2), "total_1": (by_http, 1, 2),
    "link_1": (by_link, 1, 1), "link_2": (by_link, 2, 2), "bare_1": (by_bare_link, 1, 1),
}  # fmt: skip
"""By name, with the service's engines and how many times the streams of one."""
RATIOS = {
    "ratio": ("http_2", "http_1"), "link_ratio": ("link_2", "link_1"), "fleet_ratio": ("link_1", "bare_1"),
    "total_ratio": ("http_2", "total_1"),
}  # fmt: skip


def measure(services: dict[int, Service], options: argparse.Namespace) -> dict[str, Any]:
    """All ways by turns with each number of streams, after one run each that does not count."""
    found = {streams: {name: Figures() for name in options.ways} for streams in options.streams}
    for name in options.ways:
        way, engines, times = WAYS[name]
        short = argparse.Namespace(**{**vars(options), "max_tokens": WARM_TOKENS})
        way(Run(services[engines], times * max(options.streams), short, f"{name}.warm"), Figures())
    for turn in range(options.rounds):
        for streams in options.streams:
            for name in options.ways if turn % 2 else reversed(options.ways):
                way, engines, times = WAYS[name]
                figures = found[streams][name]
                way(Run(services[engines], times * streams, options, f"{name}.{streams}.{turn}"), figures)
                tell(streams, name, figures)
    by_streams = {streams: compared(ways) for streams, ways in found.items()}
    return {"ok": all(one["ok"] for one in by_streams.values()), "by_streams": by_streams}


def tell(streams: int, name: str, figures: Figures) -> None:
    """Print the last run."""
    steady = figures.steady[-1] if figures.steady else None
    print(streams, name, figures.tokens_per_s[-1], f"steady {steady}", figures.shares[-1], json.dumps(figures.cores))
    for engine, seen in figures.engines.items():
        print(f"    {engine}", json.dumps(seen), flush=True)


def compared(ways: dict[str, Figures]) -> dict[str, Any]:
    """The figures with one number of streams, and their ratios."""
    ratios = {}
    for name, (one, other) in RATIOS.items():
        if one not in ways or other not in ways:
            continue
        ratios[name] = round(_ratio(ways[one].tokens_per_s, ways[other].tokens_per_s), 3)
        if ways[one].steady and ways[other].steady:
            ratios[f"steady_{name}"] = round(_ratio(ways[one].steady, ways[other].steady), 3)
    errors = sum(figures.errors for figures in ways.values())
    is_ok = ratios.get("ratio", 0.0) >= LEAST_RATIO and not errors
    return {"ok": is_ok, **ratios, **{name: vars(figures) for name, figures in ways.items()}}


def _ratio(ones: list[float], others: list[float]) -> float:
    """The median of those of the rounds."""
    return float(statistics.median(map(operator.truediv, ones, others)))


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Our flags, and the rest for the services."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[64], help="for each engine")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--chunk-size", type=int, default=4)
    parser.add_argument("--client-processes", type=int, default=2)
    parser.add_argument("--log", type=Path, default=Path("/dev/null"), help="file for the services' logs")
    parser.add_argument("--commit", default="", help="to be written down where git is not at hand")
    return parser.parse_known_args()


def main() -> None:
    """Measure and print."""
    options, flags = parse()
    beside = ["--gpu-memory-utilization", MEMORY_OF_ONE, *flags]
    with running(1, beside, options.log) as single, running(2, flags, options.log) as double:
        figures = measure({1: single, 2: double}, options)
    asked = {name: value for name, value in vars(options).items() if name not in ("log", "commit")}
    sys.stdout.write(json.dumps({"bench": "pair", **asked, "flags": flags, **figures, **origin(options.commit)}) + "\n")


if __name__ == "__main__":
    main()
