"""Engines under more or less load than they carry: restarts, a client that asks for too much, a slow engine."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.acceptance.clients import CHAT, Answer, Clients, at_once, at_rate, failures, ms, part
from bench.acceptance.engines import Engines, resident_mb, running, supervisor_of
from bench.acceptance.streams import stream_body

ANSWER_TOKENS = 16
STEADY_S = 5.0
BUSY, HALF = 0.8, 0.5
SLOW_TURN_S, SLOW_SHARE = 1.0, 0.2
"""A slow engine gets this part of every second: many steps, since what pads a step passes while it stands still."""
GOODPUT, MOST_GROWTH_MB = 0.95, 256.0
TENANTS = 5


def paced(options: argparse.Namespace, *flags: str) -> contextlib.AbstractContextManager[Engines]:
    """Engines whose capacity is `--rows` tokens a step, and a step takes `--step-ms`."""
    os.environ["RWKV_BENCH_STEP_MS"] = str(options.step_ms)
    limits = ("--state-db", "", "--max-running", str(options.rows), "--max-streams-per-client", "480")
    return running(options.engines, *limits, *flags, is_padded=True)


async def short(clients: Clients, number: int, key: str = "") -> Answer:
    """A request of the load."""
    return await clients.post(CHAT, stream_body(number, ANSWER_TOKENS), key)


async def capacity(clients: Clients, options: argparse.Namespace) -> float:
    """Requests a second that are answered when there are always some that wait."""
    crowd = options.engines * options.rows * 3 // 2
    begun = time.perf_counter()
    answers = await at_once(lambda n: short(clients, n), crowd, STEADY_S + options.seconds)
    ended = [one.ended - begun for one in answers if one.is_good]
    return sum(STEADY_S < at < STEADY_S + options.seconds for at in ended) / options.seconds


def first_p99(answers: list[Answer]) -> float:
    """Seconds to the first token."""
    return part([one.first_s for one in answers if one.is_good], 0.99)


async def rolling(options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """All engines are started anew, one after the other, under four fifths of the load that they carry together."""
    rng = random.Random(options.seed)
    with paced(options, *flags) as engines:
        async with Clients(engines.url) as clients:
            most = await capacity(clients, options)
            usual = await at_rate(lambda n: short(clients, n), BUSY * most, options.seconds, rng)
            pids = {one["pid"] for one in (await asyncio.to_thread(engines.listed)).values()}
            restart = asyncio.ensure_future(clients.post("/v1/engines/restart", {"engine": "all", "wait_s": 600}))
            meanwhile: list[Answer] = []
            begun = time.perf_counter()
            while not restart.done():
                meanwhile += await at_rate(lambda n: short(clients, n), BUSY * most, STEADY_S, rng)
            took = time.perf_counter() - begun
            left = pids & {one["pid"] for one in (await asyncio.to_thread(engines.listed)).values()}
    failed = failures(usual) + failures(meanwhile) + failures([restart.result()])
    before, after = first_p99(usual), first_p99(meanwhile)
    return {
        "ok": not failed and not left and after < 3 * before,
        "capacity_requests_per_s": round(most, 1),
        "requests": len(usual) + len(meanwhile),
        "failed": len(failed),
        "first_failed": failed[:3],
        "not_restarted": len(left),
        "restarts_took_s": round(took, 1),
        "first_ms_p99": {"before": ms(before), "while_restarted": ms(after)},
        "ratio": round(after / before, 2),
    }


@contextlib.contextmanager
def tenants_file() -> Iterator[tuple[str, list[str]]]:
    """A file of API keys without limits, and the keys."""
    keys = [f"secret-{number}" for number in range(TENANTS)]
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.writelines(f'[[key]]\nname = "tenant-{n}"\nkey = "{key}"\n' for n, key in enumerate(keys))
        file.flush()
        Path(file.name).chmod(0o600)
        yield file.name, keys


async def hot_tenant(options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """Five clients at half of what the engines carry; then one of them sends ten times as much."""
    rng = random.Random(options.seed)
    with tenants_file() as (file, keys), paced(options, "--keys-file", file, *flags) as engines:
        async with Clients(engines.url, keys[0]) as clients:
            most = await capacity(clients, options)
            each = HALF * most / TENANTS

            async def of(key: str, rate: float) -> list[Answer]:
                return await at_rate(
                    lambda n: short(clients, n, key), rate, options.seconds, random.Random(rng.random())
                )

            usual = await asyncio.gather(*(of(key, each) for key in keys))
            hot, *others = await asyncio.gather(of(keys[0], 10 * each), *(of(key, each) for key in keys[1:]))
    calm, beside = ([one for some in runs for one in some] for runs in (usual[1:], others))
    failed = failures(calm) + failures(beside)
    before, after = first_p99(calm), first_p99(beside)
    return {
        "ok": not failed and after < 2 * before,
        "capacity_requests_per_s": round(most, 1),
        "others_requests": {"before": len(calm), "beside_the_hot_one": len(beside)},
        "others_failed": len(failed),
        "others_first_ms_p99": {"before": ms(before), "beside_the_hot_one": ms(after)},
        "ratio": round(after / before, 2),
        "hot": {"requests": len(hot), "refused": len(failures(hot)), "first_ms_p99": ms(first_p99(hot))},
    }


async def overload(options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """Three times as much as the engines carry: some are refused, as many are answered as ever."""
    rng = random.Random(options.seed)
    queue = str(options.rows * 4)
    with paced(options, "--max-waiting-rows", queue, "--max-waiting-rows-per-client", queue, *flags) as engines:
        async with Clients(engines.url) as clients:
            supervisor = await asyncio.to_thread(supervisor_of, engines)
            most = await capacity(clients, options)
            memory = [resident_mb(supervisor)]
            begun = time.perf_counter()
            watch = asyncio.ensure_future(_watch(memory, supervisor))
            answers = await at_rate(lambda n: short(clients, n), 3 * most, STEADY_S + options.seconds, rng)
            watch.cancel()
    good = [one.ended - begun for one in answers if one.is_good]
    goodput = sum(STEADY_S < at < STEADY_S + options.seconds for at in good) / options.seconds
    refused = [one for one in answers if one.status == 429]
    wrong = [one.error for one in answers if not one.is_good and one.status != 429]
    bare = sum("Retry-After" not in one.headers for one in refused)
    growth = max(memory) - memory[0]
    return {
        "ok": not wrong and bool(refused) and not bare and goodput >= GOODPUT * most and growth < MOST_GROWTH_MB,
        "capacity_requests_per_s": round(most, 1),
        "goodput_requests_per_s": round(goodput, 1),
        "share": round(goodput / most, 3),
        "answered": len(good),
        "refused": len(refused),
        "refused_without_retry_after": bare,
        "other_failures": len(wrong),
        "first_wrong": wrong[:3],
        "memory_mb": {"before": round(memory[0]), "most": round(max(memory))},
        "first_ms_p99": ms(first_p99(answers)),
    }


async def _watch(memory: list[float], pid: int) -> None:
    while True:
        await asyncio.sleep(0.5)
        memory.append(await asyncio.to_thread(resident_mb, pid))


class Slowed(threading.Thread):
    """Lets a process run for a part of the time only, until it is told to end."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid, self._over = pid, threading.Event()

    def run(self) -> None:
        """Stop and go on by turns."""
        while not self._over.is_set():
            os.kill(self._pid, signal.SIGSTOP)
            time.sleep(SLOW_TURN_S * (1 - SLOW_SHARE))
            os.kill(self._pid, signal.SIGCONT)
            time.sleep(SLOW_TURN_S * SLOW_SHARE)

    def end(self) -> None:
        """Let it run."""
        self._over.set()
        self.join()


