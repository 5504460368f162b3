"""What a second engine is worth: tokens/s of two engines against one, over HTTP and without it, by turns.

Two services run at the same time, one with one engine and one with two; each engine of a service has a GPU of its own,
and those of both services share them: half of the memory of the first is the single engine's.
`--streams` streams for each engine come at once. Five ways take turns: `http_1` and `http_2` from client processes,
`link_1` and `link_2` from this process through `cluster.fleet` on the engines' own sockets, `bare_1` likewise without a
fleet. `ratio` is the median over the rounds of two against one by HTTP, `link_ratio` without it: what both have in
common is the engines' and not that of HTTP. `fleet_ratio`: of one engine behind a fleet against its bare link. `ok`:
1.9 at least by HTTP.

What binds is told by `cores`: of each process the cores that it used in the way's last run, and its busiest thread,
where 1.0 is a thread that never waited (client processes: the busiest alone); and by `shares`: what each of two engines
drew, since the one with more ends later. On a CPU both services' engines share the cores, and the ratio says nothing.

    python -m bench.pair --streams 320 --model-path /dev/shm/random.safetensors

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
from typing import Any

from bench.acceptance.engines import Engines
from bench.cpu_time import Used, cores, used
from bench.engine_load import Streams, run_streams
from bench.http_load import Load, fetch, over_http
from bench.origin import origin
from bench.serve import percentile, service
from cluster.fleet import Fleet, FleetLimits
from rwkv_batch.ipc.client import EngineClient, at_socket
from rwkv_batch.ipc.served_model import ModelStatus, ModelWish, ServedModel
from rwkv_batch.protocol import EngineProtocol

ROUTE = "/v1/chat/completions"
LEAST_RATIO = 1.9
PROMPT_WORDS = 16
MEMORY_OF_ONE = "0.45"


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
    ttft_ms_p50: list[float | None] = field(default_factory=list)
    ttft_ms_p99: list[float | None] = field(default_factory=list)
    shares: list[list[int]] = field(default_factory=list)
    errors: int = 0
    cores: dict[str, list[float]] = field(default_factory=dict)

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


def by_http(one: Service, options: argparse.Namespace, name: str, figures: Figures) -> None:
    """One run over HTTP."""
    streams = options.streams * one.count
    load = Load(ROUTE, streams, 1, 1, options.max_tokens, PROMPT_WORDS, options.chunk_size, True, "")
    before, drawn, begun = one.used(), one.engines.metric("rwkv_completion_tokens_total"), time.perf_counter()
    run = over_http(load, one.url, options.client_processes)
    figures.cores = cores(before, one.used(), time.perf_counter() - begun)
    busiest = round(max(run["clients_cpu_s"]) / run["seconds"], 2)
    figures.cores["clients"] = [round(sum(run["clients_cpu_s"]) / run["seconds"], 2), busiest]
    figures.add(run["tokens"], run["seconds"], [first for first, _, _ in run["figures"] if first])
    figures.errors += sum(bool(error) for _, _, error in run["figures"])
    figures.shares.append(_since(drawn, one))


def by_link(one: Service, options: argparse.Namespace, name: str, figures: Figures) -> None:
    """One run without HTTP."""
    _without_http(one.link, one, options, name, figures)


def by_bare_link(one: Service, options: argparse.Namespace, name: str, figures: Figures) -> None:
    """One run with neither HTTP nor a fleet."""
    _without_http(one.bare, one, options, name, figures)


def _without_http(
    engine: EngineProtocol, one: Service, options: argparse.Namespace, name: str, figures: Figures
) -> None:
    streams = Streams(options.streams * one.count, options.max_tokens, options.chunk_size)
    before, drawn, begun = one.used(), one.engines.metric("rwkv_completion_tokens_total"), time.perf_counter()
    ours, process = time.process_time(), time.perf_counter()
    run = run_streams(engine, streams, name)
    ours = (time.process_time() - ours) / (time.perf_counter() - process)
    figures.cores = cores(before, one.used(), time.perf_counter() - begun)
    figures.cores = {name: used for name, used in figures.cores.items() if name.startswith("engine")}
    figures.cores["this process"] = [round(ours, 2)]
    figures.add(streams.tokens, run.seconds, run.first_s)
    figures.shares.append(_since(drawn, one))


def _since(drawn: dict[str, float], one: Service) -> list[int]:
    """Tokens that each engine has drawn since then."""
    now = one.engines.metric("rwkv_completion_tokens_total")
    return [int(now[name] - drawn.get(name, 0.0)) for name in sorted(now)]


def measure(single: Service, double: Service, options: argparse.Namespace) -> dict[str, Any]:
    """All ways by turns, after one run each that does not count."""
    Way = Callable[[Service, argparse.Namespace, str, Figures], None]
    ways: dict[str, tuple[Way, Service]] = {
        "http_1": (by_http, single), "http_2": (by_http, double),
        "link_1": (by_link, single), "link_2": (by_link, double), "bare_1": (by_bare_link, single),
    }  # fmt: skip
    for name, (way, one) in ways.items():
        way(one, options, f"{name}.warm", Figures())
    found = {name: Figures() for name in ways}
    for turn in range(options.rounds):
        order = list(ways.items())
        for name, (way, one) in order if turn % 2 else reversed(order):
            way(one, options, f"{name}.{turn}", found[name])
            print(name, found[name].tokens_per_s[-1], found[name].shares[-1], json.dumps(found[name].cores), flush=True)
    pairs = (("http_2", "http_1"), ("link_2", "link_1"), ("link_1", "bare_1"))
    http, link, fleet = (
        statistics.median(map(operator.truediv, found[one].tokens_per_s, found[other].tokens_per_s))
        for one, other in pairs
    )
    errors = sum(figures.errors for figures in found.values())
    return {
        "ok": http >= LEAST_RATIO and not errors,
        "ratio": round(http, 3),
        "link_ratio": round(link, 3),
        "fleet_ratio": round(fleet, 3),
        **{name: vars(figures) for name, figures in found.items()},
    }


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Our flags, and the rest for the services."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64, help="for each engine")
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
        figures = measure(single, double, options)
    asked = {name: value for name, value in vars(options).items() if name not in ("log", "commit")}
    sys.stdout.write(json.dumps({"bench": "pair", **asked, "flags": flags, **figures, **origin(options.commit)}) + "\n")


if __name__ == "__main__":
    main()
