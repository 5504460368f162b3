"""Streams whose engines are killed, leave, or are slow."""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import time
from typing import Any

from bench.acceptance.clients import CHAT, Answer, Clients, ms, part
from bench.acceptance.engines import Engines, running

PAUSE_S = 5.0


def stream_body(number: int, max_tokens: int, **fields: Any) -> dict[str, Any]:
    """A greedy stream of so many tokens."""
    return {
        "contents": [f"User: {number}, tell me a story.\n\nAssistant:"],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stop_tokens": [],
        "ignore_eos": True,
        "stream": True,
        "chunk_size": 4,
        **fields,
    }


async def kills(options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """`--streams` streams, an engine killed at a random moment, `--rounds` times: the texts stay what they were."""
    rng = random.Random(options.seed)
    places = str(options.streams)  # of two engines for the streams of three
    limits = (
        "--http-workers",
        "2",
        "--max-streams-per-client",
        "480",
        "--engine-wait-s",
        "60",
        "--max-running",
        places,
    )
    with running(options.engines, *limits, *flags) as engines:
        async with Clients(engines.url) as clients:
            begun = time.perf_counter()
            undisturbed = await all_streams(clients, options)
            length, expected = time.perf_counter() - begun, [one.text for one in undisturbed]
            wrong = [one.error for one in undisturbed if not one.is_good]
            pauses, firsts, usual, rounds = [], [], [one.pause_s for one in undisturbed], 0
            while rounds < options.rounds and time.perf_counter() - begun < options.within:
                answers, _ = await asyncio.gather(all_streams(clients, options), _kill_one(engines, rng, length))
                pauses += [one.pause_s for one in answers]
                firsts += [one.first_s for one in answers]
                pairs = zip(answers, expected, strict=True)
                wrong += [one.error or "another text" for one, text in pairs if one.error or one.text != text]
                await asyncio.to_thread(engines.wait_ready)
                rounds += 1
                print(f"round {rounds}: {len(wrong)} wrong, pause p99 {ms(part(pauses, 0.99))} ms", flush=True)
    return {
        "ok": not wrong and part(pauses, 0.99) < PAUSE_S and rounds == options.rounds,
        "streams": options.streams,
        "engines": options.engines,
        "kills": rounds,
        "max_tokens": options.max_tokens,
        "wrong": len(wrong),
        "first_wrong": wrong[:3],
        "pause_ms_p50": ms(part(pauses, 0.5)),
        "pause_ms_p99": ms(part(pauses, 0.99)),
        "pause_ms_max": ms(max(pauses)),
        "undisturbed_pause_ms_p99": ms(part(usual, 0.99)),
        "first_ms_p99": ms(part(firsts, 0.99)),
        "undisturbed_s": round(length, 2),
    }


async def all_streams(clients: Clients, options: argparse.Namespace) -> list[Answer]:
    """`--streams` of them at once."""
    bodies = (stream_body(number, options.max_tokens) for number in range(options.streams))
    return list(await asyncio.gather(*(clients.post(CHAT, body) for body in bodies)))


async def _kill_one(engines: Engines, rng: random.Random, length: float) -> None:
    there = [name for name, one in (await asyncio.to_thread(engines.listed)).items() if one["pid"]]
    await asyncio.sleep(rng.random() * length)
    await asyncio.to_thread(engines.send, rng.choice(there), signal.SIGKILL)
