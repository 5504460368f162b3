"""Sessions whose database is away, whose engine stands still, that are deleted or asked for twice at once."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sqlite3
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.acceptance.clients import CHAT, STATE, Answer, Clients, at_once, failures, ms, part
from bench.acceptance.engines import running
from bench.acceptance.ledger import IN_DOUBT, Ledger, turn_body
from bench.acceptance.streams import stream_body
from test.postgres import Server

BEFORE_S, DOWN_S, AFTER_S = 10.0, 14.0, 10.0
"""Turns wait ten seconds for the database, and are refused at once from then on."""
STILL_S = 10.0
FEW_CLIENTS = 4


async def database_down(options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """PostgreSQL is killed, and comes back after a while, under turns and requests without a session."""
    server = await asyncio.to_thread(Server)
    whole_s = BEFORE_S + DOWN_S + AFTER_S
    with contextlib.closing(server), running(options.engines, "--state-db", server.database(), *flags) as engines:
        async with Clients(engines.url) as clients:
            ledger = Ledger(clients)
            await ledger.calibrate()
            begun = time.perf_counter()
            names = [f"talk-{number}" for number in range(options.sessions)]
            stateless, *_ = await asyncio.gather(
                at_once(lambda n: clients.post(CHAT, stream_body(n, 16)), FEW_CLIENTS, whole_s),
                _take_down(server),
                *(ledger.chat(name, whole_s) for name in names),
            )
            faults = await ledger.check()
    during = [one for one in stateless if BEFORE_S < one.began - begun < BEFORE_S + DOWN_S]
    before = [one for one in stateless if one.began - begun < BEFORE_S]
    told = [answer for _, answer in ledger.turns if not answer.is_good]
    unclear = [one.error for one in told if not _is_said_well(one)]
    recovered = {name for name, one in ledger.turns if one.is_good and one.began - begun > BEFORE_S + DOWN_S}
    usual, meanwhile = (part([one.first_s for one in some], 0.99) for some in (before, during))
    return {
        "ok": not faults and not failures(stateless) and not unclear and len(recovered) == len(names),
        "faults": faults[:3],
        "stateless": {"before": len(before), "during": len(during), "failed": len(failures(stateless))},
        "stateless_first_ms_p99": {"before": ms(usual), "during": ms(meanwhile)},
        "turns": {"acknowledged": len(ledger.turns) - len(told), "refused": len(told)},
        "refused_as": dict(
            Counter(f"{one.status} {'in doubt' if IN_DOUBT in one.error else 'not kept'}" for one in told)
        ),
        "longest_wait_s": round(max((one.whole_s for _, one in ledger.turns), default=0.0), 2),
        "unclear": unclear[:3],
        "sessions_that_went_on": len(recovered),
    }


def _is_said_well(answer: Answer) -> bool:
    """Whether a refused turn is a 503 with Retry-After, is in doubt and says so, or failed after its answer began."""
    return (
        answer.status == 200 or IN_DOUBT in answer.error or (answer.status == 503 and "Retry-After" in answer.headers)
    )


async def _take_down(server: Server) -> None:
    await asyncio.sleep(BEFORE_S)
    await asyncio.to_thread(server.kill)
    await asyncio.sleep(DOWN_S)
    await asyncio.to_thread(server.start)


async def partition(options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """An engine stands still for ten seconds in the middle of turns, then goes on; `--rounds` times."""
    names = [f"talk-{number}" for number in range(options.sessions)]
    moved, longest = 0, 0.0
    with running(options.engines, *flags) as engines:
        async with Clients(engines.url) as clients:
            ledger = Ledger(clients)
            await ledger.calibrate()
            faults: list[str] = []
            for number in range(options.rounds):
                talks = asyncio.gather(*(ledger.chat(name, STILL_S + 5) for name in names))
                await asyncio.sleep(1)
                victim = f"engine-{number % options.engines}"
                pid = await asyncio.to_thread(engines.send, victim, signal.SIGSTOP)
                stopped = time.perf_counter()
                await asyncio.sleep(STILL_S)
                os.kill(pid, signal.SIGCONT)
                await talks
                meanwhile = [one for _, one in ledger.turns if stopped + 2 < one.ended < stopped + STILL_S]
                moved += sum(one.is_good for one in meanwhile)
                await asyncio.to_thread(engines.wait_ready)
                faults += await ledger.check()
            stale = await asyncio.to_thread(engines.metric, "rwkv_pool_counters_stale_turns")
    told = [answer for _, answer in ledger.turns if not answer.is_good]
    longest = max(answer.whole_s for _, answer in ledger.turns)
    return {
        "ok": not faults and moved > 0,
        "faults": faults[:3],
        "stopped": options.rounds,
        "turns": {"acknowledged": len(ledger.turns) - len(told), "refused": len(told), "while_it_stood_still": moved},
        "refused_as": dict(Counter(one.error[:160] for one in told)),
        "stale_turns": stale,
        "longest_turn_s": round(longest, 2),
    }


async def same_session(options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """Two turns of each session at once, over connections of their own, so over two HTTP workers every other time."""
    faults: list[str] = []
    statuses: Counter[int] = Counter()
    with running(options.engines, "--http-workers", "2", *flags) as engines:
        async with Clients(engines.url) as clients:
            ledger = Ledger(clients)
            await ledger.calibrate()
            names = [f"talk-{number}" for number in range(options.sessions)]
            for _ in range(options.rounds):
                both = [name for name in names for _ in range(2)]
                answers = await asyncio.gather(*(ledger.turn(name) for name in both))
                faults += [f"{name}: {one.error}" for name, one in zip(both, answers, strict=True) if not one.is_good]
            held = Counter((name, ledger.held(one)) for name, one in ledger.turns if one.is_good)
            faults += [
                f"{name}: {count} turns began from {at} turns" for (name, at), count in held.items() if count > 1
            ]
            for _ in range(options.rounds):
                both = [name for name in names for _ in range(2)]
                answers = await asyncio.gather(*(ledger.turn(name, wait=False) for name in both))
                statuses.update(one.status for one in answers)
                if not any(one.is_good for one in answers):
                    faults.append("without waiting none of two turns was taken")
            faults += await ledger.check()
    return {
        "ok": not faults and set(statuses) <= {200, 409},
        "faults": faults[:3],
        "turns": len(ledger.turns),
        "without_waiting": dict(statuses),
    }


async def deleted(options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """Sessions on every tier, and with a turn that runs, are deleted through whatever engine is asked."""
    faults: list[str] = []
    with tempfile.TemporaryDirectory(prefix="rwkv-bench-") as folder:
        file = Path(folder) / "sessions.db"
        small = ("--state-db", str(file), "--l1-sessions", "4", "--l2-sessions", "4", "--checkpoint-tokens", "16")
        with running(options.engines, *small, *flags) as engines:
            async with Clients(engines.url) as clients:
                ledger = Ledger(clients)
                await ledger.calibrate()
                names = [f"talk-{number}" for number in range(options.sessions)]
                for _ in range(3):
                    await asyncio.gather(*(ledger.turn(name) for name in names))
                tiers = await clients.post("/state/status", {"limit": 1000})
                running_turns = [
                    asyncio.ensure_future(clients.post(STATE, turn_body(name, 2000, stream=True)))
                    for name in names[::2]
                ]
                await asyncio.sleep(1.5)
                gone = await asyncio.gather(*(clients.post("/state/delete", {"session_id": name}) for name in names))
                faults += [f"delete: {one.status} {one.error}" for one in gone if one.status != 200]
                ended = await asyncio.gather(*running_turns)
                faults += ["a turn of a deleted session was acknowledged" for one in ended if one.is_good]
                listed = await clients.post("/state/status", {"limit": 1000})
                left = {one["session_id"] for one in listed.body["sessions"]} & set(names)
                faults += [f"{name} is listed" for name in left]
                await asyncio.sleep(2)  # pieces of states are removed a few at a time
                faults += _left_in(file, names)
                for _ in range(options.engines * 2):  # with luck on every engine
                    again = await asyncio.gather(*(clients.post(STATE, turn_body(name)) for name in names))
                    faults += [f"a later turn: {one.error}" for one in again if not one.is_good]
                    faults += [
                        f"a later turn finds {ledger.held(one)} turns"
                        for one in again
                        if one.is_good and ledger.held(one)
                    ]
                    await asyncio.gather(*(clients.post("/state/delete", {"session_id": name}) for name in names))
    levels = Counter(one["cache_level"] for one in tiers.body["sessions"])
    return {
        "ok": not faults,
        "faults": faults[:3],
        "sessions": len(names),
        "tiers_of_the_engine_asked": dict(levels),
        "deleted_while_a_turn_ran": len(running_turns),
        "first_was_told": ended[0].error,
    }


def _left_in(file: Path, names: list[str]) -> list[str]:
    """Rows of these sessions that the database still has."""
    with contextlib.closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as database:
        rows = database.execute("SELECT session_id FROM sessions").fetchall()
    return [f"the database has a row of {name}" for (name,) in rows if name in names]
