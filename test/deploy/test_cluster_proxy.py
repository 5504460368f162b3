"""deploy/cluster/haproxy.cfg with Debian's HAProxy in front of three services."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from test.deploy.test_proxies import CHAT, DEPLOY, ENDLESS, found
from test.serving import FreshService, Service, free_port, wait_for

pytestmark = [pytest.mark.proxy, pytest.mark.cluster]
ROW = {"contents": ["abc"], "max_tokens": 2}


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Service]]:
    flags = ("--front", "none", "--trusted-proxies", "127.0.0.1", "--http-workers", "1", "--files-dir", "none")
    made = [FreshService(tmp_path, *flags, program="test/fake_app.py", PYTHONPATH=".") for _ in range(3)]
    try:
        yield [service.wait_ready() for service in made]
    finally:
        for service in made:
            service.close()


@pytest.fixture
def proxy(machines: list[Service], tmp_path: Path) -> Iterator[str]:
    """The proxy's address; only the addresses differ from the shipped file."""
    program = found("haproxy")
    if program is None:
        pytest.skip("haproxy is not installed")
    port, file, log = free_port(), tmp_path / "haproxy.cfg", tmp_path / "proxy.log"
    text = (DEPLOY / "cluster" / "haproxy.cfg").read_text("utf-8").replace("bind :80", f"bind 127.0.0.1:{port}")
    for number, service in enumerate(machines, 1):
        assert text.count(f"10.0.0.{number}:8000") == 2
        text = text.replace(f"10.0.0.{number}:8000", f"127.0.0.1:{service.port}")
    file.write_text(text, "utf-8")
    with log.open("wb") as output:
        process = subprocess.Popen([program, "-f", str(file)], stdout=output, stderr=output, env={**os.environ})
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(lambda: _answers(address), 30, "the proxy answers")
        yield address
    finally:
        process.terminate()
        process.wait(60)


def _answers(address: str) -> bool:
    try:
        return httpx.get(f"{address}/readyz").status_code == 200
    except httpx.TransportError:
        return False


def _machines_of(address: str, sessions: list[str]) -> dict[str, int]:
    """Return which service gets most of a session's requests, by its engine's process id.

    HAProxy may count a request that has just ended as load, and then gives the next one to another machine.
    """
    asked: dict[str, Counter[int]] = {session: Counter() for session in sessions}
    with httpx.Client(timeout=60) as client:
        for session in sessions * 3:
            answer = client.get(f"{address}/status", headers={"X-Session-Id": session})
            answer.raise_for_status()
            asked[session][answer.json()["processes"]["engine"]["pid"]] += 1
    return {session: pids.most_common(1)[0][0] for session, pids in asked.items()}


def test_a_session_keeps_its_machine_until_it_ends(proxy: str, machines: list[Service]) -> None:
    sessions = [f"session {number}" for number in range(30)]
    homes = _machines_of(proxy, sessions)
    assert homes == _machines_of(proxy, sessions)
    shares = Counter(homes.values())
    assert len(shares) == 3
    lost, *_ = machines
    gone = lost.pids()["engine"]
    with httpx.stream("POST", proxy + CHAT, json=ENDLESS, timeout=60) as response:  # answers are not buffered
        assert "abc" in next(line for line in response.iter_lines() if "abc" in line)
    lost.process.kill()
    lost.process.wait()
    lost.close()
    for _ in range(12):
        assert httpx.post(proxy + CHAT, json=ROW, timeout=60).status_code == 200
    moved = _machines_of(proxy, sessions)
    assert gone not in moved.values()
    assert all(moved[session] == home for session, home in homes.items() if home != gone)
    chunked = httpx.post(proxy + CHAT, content=iter([b"{}"]), timeout=60)
    assert chunked.status_code == 411
