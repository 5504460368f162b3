"""Holds many dialogues at a time with a running service.

Each dialogue has its own session.

    python examples/dialogues.py --url http://127.0.0.1:8000 [--dialogues 320]

Each turn sends only the new message. All dialogues share the running batch.
"""

from __future__ import annotations

import argparse
import asyncio
import time
import uuid

import aiohttp

TURNS = ("Hello! My number is {n}.", "What is a river?", "Tell me more, briefly.")


async def talk(client: aiohttp.ClientSession, url: str, name: str, n: int, max_tokens: int) -> int:
    """Hold one dialogue; return the number of tokens received."""
    tokens = 0
    for turn in TURNS:
        message = {"role": "user", "content": turn.format(n=n)}
        body = {"messages": [message], "session_id": f"{name}-{n}", "max_tokens": max_tokens}
        async with client.post(f"{url}/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            tokens += (await answer.json())["usage"]["completion_tokens"]
    return tokens


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--dialogues", type=int, default=320)
    parser.add_argument("--max-tokens", type=int, default=40)
    given = parser.parse_args()
    name, started = uuid.uuid4().hex[:8], time.monotonic()
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
        talks = [talk(client, given.url, name, n, given.max_tokens) for n in range(given.dialogues)]
        tokens = sum(await asyncio.gather(*talks))
    seconds = time.monotonic() - started
    print(f"{given.dialogues} dialogues of {len(TURNS)} turns: {tokens} tokens in {seconds:.1f} s")


if __name__ == "__main__":
    asyncio.run(main())
