"""Kills the real service repeatedly under clients, then checks every acknowledged turn.

    python -m bench.chaos.crash [--kills 200] [--durability log|turn] [--model FILE] [--folder DIR]
                                 [--out FILE] [--seed 1]

Each round starts `app.py` on the same database. Clients run turns of many sessions through `/state/chat/completions`,
and forks through `/multi_state`. Sometimes a client deletes a session. At a random moment all processes get SIGKILL;
then `integrity_check` runs on a copy of the files.

At the end the same turns run on a service that is never killed and keeps sessions in memory only. Text and
`usage.prompt_tokens` of every turn must be equal. `prompt_tokens` counts the whole history of the session, so it shows
a lost or doubled turn even if the text does not. A turn without an answer may or may not be stored. Its session gets
one more turn, which must fit one of the two histories. Equal text requires fp32 on a CPU.

The last line is JSON. The exit status is 1 if anything was lost, doubled, damaged or different.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import shutil
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from bench.chaos.service import Disturbances, Service, logs
from bench.chaos.traffic import MAX_UNANSWERED, Client, Conversation, Findings, Turn, send_turn
from bench.tools.record import Arguments, finish

CLIENTS = 6
LAST_TURNS, LAST_S = 60, 20.0
"""Turns of the last round, and the longest time that it gets for them."""


class TurnClient(Client):
    """Runs turns of its sessions, and deletes some of them, until the service is killed."""

    def _one(self, client: httpx.Client) -> None:
        (self._delete_session if self._rng.random() < 0.03 else self._turn)(client)

    def _send(self, what: str, fine: tuple[int, ...], send: Callable[[], httpx.Response]) -> httpx.Response | None:
        response = super()._send(what, fine, send)
        self.stopping |= response is None
        return response


def check_files(database: Path) -> str:
    """Run `integrity_check` on a copy. The service itself then recovers the original."""
    with tempfile.TemporaryDirectory() as copy:
        for suffix in ("", "-wal"):
            file = Path(str(database) + suffix)
            if file.exists():
                shutil.copy(file, copy)
        with contextlib.closing(sqlite3.connect(Path(copy) / database.name)) as connection:
            return str(connection.execute("PRAGMA integrity_check").fetchone()[0])


def run_kills(folder: Path, arguments: argparse.Namespace, service_arguments: list[str]) -> dict[str, Any]:
    rng = random.Random(arguments.seed)
    database, findings, gate, bad_files = folder / "sessions.db", Findings(), threading.Event(), 0
    gate.set()
    talks: list[list[Conversation]] = [[] for _ in range(CLIENTS)]
    sizes = ["--l1-sessions", "3", "--l2-sessions", "3", "--checkpoint-tokens", "64", "--checkpoint-idle-s", "0.3"]
    for number in range(arguments.kills + 1):
        sizes_now = [*sizes, "--durability", arguments.durability]
        service = Service(folder, *service_arguments, *sizes_now, state_db=database)
        numbers = range(number * CLIENTS, (number + 1) * CLIENTS)
        clients = [TurnClient(service.url, one, Disturbances(service.url), findings, gate) for one in numbers]
        for client, mine in zip(clients, talks, strict=True):
            client.talks = mine
            client.start()
        is_last = number == arguments.kills
        until = time.monotonic() + (LAST_S if is_last else rng.uniform(0.3, 4.0))
        enough = findings.acknowledged + LAST_TURNS
        while time.monotonic() < until and not (is_last and findings.acknowledged >= enough):
            time.sleep(0.05)
        service.kill()
        for client in clients:
            client.join()
        bad_files += check_files(database) != "ok"
        print(json.dumps({"kill": number, "acknowledged": findings.acknowledged}), flush=True)
    return {
        "talks": [talk for mine in talks for talk in mine],
        "stored": stored_names(folder, service_arguments, database),
        "acknowledged": findings.acknowledged,
        "answers": dict(sorted(findings.answers.items())),
        "bad_files": bad_files,
    }


def stored_names(folder: Path, service_arguments: list[str], database: Path) -> set[str]:
    """Return the session names that a fresh start finds. Then stop it in order."""
    service = Service(folder, *service_arguments, state_db=database)
    names: set[str] = set()
    while page := _page(service.url, len(names)):
        names.update(page)
    service.stop()
    return names


def _page(url: str, offset: int) -> list[str]:
    """Return session names from `offset` on."""
    asked = {"limit": 10_000, "offset": offset}
    reply = httpx.post(f"{url}/state/status", json=asked, timeout=60, verify=False)
    return [str(entry["session_id"]) for entry in reply.json()["sessions"]]


def wrong_sessions(talks: list[Conversation], stored: set[str]) -> list[str]:
    """Return deleted sessions that still exist, and acknowledged ones that do not."""
    wrong: list[str] = []
    for talk in talks:
        shown = f"{talk.name}:{talk.dialogue}" if talk.branches else talk.name
        known = any(turn.text is not None for turn in talk.turns)
        if talk.delete_confirmed and any(name == talk.name or name.startswith(f"{talk.name}:") for name in stored):
            wrong.append(f"{talk.name} was deleted and is back")
        elif known and not talk.deleted and shown not in stored:
            wrong.append(f"{shown} was acknowledged and is lost")
    return wrong


def differences(client: httpx.Client, url: str, talk: Conversation, number: int) -> list[str]:
    """Compare a conversation with an uninterrupted run; returns the differences of its best-fitting history."""
    unanswered = [i for i, turn in enumerate(talk.turns) if turn.text is None]
    best: list[str] | None = None
    for kept in itertools.product((True, False), repeat=len(unanswered)):
        left_out = {i for i, keep in zip(unanswered, kept, strict=True) if not keep}
        name = f"{number} {talk.name} {kept}"
        again = Conversation(name, talk.branches)
        found: list[str] = []
        for i, turn in enumerate(talk.turns):
            if i in left_out or (talk.branches and turn.text is None):
                continue
            copy = Turn(turn.prompt, turn.seed)
            send_turn(client, url, again, copy, name)
            if turn.text is not None and (copy.text, copy.prompt_tokens) != (turn.text, turn.prompt_tokens):
                found.append(f"{talk.name} turn {i}: {turn.prompt_tokens} tokens, {copy.prompt_tokens} uninterrupted")
        if best is None or len(found) < len(best):
            best = found
        if not best:
            break
    return best or []


def check_all(folder: Path, talks: list[Conversation], service_arguments: list[str]) -> list[str]:
    service = Service(folder, *service_arguments, "--l1-sessions", "64", "--l2-sessions", "256")
    whole = [(i, talk) for i, talk in enumerate(talks) if not talk.deleted and talk.unanswered <= MAX_UNANSWERED]
    with httpx.Client(timeout=120, verify=False) as client, ThreadPoolExecutor(2 * CLIENTS) as pool:
        found = list(pool.map(lambda entry: differences(client, service.url, entry[1], entry[0]), whole))
    service.stop()
    return [line for lines in found for line in lines]


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--durability", default="log", choices=["log", "turn"])
    parser.add_argument("--model", default="", help="default: the built-in demo model")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, help="file for the services' log")
    arguments = parser.parse_args()
    service_arguments = ["--dtype", "fp32", "--pp-devices", "cpu", "--log-level", "warning"]
    service_arguments += ["--model-path", arguments.model] if arguments.model else []
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        happened = run_kills(folder, arguments, service_arguments)
        talks: list[Conversation] = happened.pop("talks")
        wrong = wrong_sessions(talks, happened.pop("stored"))
        wrong += check_all(folder, talks, service_arguments)
        log = logs(folder)
        if arguments.log is not None:
            arguments.log.write_text(log)
    last = {
        "measure": "crash",
        "kills": arguments.kills + 1,
        "durability": arguments.durability,
        **happened,
        "sessions": len(talks),
        "deleted": sum(talk.delete_confirmed for talk in talks),
        "unsure_turns": sum(talk.unanswered for talk in talks),
        "different": len(wrong),
        "first_differences": wrong[:5],
        "tracebacks": log.count("Traceback"),
        "seconds": round(time.monotonic() - started),
    }
    finish(last, arguments.out)
    sys.exit(1 if wrong or happened["bad_files"] else 0)


if __name__ == "__main__":
    main()
