"""What it costs to stand before several engines. What a second one is worth: bench.pair.

`cost`: tokens a second of one engine process through `cluster.fleet`, which follows every job so that another engine
could go on, against the bare `EngineClient`, in turns on one machine; `--streams` jobs of one row. Bounded by the
engine: on a CPU the client shares its cores, so the ratio holds what following costs in CPU time. `ratio` is the median
of those of the pairs; `cpu_ratio` compares the CPU seconds of engine and client together, and holds on a machine that
others use at the same time, where wall time does not. `ok`: it is 0.98 at least, by either.
`ray`: tokens a second of an engine that is a Ray actor against one behind a socket, in turns on one machine, from the
same process; `--streams` jobs of one row. Both hold their memory at once, on a GPU the first one half. `ok`: 0.95,
likewise. Needs requirements-cluster.txt.

    python -m bench.fleet.replicas cost --streams 64
    python -m bench.fleet.replicas ray --streams 64

Further flags are the service's. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import operator
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.tools.cpu_time import cpu_s
from bench.tools.engine_load import Streams, run_streams
from bench.tools.service import machine
from cluster.actors.address import ClusterAddress, EngineAddress
from cluster.actors.plan import ClusterPlan
from cluster.fleet import Fleet, FleetLimits
from demo.ray_nodes import RayNodes
from rwkv_batch.ipc.client import EngineClient, at_socket
from rwkv_batch.ipc.engine_main import engine_process
from rwkv_batch.ipc.process import LogStyle
from rwkv_batch.ipc.served_model import ModelStatus, ModelWish, ServedModel
from rwkv_batch.protocol import EngineProtocol
from settings import parse_settings
from settings.model_file import with_model
from supervisor.service import ENGINE_FACTORY

LEAST_RATIO, LEAST_RATIO_OVER_RAY = 0.98, 0.95


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Our flags, and the rest for the service."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "ray"))
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--chunk-size", type=int, default=4)
    return parser.parse_known_args()


# What it costs ------------------------------------------------------------------------------------------------


@contextmanager
def one_engine(flags: list[str]) -> Iterator[tuple[str, int]]:
    """An engine process of its own; gives its socket's address and its process id when it is ready."""
    config = with_model(parse_settings(["--state-db", "", *flags], os.environ)).engine
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    with tempfile.TemporaryDirectory(prefix="rwkv-bench-") as folder:
        address = str(Path(folder) / "engine")
        arguments = (config, address, ENGINE_FACTORY, LogStyle(level="warning"), "engine", theirs)
        process = spawn.Process(target=engine_process, args=arguments)
        process.start()
        subject, reason = ours.recv()
        if subject != "ready":
            raise SystemExit(reason)
        try:
            yield address, process.pid or 0
        finally:
            process.kill()
            process.join()


def tokens_per_s(engine: EngineProtocol, options: argparse.Namespace, turn: int) -> float:
    """Of one run of the streams."""
    streams = Streams(options.streams, options.max_tokens, options.chunk_size)
    return streams.tokens / run_streams(engine, streams, str(turn)).seconds


def cost(options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """The two ways to one engine, in turns."""
    with one_engine(flags) as (address, pid):
        told = ServedModel(
            wish=ModelWish(name="bench", file=""), status=ModelStatus.READY, address=address, since=0, engine="engine-0"
        )
        client, fleet = EngineClient(at_socket(address)), Fleet(FleetLimits())
        fleet.update([told])
        for link in (client, fleet):
            link.start("bench")
        while not (client.is_connected and fleet.is_connected):
            time.sleep(0.05)
        return in_turns({"direct": (client, pid), "fleet": (fleet, pid)}, options, LEAST_RATIO)


def in_turns(ways: dict[str, tuple[EngineProtocol, int]], options: argparse.Namespace, least: float) -> dict[str, Any]:
    """Each way to an engine of that process by turns; the ratios are the second one's to the first one's."""
    for number, (engine, _) in enumerate(ways.values()):
        tokens_per_s(engine, options, -1 - number)
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    used: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(options.rounds):
        order = list(ways.items())
        for place, (name, (engine, pid)) in enumerate(order if turn % 2 else reversed(order)):
            before = time.process_time() + cpu_s(pid)
            speeds[name].append(round(tokens_per_s(engine, options, 2 * turn + place), 1))
            used[name].append(round(time.process_time() + cpu_s(pid) - before, 3))
    first, second = ways
    ratio = statistics.median(map(operator.truediv, speeds[second], speeds[first]))
    cpu_ratio = statistics.median(map(operator.truediv, used[first], used[second]))
    is_ok = max(ratio, cpu_ratio) >= least
    return {
        "ok": is_ok, "ratio": round(ratio, 4), "cpu_ratio": round(cpu_ratio, 4), "tokens_per_s": speeds, "cpu_s": used,
    }  # fmt: skip


@contextmanager
def one_actor(flags: list[str]) -> Iterator[tuple[EngineClient, int]]:
    """An engine in a Ray cluster of one node, which is started for it; gives a client and the engine's process id."""
    from cluster.actors.link import to_actor
    from cluster.actors.roster import Roster

    config = with_model(parse_settings(["--state-db", "", *flags], os.environ)).engine
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        nodes = RayNodes(Path(folder))
        os.environ.update(nodes.environment)
        try:
            node = nodes.start(max(1, config.threads), torch.cuda.device_count())  # Ray starts a process for each CPU
            place = ClusterAddress(nodes.address, node, "bench")
            roster = Roster(ClusterPlan(cluster=place, replicas=1, config=config, factory=ENGINE_FACTORY), LogStyle())
            roster.begin(is_up=False)
            while [one.status for one in roster.look()] != [ModelStatus.READY]:
                time.sleep(0.2)
            client = EngineClient(to_actor(EngineAddress(place, "engine-0")))
            client.start("bench")
            yield client, roster.look()[0].pid
            client.stop()
            roster.leave()
        finally:
            nodes.close()


def over_ray(options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """The two links to engines of one machine, in turns."""
    beside = ["--gpu-memory-utilization", "0.45", *flags]
    with one_engine(beside) as (address, pid), one_actor(flags) as (actor, actor_pid):
        local = EngineClient(at_socket(address))
        local.start("bench")
        while not (local.is_connected and actor.is_connected):
            time.sleep(0.05)
        return in_turns({"socket": (local, pid), "ray": (actor, actor_pid)}, options, LEAST_RATIO_OVER_RAY)


def main() -> None:
    """Run what is asked for and print it."""
    options, flags = parse()
    figures = {"cost": cost, "ray": over_ray}[options.what](options, flags)
    sys.stdout.write(json.dumps({"what": options.what, **figures, "machine": machine()}) + "\n")


if __name__ == "__main__":
    main()
