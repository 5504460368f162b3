"""Turns of many sessions, written down; at the end each session is asked how many it has kept.

A session's tokens are counted in `usage.prompt_tokens`. All turns have prompts and answers of one length, so that the
count says how many turns a session holds: none that was acknowledged may be missing, none be there that was refused
for certain.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

from bench.acceptance.clients import STATE, Answer, Clients

IN_DOUBT = "may have been kept"
ANSWER_TOKENS = 8


def turn_body(session: str, max_tokens: int = ANSWER_TOKENS, **fields: Any) -> dict[str, Any]:
    """A greedy turn of so many tokens; the same words each time."""
    return {
        "contents": ["User: and then?\n\nAssistant:"],
        "session_id": session,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stop_tokens": [],
        "ignore_eos": True,
        **fields,
    }


class Ledger:
    """What was told of each session's turns."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self.kept, self.unsure = Counter[str](), Counter[str]()
        self.turns: list[tuple[str, Answer]] = []
        self._first = self._each = 0

    async def calibrate(self) -> None:
        """Learn what turns count."""
        counts = [int((await self.turn("calibration")).body["usage"]["prompt_tokens"]) for _ in range(3)]
        self._first, self._each = counts[0], counts[1] - counts[0]
        if counts[2] - counts[1] != self._each:
            raise SystemExit(f"turns of one length count {counts}")
        self.turns.clear()

    async def turn(self, session: str, **fields: Any) -> Answer:
        """One turn, and what became of it."""
        answer = await self._clients.post(STATE, turn_body(session, **fields))
        self.turns.append((session, answer))
        self.kept[session] += answer.is_good
        self.unsure[session] += not answer.is_good and (IN_DOUBT in answer.error or answer.status == 0)
        return answer

    async def chat(self, session: str, seconds: float) -> None:
        """Turns one after the other; a refused one is followed after a moment."""
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            if not (await self.turn(session)).is_good:
                await asyncio.sleep(0.2)

    def held(self, answer: Answer) -> float:
        """How many turns a session held before this answer's."""
        return (int(answer.body["usage"]["prompt_tokens"]) - self._first) / self._each

    async def check(self) -> list[str]:
        """What is wrong with the sessions; one more turn each."""
        faults = []
        for session in list(self.kept):
            answer = await self._clients.post(STATE, turn_body(session))
            if not answer.is_good:
                faults.append(f"{session}: {answer.error}")
                continue
            held, least = self.held(answer), self.kept[session]
            if not least <= held <= least + self.unsure[session]:
                faults.append(f"{session} holds {held} turns of {least} acknowledged, {self.unsure[session]} in doubt")
            self.kept[session], self.unsure[session] = int(held) + 1, 0
        return faults