async def slow_engine(options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """One of two engines gets a fifth of the time: what is it given of the requests from two seconds on?"""
    rng = random.Random(options.seed)
    options.engines = 2
    with paced(options, *flags) as engines:
        async with Clients(engines.url) as clients:
            most = await capacity(clients, options)
            load = asyncio.ensure_future(
                at_rate(lambda n: short(clients, n), 0.6 * most, STEADY_S + 2 + options.seconds, rng)
            )
            start = await _given(engines)
            await asyncio.sleep(STEADY_S)
            slowed = Slowed(await asyncio.to_thread(engines.pid, "engine-0"))
            usual = await _given(engines)
            slowed.start()
            await asyncio.sleep(2)
            begun = await _given(engines)
            await asyncio.sleep(options.seconds - 1)
            ended = await _given(engines)
            slowed.end()
            answers = await load
    before, after = _share(start, usual), _share(begun, ended)
    failed = failures(answers)
    return {
        "ok": not failed and after < 1 / 3,
        "share_before": round(before, 3),
        "share_from_2_s_on": round(after, 3),
        "requests": len(answers),
        "failed": len(failed),
        "first_failed": failed[:3],
        "first_ms_p99": ms(first_p99(answers)),
    }


async def _given(engines: Engines) -> dict[str, float]:
    """Requests that each engine has been given so far: those that it has ended, and those that it has."""
    ended = await asyncio.to_thread(engines.metric, "rwkv_rows_finished_total")
    return {name: ended.get(name, 0.0) + one["rows"] for name, one in (await asyncio.to_thread(engines.listed)).items()}


def _share(before: dict[str, float], after: dict[str, float]) -> float:
    """Of the first engine, of what came between."""
    given = {name: after[name] - before[name] for name in after}
    return given["engine-0"] / max(1.0, sum(given.values()))
