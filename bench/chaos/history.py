"""Checks that each session's turns are one linear history.

Each session has many clients. Two engines serve them, and processes are killed.

    python -m bench.chaos.history [--operations 100000] [--clients 24] [--sessions 40] [--kill-every 500] [--replicas 2]
                                  [--model FILE] [--seed 1] [--out FILE]

Clients send the same turn to random sessions of a real service and record when each request began and ended. Every turn
adds the same number of tokens, and `usage.prompt_tokens` counts the whole session. So an answer names its place in the
session's history, and a session is a counter: `faults` proves or refutes that it is linearizable. A turn without an
answer may have happened or not. One engine or HTTP worker is killed per `--kill-every` operations.

Bound by the processor: engines, HTTP workers and clients share it. The last line is JSON. The exit status is 1 if a
history has faults.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.tools.record import Arguments, finish, origin
from demo.random_weights import write_random_model
from test.serving import Service

TURN = {
    "contents": ["User: next"],
    "max_tokens": 2,
    "stop_tokens": [],
    "ignore_eos": True,
    "temperature": 0,
    "use_prefix_cache": False,
}
REQUEST_S = 120.0
REFUSED = frozenset({400, 404, 409, 413, 422, 429})
"""Statuses of a turn that certainly did not happen."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One request: monotonic times of its begin and end, s."""

    began: float
    ended: float
    place: int | None
    """Number of turns before it, from the answer. None: no answer, so it may have happened."""


def faults(history: Iterable[Operation]) -> list[str]:
    """Return why a session's operations are not one linear history; empty if they are."""
    operations = sorted(history, key=lambda one: one.began)
    answered = [one for one in operations if one.place is not None]
    found = []
    by_place: dict[int, Operation] = {}
    for one in answered:
        assert one.place is not None
        if one.place in by_place:
            found.append(f"two turns have place {one.place}")
        by_place[one.place] = one
    found += _order_faults(answered)
    return found + _gap_faults(by_place, sorted(one.began for one in operations if one.place is None))


def _order_faults(answered: list[Operation]) -> list[str]:
    """A turn that ended before another began has the smaller place. `answered`: by begin."""
    found, largest, ends = [], -1, sorted(answered, key=lambda one: one.ended)
    ended = 0
    for one in answered:
        while ends[ended].ended < one.began:
            largest = max(largest, ends[ended].place or 0)
            ended += 1
        if one.place is not None and one.place <= largest:
            found.append(f"place {one.place} was given after place {largest} was answered")
    return found


def _gap_faults(by_place: dict[int, Operation], unanswered: list[float]) -> list[str]:
    """Return a fault for each place that belongs to no request.

    Each place without an answer needs an unanswered turn that began before a later place was answered.
    """
    earliest, deadlines = float("inf"), []
    for place in range(max(by_place, default=-1), -1, -1):
        if place in by_place:
            earliest = min(earliest, by_place[place].ended)
        else:
            deadlines.append((earliest, place))
    found = []
    for taken, (deadline, place) in enumerate(sorted(deadlines)):
        if taken >= len(unanswered) or unanswered[taken] > deadline:
            found.append(f"place {place} belongs to no request")
    return found


class Client(threading.Thread):
    """Sends turns to random sessions until the operations are used up."""

    def __init__(self, run: Run, seed: int) -> None:
        super().__init__()
        self._run = run
        self._rng = random.Random(seed)

    def run(self) -> None:
        with httpx.Client(timeout=REQUEST_S) as client:
            while self._run.take():
                self._run.turn(client, f"session {self._rng.randrange(self._run.sessions)}")


