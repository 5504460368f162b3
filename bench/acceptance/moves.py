"""Sessions that go on with other engines: from a checkpoint with the same bits, by replay with the same text."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sqlite3
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from bench.acceptance.clients import STATE, Answer, Clients, failures
from bench.acceptance.engines import Engines, running
from state_pool.session_file import SessionFile, decode

AT_ONCE = 64
TURNS = 3
RESTED_S = 4.0
COMPARED = 50
"""Sessions that rest while their engine leaves, and are carried away before and after."""


def _body(session: str, number: int, turn: int, max_tokens: int) -> dict[str, Any]:
    return {
        "contents": [f"User: {number}, tell me more of {turn}.\n\nAssistant:"],
        "session_id": session,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stop_tokens": [],
        "ignore_eos": True,
    }


class Talks:
    """So many sessions, each with the same turns as one that is left in peace."""

    def __init__(self, clients: Clients, count: int, max_tokens: int) -> None:
        self._clients, self._max_tokens = clients, max_tokens
        self._places = asyncio.Semaphore(AT_ONCE)
        self.numbers = range(count)

    async def turn(self, kind: str, turn: int, numbers: range | None = None) -> list[Answer]:
        """One turn of each."""
        return list(await asyncio.gather(*(self._one(kind, turn, number) for number in numbers or self.numbers)))

    async def _one(self, kind: str, turn: int, number: int) -> Answer:
        async with self._places:
            return await self._clients.post(STATE, _body(f"{kind}-{number}", number, turn, self._max_tokens))


def _holders(file: Path) -> dict[str, int]:
    """The number of the engine that has each session; one that is started anew has another."""
    with contextlib.closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as database:
        return dict(database.execute("SELECT session_id, holder FROM directory"))


def _exported(engines: Engines, numbers: range) -> list[SessionFile]:
    """The sessions as files, once their states are written: whichever engine is asked, it has no more than that."""
    time.sleep(RESTED_S)
    files = []
    for number in numbers:
        with urllib.request.urlopen(f"{engines.url}/state/export?session_id=talk-{number}", timeout=60) as answer:
            files.append(decode(answer.read()))
    return files


async def moved(options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """Two engines: one leaves and another comes while sessions chat, then one is killed."""
    with tempfile.TemporaryDirectory(prefix="rwkv-bench-") as folder:
        file = Path(folder) / "sessions.db"
        limits = ("--state-db", str(file), "--engine-wait-s", "120", "--checkpoint-idle-s", "1")
        with running(2, *limits, *flags) as engines:
            async with Clients(engines.url) as clients:
                return await _move(engines, Talks(clients, options.sessions, options.max_tokens), clients, file)


async def _move(engines: Engines, talks: Talks, clients: Clients, file: Path) -> dict[str, Any]:
    expected = [await talks.turn("alone", turn) for turn in range(TURNS)]
    found = [await talks.turn("talk", 0)]
    resting = range(min(COMPARED, len(talks.numbers) // 2))
    chatting = range(len(resting), len(talks.numbers))
    at_first = await asyncio.to_thread(_holders, file)
    before = await asyncio.to_thread(_exported, engines, resting)
    added = await clients.post("/v1/engines/add", {"wait_s": 300})
    removal = asyncio.ensure_future(clients.post("/v1/engines/remove", {"engine": "engine-0", "wait_s": 300}))
    second = await talks.turn("talk", 1, chatting)
    refused = failures([added, await removal])
    after = await asyncio.to_thread(_exported, engines, resting)
    found.append([*await talks.turn("talk", 1, resting), *second])
    at_second = await asyncio.to_thread(_holders, file)
    last = asyncio.ensure_future(talks.turn("talk", 2))
    await asyncio.sleep(0.5)
    await asyncio.to_thread(engines.send, "engine-1", signal.SIGKILL)
    found.append(await last)
    at_last = await asyncio.to_thread(_holders, file)
    others = [fault for some, right in zip(found, expected, strict=True) for fault in _faults(some, right)]
    pairs = [(one, other) for one, other in zip(before, after, strict=True) if one.parts and one.replay == other.replay]
    unequal = sum(one.parts != other.parts for one, other in pairs)
    counts = [_num_moved(at_first, at_second), _num_moved(at_second, at_last)]
    return {
        "ok": not others and not unequal and not refused and all(counts) and bool(pairs),
        "sessions": len(talks.numbers),
        "moved_when_an_engine_left": counts[0],
        "moved_when_one_was_killed": counts[1],
        "states_compared": len(pairs),
        "states_of_other_bits": unequal,
        "turns_with_another_text": len(others),
        "first_wrong": [*refused, *others][:3],
    }


def _faults(found: list[Answer], expected: list[Answer]) -> list[str]:
    """Of one turn of all sessions, in order."""
    pairs = zip(found, expected, strict=True)
    return [one.error or "another text" for one, right in pairs if not one.is_good or one.text != right.text]


def _num_moved(before: dict[str, int], after: dict[str, int]) -> int:
    return sum(holder != after.get(name) for name, holder in before.items() if name.startswith("talk-"))
