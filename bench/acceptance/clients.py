"""Clients on one event loop: a request and what became of it; many at a rate, or so many at once."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

CHAT, STATE = "/v1/chat/completions", "/state/chat/completions"
PATIENCE_S = 900.0


@dataclass
class Answer:
    """What became of a request; times in seconds."""

    began: float
    status: int = 0
    """0: the connection failed."""
    headers: dict[str, str] = field(default_factory=dict)
    text: str = ""
    error: str = ""
    """What went wrong, with the status or within the answer."""
    first_s: float = 0.0
    """From the beginning to the first piece of text."""
    pause_s: float = 0.0
    """The longest gap between two pieces of text."""
    paused_at: float = 0.0
    """When that ended."""
    ended: float = 0.0
    body: dict[str, Any] = field(default_factory=dict)
    """Of an answer that is not a stream."""

    @property
    def is_good(self) -> bool:
        """Whether it was answered in full."""
        return self.status == 200 and not self.error

    @property
    def whole_s(self) -> float:
        """How long it took."""
        return self.ended - self.began


class Clients:
    """Connections to one service; a context."""

    def __init__(self, url: str, key: str = "") -> None:
        """`key`: an API key of requests that bring none."""
        self._url = url
        self._key = key

    async def __aenter__(self) -> Clients:
        self._session = aiohttp.ClientSession(
            self._url,
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=PATIENCE_S),
            read_bufsize=1 << 20,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def post(self, path: str, body: dict[str, Any], key: str = "") -> Answer:
        """Ask, with an API key if there is one; never raises for what the service does."""
        answer = Answer(time.perf_counter())
        headers = {"Authorization": f"Bearer {key or self._key}"} if key or self._key else {}
        try:
            async with self._session.post(path, json=body, headers=headers) as reply:
                answer.status, answer.headers = reply.status, dict(reply.headers)
                if reply.status == 200 and body.get("stream"):
                    await _read_stream(reply, answer)
                else:
                    _read_whole(await reply.text(), answer)
        except (aiohttp.ClientError, TimeoutError) as error:
            answer.error = f"the connection failed: {error!r}"
        answer.ended = time.perf_counter()
        return answer


async def _read_stream(reply: aiohttp.ClientResponse, answer: Answer) -> None:
    last, is_whole = answer.began, False
    async for line in reply.content:
        if not line.startswith(b"data: "):
            continue
        if line.strip() == b"data: [DONE]":
            is_whole = True
            continue
        event = json.loads(line.removeprefix(b"data: "))
        now = time.perf_counter()
        if "error" in event:
            answer.error = f"200 {event}"
        for choice in event.get("choices", ()):
            if not (piece := choice["delta"].get("content", "")):
                continue
            if answer.text:
                answer.pause_s, answer.paused_at = max((answer.pause_s, answer.paused_at), (now - last, now))
            else:
                answer.first_s = now - answer.began
            answer.text += piece
            last = now
    if not is_whole and not answer.error:
        answer.error = "the stream ended without [DONE]"


def _read_whole(text: str, answer: Answer) -> None:
    try:
        answer.body = json.loads(text)
    except ValueError:
        answer.error = f"{answer.status} {text[:300]}"
        return
    if answer.status != 200 or "error" in answer.body:
        answer.error = f"{answer.status} {text[:300]}"
    elif answer.body.get("choices"):
        answer.text = answer.body["choices"][0]["message"]["content"]


Ask = Callable[[int], Awaitable[Answer]]


async def at_rate(ask: Ask, rate: float, seconds: float, rng: random.Random) -> list[Answer]:
    """Requests that come whether or not earlier ones are answered, at random times; their answers."""
    begun, at, tasks = time.perf_counter(), 0.0, []
    while (at := at + rng.expovariate(rate)) < seconds:
        await asyncio.sleep(max(0.0, begun + at - time.perf_counter()))
        tasks.append(asyncio.ensure_future(ask(len(tasks))))
    return list(await asyncio.gather(*tasks))


async def at_once(ask: Ask, count: int, seconds: float) -> list[Answer]:
    """So many clients, each with one request after the other; all their answers."""
    until, answers = time.perf_counter() + seconds, list[Answer]()

    async def client() -> None:
        while time.perf_counter() < until:
            answers.append(await ask(len(answers)))

    await asyncio.gather(*(client() for _ in range(count)))
    return answers


def part(values: Sequence[float], share: float) -> float:
    """The value below which that share of them lies; 0.0 without any."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def ms(seconds: float) -> float:
    """As milliseconds, rounded."""
    return round(seconds * 1e3, 1)


def failures(answers: Sequence[Answer]) -> list[str]:
    """What went wrong with each that was not answered in full."""
    return [answer.error or f"status {answer.status}" for answer in answers if not answer.is_good]
