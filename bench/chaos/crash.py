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
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from test.serving import free_port

ROOT = Path(__file__).resolve().parent.parent.parent
CLIENTS = 6
SESSIONS_PER_CLIENT = 4
START_S = 180.0
MAX_UNANSWERED = 3
"""Unanswered turns after which a session is not used any more: each doubles its possible histories."""
PASSWORD = "password-of-the-service"
HEADERS = {"Authorization": f"Bearer {PASSWORD}"}
"""Sent to every service, also to those without a password."""


@dataclass
class Turn:
    """One request, and its answer if there was one."""

    prompt: str
    seed: int
    text: str | None = None
    prompt_tokens: int = 0


@dataclass
class Conversation:
    """A session as its client knows it."""

    name: str
    branches: bool
    turns: list[Turn] = field(default_factory=list)
    dialogue: int = 0
    deleted: bool = False
    delete_confirmed: bool = False
    """Whether the delete was acknowledged."""

    @property
    def unanswered(self) -> int:
        """Number of turns that may or may not be stored."""
        return sum(turn.text is None for turn in self.turns)

    @property
    def is_finished(self) -> bool:
        """Whether the session gets no more turns."""
        unanswered = bool(self.unanswered)
        return self.deleted or self.unanswered > MAX_UNANSWERED or (unanswered and self.turns[-1].text is not None)


class Service:
    """`app.py` with all its processes."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, str(ROOT / "app.py"), "--port", str(port), "--http-workers", "1", *arguments]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RWKV_")}
        with (folder / "service.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=clean | environment
            )
        deadline = time.monotonic() + START_S
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the service did not start; see {folder / 'service.log'}")
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/readyz", timeout=2, verify=False).status_code == 200
        return False

    def kill(self) -> None:
        """Send SIGKILL to every process. Each one leads its own process session, so killing the group is not enough."""
        family = descendants(self.process.pid)
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        while any(is_running(pid) for pid in family):
            time.sleep(0.005)

    def stop(self) -> None:
        """Shut the service down in order."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()


def descendants(pid: int) -> list[int]:
    """Return all child processes, recursively."""
    try:
        found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):  # the process has ended
        return []
    return [*found, *(further for child in found for further in descendants(child))]


