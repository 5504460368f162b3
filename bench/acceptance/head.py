"""A Ray cluster whose head dies and comes back, under streams."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.acceptance.clients import Answer, Clients, ms, part
from bench.acceptance.engines import Engines, running
from bench.acceptance.streams import PAUSE_S, all_streams
from bench.tools.cpu_time import cpu_s
from bench.tools.service import ROOT
from demo.ray_nodes import RayNodes, descendants, free_port

NOTICED_S = 4.0
BUSIEST, NAMED = 5, 120
"""Processes that are told of, and how much of their command lines."""
BACK_S = 120.0
"""The head has so long to carry out what was asked of it while it was away."""


@contextlib.contextmanager
def cluster(count: int) -> Iterator[tuple[RayNodes, str, str]]:
    """A head without engines whose memory outlives it, and so many nodes with room for one: addresses of both kinds."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        redis = subprocess.Popen([sys.executable, "-m", "bench.acceptance.memory_redis", str(port)])
        nodes = RayNodes(Path(folder), redis=f"127.0.0.1:{port}")
        try:
            head = nodes.start(cpus=0)
            others = [nodes.start(cpus=1) for _ in range(count)]
            yield nodes, head, others[0]
        finally:
            nodes.close()
            redis.kill()
            redis.wait()


async def head_away(options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """Streams and new requests while there is no head; an engine that is removed meanwhile leaves when it is back."""
    with contextlib.ExitStack() as stack:
        nodes, head, node = stack.enter_context(cluster(options.engines))
        os.environ.update(nodes.environment)
        log = nodes.folder / "service.log"
        place = (
            "--cluster",
            nodes.address,
            "--cluster-node",
            node,
            "--state-db",
            "",
            "--max-streams-per-client",
            "480",
        )
        engines = stack.enter_context(running(options.engines, *place, *flags, log=log))
        async with Clients(engines.url) as clients:
            undisturbed = await _round("there", clients, options)
            died, found, outlived, away_s, removed = await _disturbed(nodes, head, engines, clients, options)
        text = await asyncio.to_thread(log.read_text)
    has_ended = "process cluster ended" in text
    expected = [one.text for one in undisturbed.answers]
    pairs = [pair for one in found for pair in zip(one.answers, expected, strict=True)]
    wrong = [one.error or "another text" for one, text in pairs if one.error or one.text != text]
    pauses = [one.pause_s for one, _ in pairs]
    return {
        "ok": not wrong and outlived > 0 and part(pauses, 0.99) < PAUSE_S and removed and not has_ended,
        "streams": len(pairs),
        "streams_that_outlived_it": outlived,
        "engines": options.engines,
        "head_away_s": round(away_s, 1),
        "wrong": len(wrong),
        "first_wrong": wrong[:3],
        "pause_ms_p99": ms(part(pauses, 0.99)),
        "rounds": [one.told(died) for one in (undisturbed, *found)],
        "times_an_engine_was_lost": text.count(" is lost"),
        "removed_when_it_was_back": removed,
        "process_that_follows_the_cluster_ended": has_ended,
    }


@dataclass
class Round:
    """Streams that began together."""

    head: str
    """whether it was there then"""
    answers: list[Answer]
    cpu_s: dict[str, float]
    """of the processes that take part, Ray's too: a round that takes long and uses no more waited for other programs"""

    def told(self, died: float) -> dict[str, Any]:
        """Its longest pause, and when that ended, in seconds since the head died."""
        worst = max(self.answers, key=lambda one: one.pause_s)
        return {
            "head": self.head,
            "begun_s": round(min(one.began for one in self.answers) - died, 1),
            "ended_s": round(max(one.ended for one in self.answers) - died, 1),
            "cpu_s": round(sum(self.cpu_s.values()), 2),
            "busiest_s": dict(sorted(self.cpu_s.items(), key=lambda one: -one[1])[:BUSIEST]),
            "pause_ms_p50": ms(part([one.pause_s for one in self.answers], 0.5)),
            "pause_ms_max": ms(worst.pause_s),
            "at_s": round(worst.paused_at - died, 1),
            "first_ms_max": ms(max(one.first_s for one in self.answers)),
        }


async def _round(head: str, clients: Clients, options: argparse.Namespace) -> Round:
    before = await asyncio.to_thread(_cpu_s)
    answers = await all_streams(clients, options)
    after = await asyncio.to_thread(_cpu_s)
    used: dict[str, float] = defaultdict(float)
    for pid, (name, seconds) in after.items():
        used[name] += seconds - before.get(pid, ("", 0.0))[1]
    return Round(head, answers, {name: round(seconds, 2) for name, seconds in used.items()})


def _cpu_s() -> dict[int, tuple[str, float]]:
    """Of this process and all below it, with what it is called now."""
    found = {}
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):  # one that has just ended
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            name = " ".join(words).replace(f"{ROOT}/", "")
            found[pid] = (name[:NAMED].strip(), cpu_s(pid))
    return found


async def _disturbed(
    nodes: RayNodes, head: str, engines: Engines, clients: Clients, options: argparse.Namespace
) -> tuple[float, list[Round], int, float, bool]:
    """While the head is away and comes back: when it died, answers, how many had begun before, how long it was away,
    and whether the engine left that was to."""
    running_streams = asyncio.ensure_future(_round("dies", clients, options))
    await asyncio.sleep(0.3)
    await asyncio.to_thread(nodes.kill, head)
    begun = time.perf_counter()
    found = [await running_streams]
    await asyncio.sleep(NOTICED_S)
    last = f"engine-{options.engines - 1}"
    asked = await clients.post("/v1/engines/remove", {"engine": last})
    while len(found) < 2 or time.perf_counter() - begun < options.seconds:
        found.append(await _round("away", clients, options))
    outlived = sum(one.ended > begun for one in found[0].answers)
    stays = last in await asyncio.to_thread(engines.listed)
    await asyncio.to_thread(nodes.start_again, head)
    away_s, has_left = time.perf_counter() - begun, False
    while not has_left and time.perf_counter() - begun < away_s + BACK_S:
        found.append(await _round("back", clients, options))
        has_left = last not in await asyncio.to_thread(engines.listed)
    return begun, found, outlived, away_s, asked.status == 200 and stays and has_left