class Run:
    """The service, its clients and the recorded histories."""

    def __init__(self, service: Service, sessions: int, operations: int) -> None:
        self.service = service
        self.sessions = sessions
        self.histories: dict[str, list[Operation]] = defaultdict(list)
        self.refused = 0
        self.kills = 0
        self.left = operations
        self._lock = threading.Lock()
        first, second = (self._prompt_tokens() for _ in range(2))
        self._base, self._tokens_per_turn = first, second - first

    def _prompt_tokens(self) -> int:
        answer = self.service.post("/state/chat/completions", {**TURN, "session_id": "measure"})
        answer.raise_for_status()
        return int(answer.json()["usage"]["prompt_tokens"])

    def take(self) -> bool:
        """Take one operation; False if none is left."""
        with self._lock:
            self.left -= 1
            return self.left >= 0

    def turn(self, client: httpx.Client, name: str) -> None:
        """Run a turn, and note it if it may have happened."""
        began = time.monotonic()
        place, happened = self._send(client, name)
        if happened:
            with self._lock:
                self.histories[name].append(Operation(began, time.monotonic(), place))

    def _send(self, client: httpx.Client, name: str) -> tuple[int | None, bool]:
        """Run a turn. Return its place, and whether it may have happened."""
        try:
            reply = client.post(f"{self.service.url}/state/chat/completions", json={**TURN, "session_id": name})
            answer = reply.json()
        except (httpx.HTTPError, ValueError):
            time.sleep(0.05)
            return None, True
        if reply.status_code in REFUSED:
            with self._lock:
                self.refused += 1
            return None, False
        if reply.status_code != 200 or "error" in answer:
            return None, True
        place, rest = divmod(int(answer["usage"]["prompt_tokens"]) - self._base, self._tokens_per_turn)
        return (place if rest == 0 else -1), True

    def kill_one(self, rng: random.Random) -> None:
        with contextlib.suppress(httpx.HTTPError, KeyError, ProcessLookupError, AssertionError):
            engines = [one["pid"] for one in self.service.status()["engines"] if one.get("pid")]
            workers = [one["pid"] for one in self.service.processes()["http_workers"]]
            os.kill(rng.choice(rng.choice([engines, workers])), signal.SIGKILL)
            self.kills += 1

    def summary(self) -> dict[str, Any]:
        wrong = {name: found for name, history in self.histories.items() if (found := faults(history))}
        operations = [one for history in self.histories.values() for one in history]
        return {
            "operations": len(operations),
            "answered": sum(one.place is not None for one in operations),
            "refused": self.refused,
            "kills": self.kills,
            "sessions": len(self.histories),
            "wrong_sessions": len(wrong),
            "faults": [f"{name}: {text}" for name, found in wrong.items() for text in found][:20],
        }


def run(service: Service, operations: int, clients: int, sessions: int, kill_every: int, seed: int) -> dict[str, Any]:
    """Run the clients and kills, then one turn per session. Return the summary."""
    run_ = Run(service, sessions, operations)
    threads = [Client(run_, seed * 1000 + i) for i in range(clients)]
    for thread in threads:
        thread.start()
    rng, next_kill, reported = random.Random(seed), operations - kill_every, time.monotonic()
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.1)
        if kill_every and run_.left < next_kill and run_.left > kill_every // 2:
            next_kill -= kill_every
            run_.kill_one(rng)
        if time.monotonic() - reported > 30:
            reported = time.monotonic()
            print(f"{max(run_.left, 0)} operations left, {run_.kills} kills, {run_.refused} refused", file=sys.stderr)
    with httpx.Client(timeout=REQUEST_S) as client:
        for name in list(run_.histories):
            run_.turn(client, name)
    return run_.summary()


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--sessions", type=int, default=40)
    parser.add_argument("--kill-every", type=int, default=500, help="operations between two kills; 0: none")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--model", type=Path, help="default: a random model of 2 layers")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = arguments.model or write_random_model(folder / "tiny.pth", layers=2, width=64)
        service = Service(folder, "--model-path", str(model), "--replicas", str(arguments.replicas), "--threads", "1")
        try:
            service.wait_ready()
            began = time.monotonic()
            found = run(
                service,
                arguments.operations,
                arguments.clients,
                arguments.sessions,
                arguments.kill_every,
                arguments.seed,
            )
            found["seconds"] = round(time.monotonic() - began, 1)
        finally:
            service.close()
    record = {
        "program": "bench.chaos.history",
        "measure": "history",
        **origin(arguments.commit),
        "replicas": arguments.replicas,
        "seed": arguments.seed,
        **found,
    }
    finish(record, arguments.out)
    sys.exit(bool(found["wrong_sessions"]))


if __name__ == "__main__":
    main()