def is_running(pid: int) -> bool:
    """Whether a killed process still runs. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def send_turn(client: httpx.Client, url: str, talk: Conversation, turn: Turn, name: str) -> None:
    """Send one turn and fill in its answer. Raises httpx.HTTPError if there was none."""
    body: dict[str, Any] = {
        "contents": [turn.prompt],
        "session_id": name,
        "max_tokens": 6,
        "stop_tokens": [],
        "temperature": 1.0,
        "top_p": 0.95,
        "seed": turn.seed,
        "use_prefix_cache": False,
        "ignore_eos": True,
    }
    path = "/state/chat/completions"
    if talk.branches:
        path, body["dialogue_idx"] = "/multi_state/chat/completions", talk.dialogue
    reply = client.post(url + path, json=body)
    reply.raise_for_status()
    answer = reply.json()
    if "error" in answer:  # an error after the status was sent
        raise httpx.HTTPStatusError(str(answer["error"]), request=reply.request, response=reply)
    turn.prompt_tokens = int(answer["usage"]["prompt_tokens"])
    turn.text = str(answer["choices"][0]["message"]["content"])
    if talk.branches:
        talk.dialogue = int(answer["dialogue_idx"])


class Client(threading.Thread):
    """Runs turns of its own sessions until the service is killed."""

    def __init__(self, url: str, talks: list[Conversation], names: itertools.count[int], rng: random.Random) -> None:
        super().__init__()
        self.acknowledged = 0
        self.refused: list[str] = []
        self._url = url
        self._talks = talks
        self._names = names
        self._rng = rng

    def run(self) -> None:
        with httpx.Client(timeout=120, verify=False) as client:
            try:
                while True:
                    self._turn(client, self._next_conversation())
            except httpx.HTTPStatusError as error:
                self.refused.append(f"{error.response.status_code} {error.response.text[:300]}")
            except (httpx.HTTPError, ValueError, KeyError):
                return  # killed: the last turn has no text

    def _next_conversation(self) -> Conversation:
        open_talks = [talk for talk in self._talks if not talk.is_finished]
        while len(open_talks) < SESSIONS_PER_CLIENT:
            talk = Conversation(f"talk {next(self._names)}", branches=self._rng.random() < 0.25)
            self._talks.append(talk)
            open_talks.append(talk)
        return self._rng.choice(open_talks)

    def _turn(self, client: httpx.Client, talk: Conversation) -> None:
        if talk.turns and not talk.unanswered and self._rng.random() < 0.03:
            talk.deleted = True  # until the answer arrives, the session may or may not exist
            client.post(f"{self._url}/state/delete", json={"session_id": talk.name}).raise_for_status()
            talk.delete_confirmed = True
            return
        words = " ".join(self._rng.choice(("red", "seven", "river", "whose", "Baum", "7", "sky")) for _ in range(6))
        turn = Turn(f"User: {words}\n\nAssistant:", self._rng.randrange(1 << 30))
        talk.turns.append(turn)
        send_turn(client, self._url, talk, turn, talk.name)
        self.acknowledged += 1


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
    """Run all rounds and return the record."""
    rng = random.Random(arguments.seed)
    database = folder / "sessions.db"
    names = itertools.count()
    talks: list[list[Conversation]] = [[] for _ in range(CLIENTS)]
    acknowledged, bad_files, refused = 0, 0, []
    sizes = ["--l1-sessions", "3", "--l2-sessions", "3", "--checkpoint-tokens", "64", "--checkpoint-idle-s", "0.3"]
    for number in range(arguments.kills + 1):
        service = Service(
            folder, *service_arguments, *sizes, "--state-db", str(database), "--durability", arguments.durability
        )
        clients = [Client(service.url, mine, names, random.Random(rng.random())) for mine in talks]
        for client in clients:
            client.start()
        time.sleep(rng.uniform(0.3, 4.0) if number < arguments.kills else 5.0)
        service.kill()
        for client in clients:
            client.join()
        acknowledged += sum(client.acknowledged for client in clients)
        refused += [reason for client in clients for reason in client.refused]
        bad_files += check_files(database) != "ok"
        print(json.dumps({"kill": number, "acknowledged": acknowledged, "refused": len(refused)}), flush=True)
    return {
        "talks": [talk for mine in talks for talk in mine],
        "stored": stored_names(folder, [*service_arguments, "--state-db", str(database)]),
        "acknowledged": acknowledged,
        "bad_files": bad_files,
        "refused": refused,
    }


def stored_names(folder: Path, service_arguments: list[str]) -> set[str]:
    """Return the session names that a fresh start finds. Then stop it in order."""
    service = Service(folder, *service_arguments)
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
    """Compare every conversation with an uninterrupted run."""
    service = Service(folder, *service_arguments, "--state-db", "", "--l1-sessions", "64", "--l2-sessions", "256")
    whole = [(i, talk) for i, talk in enumerate(talks) if not talk.deleted and talk.unanswered <= MAX_UNANSWERED]
    with httpx.Client(timeout=120, verify=False) as client, ThreadPoolExecutor(2 * CLIENTS) as pool:
        found = list(pool.map(lambda entry: differences(client, service.url, entry[1], entry[0]), whole))
    service.stop()
    return [line for lines in found for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--durability", default="log", choices=["log", "turn"])
    parser.add_argument("--model", default="", help="default: the built-in demo model")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
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
        log = (folder / "service.log").read_text(errors="replace")
        if arguments.log is not None:
            arguments.log.write_text(log)
    last = {
        "measure": "crash",
        "kills": arguments.kills + 1,
        "durability": arguments.durability,
        **happened,
        "refused": happened["refused"][:5],
        "sessions": len(talks),
        "deleted": sum(talk.delete_confirmed for talk in talks),
        "unsure_turns": sum(talk.unanswered for talk in talks),
        "different": len(wrong),
        "first_differences": wrong[:5],
        "tracebacks": log.count("Traceback"),
        "seconds": round(time.monotonic() - started),
    }
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(last, indent=1) + "\n")
    print(json.dumps(last))
    sys.exit(1 if wrong or happened["bad_files"] else 0)


if __name__ == "__main__":
    main()
