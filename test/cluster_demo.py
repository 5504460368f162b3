"""Runs three machines of a Ray cluster on one host. Kills one of them during a stream.

    python -m test.cluster_demo [--state-db postgresql://…] [further flags of the service]

Machine 1 is the head and has no engine; machines 2 and 3 have one engine each. A client reads a stream from machine 1.
Then the machine that generates the stream is killed, and the stream continues. With PostgreSQL a conversation from
before continues, too. Needs requirements-cluster.txt and the tests' modules; takes one or two minutes.
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

from test.postgres import Server, unavailable_reason
from test.ray_nodes import RayNodes, free_port

ROOT = Path(__file__).resolve().parent.parent
READY_S = 180.0
_BEGUN = time.monotonic()


def say(text: str) -> None:
    sys.stdout.write(f"[{time.monotonic() - _BEGUN:5.1f} s] {text}\n")
    sys.stdout.flush()


def fetch(url: str, body: Any = None) -> Any:
    """Return the JSON answer to a GET or a POST of `body`. None on failure."""
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode())
    with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())
    return None


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.2)
    raise SystemExit(f"error: {what}: not within {READY_S:.0f} s; see the logs of the machines")


class Machine:
    """A Ray node with a service."""

    def __init__(self, nodes: RayNodes, number: int, ip: str, flags: list[str]) -> None:
        self.name, self._nodes, port = f"machine {number}", nodes, free_port()
        self.ip, self.url = ip, f"http://127.0.0.1:{port}"
        command = [sys.executable, str(ROOT / "app.py"), "--port", str(port), "--cluster", nodes.address]
        command += ["--cluster-node", self.ip, "--replicas", "2", "--threads", "1", "--http-workers", "1", *flags]
        log = (nodes.folder / f"{self.name}.log").open("wb")
        environment = {**os.environ, **nodes.environment}
        self._service = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=environment)

    def engines(self) -> list[dict[str, Any]]:
        return list((fetch(f"{self.url}/status") or {}).get("engines", []))

    def chat(self, text: str) -> str:
        """Return the answer to one turn of the conversation."""
        body = {"contents": [f"User: {text}\n\nAssistant:"], "session_id": "demo", "max_tokens": 24, "temperature": 0}
        answer = fetch(f"{self.url}/state/chat/completions", body)
        return str(answer["choices"][0]["message"]["content"]).strip() if answer else ""

    def kill(self) -> None:
        self._service.kill()
        self._nodes.kill(self.ip)

    def stop(self) -> None:
        self._service.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._service.wait(60)
        self._service.kill()


class Stream(threading.Thread):
    """Reads a greedy stream; `pause_s` is the longest time between two chunks."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.text, self.error, self.pause_s, self._url = "", "", 0.0, machine.url
        self.start()

    def run(self) -> None:
        """Read until the end."""
        prompt = "User: Tell me a long story about a lighthouse.\n\nAssistant:"
        body = {"contents": [prompt], "max_tokens": 300, "temperature": 0, "stop_tokens": [], "ignore_eos": True}
        body |= {"stream": True, "chunk_size": 1}
        request = urllib.request.Request(f"{self._url}/v1/chat/completions", json.dumps(body).encode())
        last = time.monotonic()
        with urllib.request.urlopen(request, timeout=300) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    self.error = self.error or str(event.get("error", ""))
                    self.text += "".join(one["delta"].get("content", "") for one in event.get("choices", ()))
                    now = time.monotonic()
                    self.pause_s, last = max(self.pause_s, now - last), now

    def result(self) -> str:
        self.join()
        if self.error:
            raise SystemExit(f"error: the stream failed: {self.error}")
        return self.text


@contextlib.contextmanager
def database(flags: list[str]) -> Iterator[str]:
    """Yield the URL of `--state-db` or of a temporary PostgreSQL server. Without either, yield ""."""
    if "--state-db" in flags:
        yield flags[flags.index("--state-db") + 1]
    elif reason := unavailable_reason():
        say(f"sessions are in memory only ({reason})")
        yield ""
    else:
        with contextlib.closing(Server()) as server:
            yield server.database()


def kill_during_stream(front: Machine, others: list[Machine]) -> Machine:
    """Kill the machine that generates a stream and compare the text; return the machine."""
    expected = Stream(front).result()
    say(f"a stream without a failure, read from {front.name}: {len(expected)} characters: {expected[:60]!r}…")
    stream = Stream(front)
    busy = until(lambda: [one for one in front.engines() if one["rows"]], "the stream runs")[0]
    victim = next(machine for machine in others if machine.ip == busy["node"])
    time.sleep(0.3)
    say(f"the same again: {busy['engine']} on {victim.name} ({victim.ip}) generates it. kill -9 {victim.name}")
    victim.kill()
    if (text := stream.result()) != expected:
        raise SystemExit(f"error: the stream has another text after the failure: {text!r}")
    say(f"the stream continued: {len(text)} characters, the same text, longest pause {stream.pause_s:.1f} s")
    return victim


def show(nodes: RayNodes, flags: list[str], state_db: str) -> None:
    machines: list[Machine] = []
    try:
        ips = [nodes.start(cpus) for cpus in (0, 1, 1)]
        machines += [Machine(nodes, i, ip, [*flags, "--state-db", state_db]) for i, ip in enumerate(ips, 1)]
        front, *others = machines
        say(f"{front.name}: Ray's head at {nodes.address}, token authentication, no engine")
        for machine in machines:
            until(
                lambda machine=machine: [one["status"] for one in machine.engines()] == ["ready"] * 2, "all are ready"
            )
            say(f"{machine.name} serves at {machine.url}")
        for one in front.engines():
            say(f"{one['engine']}: process {one['pid']} on node {one['node']}, {one['status']}")
        if state_db:
            say(f"a conversation: {front.chat('My name is Ada.')!r}")
        victim = kill_during_stream(front, others)
        for one in front.engines():
            say(f"{one['engine']}: {one['status']}{' - ' + one['error'] if one['error'] else ''}")
        if state_db:
            survivor = next(machine for machine in others if machine is not victim)
            say(f"the conversation continues on {survivor.name}: {survivor.chat('What is my name?')!r}")
    finally:
        for machine in machines:
            machine.stop()


def main() -> None:
    """Run the demonstration and clean up."""
    flags = sys.argv[1:]
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        contextlib.closing(RayNodes(Path(folder))) as nodes,
        database(flags) as state_db,
    ):
        show(nodes, flags, state_db)
    say("done")


if __name__ == "__main__":
    main()
