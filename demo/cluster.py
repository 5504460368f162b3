"""Three machines on one: Ray nodes on addresses of the loopback network, a service on each, one of them is killed.

    python -m demo.cluster [--state-db postgresql://…] [further flags of the service]

Machine 1 has the cluster's head and no engine, machines 2 and 3 an engine each. A stream is read from machine 1; the
machine whose engine writes it is killed with all its processes; the stream goes on. Then a conversation that began
before goes on too, if its sessions are in PostgreSQL: with a server of the tests' own where that is installed.
Needs requirements-cluster.txt; takes a minute or two, most of which is Ray's start.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from demo.ray_nodes import RayNodes, free_port

ROOT = Path(__file__).resolve().parent.parent
READY_S = 180.0
TOKENS = 300
_BEGUN = time.monotonic()


def say(text: str) -> None:
    """One line of what happens."""
    sys.stdout.write(f"[{time.monotonic() - _BEGUN:5.1f} s] {text}\n")
    sys.stdout.flush()


class Machine:
    """A Ray node and the service beside it."""

    def __init__(self, nodes: RayNodes, number: int, cpus: int) -> None:
        self.name = f"machine {number}"
        self.ip = nodes.start(cpus)
        self.url = ""
        self._nodes = nodes
        self._service: subprocess.Popen[bytes] | None = None

    def serve(self, flags: list[str]) -> None:
        """Start the service."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, str(ROOT / "app.py"), "--port", str(port), "--cluster", self._nodes.address]
        command += ["--cluster-node", self.ip, "--replicas", "2", "--threads", "1", "--http-workers", "1", *flags]
        log = (self._nodes.folder / f"{self.name}.log").open("wb")
        environment = {**os.environ, **self._nodes.environment}
        self._service = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=environment)

    def kill(self) -> None:
        """End all that runs on it at once."""
        if self._service is not None:
            self._service.kill()
        self._nodes.kill(self.ip)

    def stop(self) -> None:
        """End the service in good order."""
        if self._service is not None and self._service.poll() is None:
            self._service.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._service.wait(60)
            self._service.kill()


def fetch(url: str, body: Any = None) -> Any:
    """The JSON answer to a GET, or to a POST of `body`; None while there is none."""
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())
    except OSError:
        return None


def until(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of `condition`."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.2)
    raise SystemExit(f"error: not within {READY_S:.0f} s: {what}")


class Story:
    """A greedy stream, which is read on a thread of its own."""

    def __init__(self, machine: Machine) -> None:
        self.text = ""
        self.pause_s = 0.0
        self.error = ""
        self._url = machine.url
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        body = {
            "contents": ["User: Tell me a long story about a lighthouse.\n\nAssistant:"],
            "max_tokens": TOKENS, "temperature": 0, "stop_tokens": [], "ignore_eos": True, "stream": True, "chunk_size": 1,
        }  # fmt: skip
        request = urllib.request.Request(f"{self._url}/v1/chat/completions", json.dumps(body).encode())
        last = time.monotonic()
        with urllib.request.urlopen(request, timeout=300) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                self.error = self.error or str(event.get("error", ""))
                self.text += "".join(one["delta"].get("content", "") for one in event.get("choices", ()))
                now = time.monotonic()
                self.pause_s, last = max(self.pause_s, now - last), now

    def result(self) -> str:
        """Its whole text."""
        self._thread.join()
        if self.error:
            raise SystemExit(f"error: the stream told of {self.error}")
        return self.text


def turn(machine: Machine, text: str) -> str:
    """The answer to one turn of a conversation."""
    prompt = f"User: {text}\n\nAssistant:"
    body = {"contents": [prompt], "session_id": "demo", "max_tokens": 24, "temperature": 0}
    answer = fetch(f"{machine.url}/state/chat/completions", body)
    return str(answer["choices"][0]["message"]["content"]).strip() if answer else ""


def engines(machine: Machine) -> list[dict[str, Any]]:
    """What /status of a machine says of each engine."""
    return list((fetch(f"{machine.url}/status") or {}).get("engines", []))


@contextlib.contextmanager
def database(flags: list[str]) -> Iterator[str]:
    """Where sessions are kept: as the flags say, else a PostgreSQL server for this run, else memory alone."""
    if "--state-db" in flags:
        yield flags[flags.index("--state-db") + 1]
        return
    try:
        from test.postgres import Server, missing
    except ImportError:
        reason: str | None = "the tests are not here"
    else:
        reason = missing()
    if reason is not None:
        say(f"sessions are in memory alone ({reason})")
        yield ""
        return
    server = Server()
    try:
        yield server.database()
    finally:
        server.close()


def show_loss(front: Machine, others: list[Machine]) -> Machine:
    """Kill the machine that writes a stream; returns it."""
    expected = Story(front).result()
    say(f"a story, undisturbed, by way of {front.name}: {len(expected)} characters: {expected[:60]!r}…")
    story = Story(front)
    busy = until(lambda: [one for one in engines(front) if one["rows"]], "the story runs")[0]
    victim = next(machine for machine in others if machine.ip == busy["node"])
    time.sleep(0.3)
    say(f"the same again; {busy['engine']} on {victim.name} ({victim.ip}) writes it. kill -9 of all of {victim.name}")
    victim.kill()
    told = story.result()
    same = "the same text" if told == expected else "ANOTHER TEXT"
    say(f"the stream went on: {len(told)} characters, {same}, its longest pause {story.pause_s:.1f} s")
    if told != expected:
        raise SystemExit("error: the stream is not what it was")
    return victim


def show(nodes: RayNodes, flags: list[str], state_db: str) -> None:
    """The whole play."""
    flags = [*flags, "--state-db", state_db]
    front = Machine(nodes, 1, cpus=0)
    say(f"{front.name}: Ray's head at {nodes.address}, token authentication, no engine")
    others = [Machine(nodes, number, cpus=1) for number in (2, 3)]
    machines = [front, *others]
    try:
        for machine in machines:
            machine.serve(flags)
        for machine in machines:
            until(lambda machine=machine: [one["status"] for one in engines(machine)] == ["ready"] * 2, "all are ready")
            say(f"{machine.name} serves at {machine.url}")
        for one in engines(front):
            say(f"{one['engine']}: process {one['pid']} on node {one['node']}, {one['status']}")
        if state_db:
            say(f"a conversation: {turn(front, 'My name is Ada.')!r}")
        victim = show_loss(front, others)
        for one in engines(front):
            say(f"{one['engine']}: {one['status']}{' - ' + one['error'] if one['error'] else ''}")
        survivor = next(machine for machine in others if machine is not victim)
        if state_db:
            say(f"the conversation goes on, by way of {survivor.name}: {turn(survivor, 'What is my name?')!r}")
    finally:
        for machine in machines:
            machine.stop()


def main() -> None:
    """Run it and clean up."""
    flags = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        nodes = RayNodes(Path(folder))
        try:
            with database(flags) as state_db:
                show(nodes, flags, state_db)
        finally:
            nodes.close()
    say("all has ended")


if __name__ == "__main__":
    main()
