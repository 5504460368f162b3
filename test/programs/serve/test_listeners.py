"""A port belongs to one service from the start."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from programs.serve.listeners import Listeners, open_listeners
from programs.serve.service import listen
from programs.settings import parse_settings
from rwkv_batch.errors import StartupError
from test.serving import ROOT, free_port, wait_for

pytestmark = pytest.mark.slow

HOST = "127.0.0.1"


def test_of_many_simultaneous_binds_one_gets_the_port() -> None:
    for _ in range(20):
        port, start, won, lost = free_port(), threading.Barrier(6), [], []

        def claim(port: int, start: threading.Barrier, won: list[Listeners], lost: list[str]) -> None:
            start.wait()
            try:
                won.append(open_listeners(HOST, port, 2, 30.0, front=False))
            except StartupError as error:
                lost.append(str(error))

        threads = [threading.Thread(target=claim, args=(port, start, won, lost)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(won), len(lost)) == (1, 5)
        assert all(str(port) in reason and "--port" in reason for reason in lost)
        won[0].close()


@pytest.mark.parametrize("shares", [False, True])
def test_a_port_of_another_server_is_refused_even_if_shared(shares: bool) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shares))
        taken.bind((HOST, 0))
        taken.listen()
        with pytest.raises(StartupError, match="in use"):
            open_listeners(HOST, taken.getsockname()[1], 2, 30.0, front=False)


def test_processes_that_end_meanwhile_are_no_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([Path("/proc/0"), *glob(self, pattern)]))
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        with pytest.raises(StartupError, match=rf"is in use by .+ \(process {os.getpid()}\)"):
            open_listeners(HOST, taken.getsockname()[1], 2, 30.0, front=False)


@pytest.mark.parametrize("front", [False, True])
def test_connections_wait_for_a_worker(front: bool) -> None:
    listeners = open_listeners(HOST, port := free_port(), 2, 30.0, front=front)
    try:
        with socket.create_connection((HOST, port), timeout=5) as client:
            client.sendall(b"hello")
            readable = [listeners.front] if listeners.front else listeners.workers
            for one in readable:
                one.settimeout(1)
            accepted = next(one for one in map(_accepted, readable) if one)
            assert accepted.recv(5) == b"hello"
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), "tokens do not wait for confirmations"
            accepted.close()
    finally:
        listeners.close()


def _accepted(listener: socket.socket) -> socket.socket | None:
    try:
        return listener.accept()[0]
    except TimeoutError:
        return None


def test_two_services_started_at_the_same_moment_do_not_share_a_port(tiny_model: Path, tmp_path: Path) -> None:
    port = free_port()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RWKV_")}
    command = [sys.executable, "app.py", "--port", str(port), "--model-path", str(tiny_model), "--state-db", ""]
    both = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, env=clean) for _ in range(2)]
    try:
        wait_for(lambda: any(one.poll() is not None for one in both), 60, "one of them ends")
        wait_for(lambda: httpx.get(f"http://{HOST}:{port}/readyz").status_code == 200, 60, "the other one serves")
        codes = [one.poll() for one in both]
        assert sorted(codes, key=str) == [1, None]
        loser = both[codes.index(1)]
        assert loser.stderr is not None
        assert f"port {port}" in loser.stderr.read().decode()
    finally:
        for one in both:
            one.kill()
            one.wait(60)


@pytest.mark.parametrize(
    ("flags", "warns"),
    [
        (("--host", "0.0.0.0"), True),
        (("--host", "::"), True),
        (("--host", "0.0.0.0", "--admin-password", "x"), True),
        (("--host", "0.0.0.0", "--password", "x"), False),
        (("--host", "127.0.0.1"), False),
    ],
)
def test_an_open_service_logs_who_can_use_it(
    flags: tuple[str, ...], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    settings = parse_settings([*flags, "--front", "none", "--port", str(free_port()), "--http-workers", "1"], {})
    try:
        listen(settings).close()
    except StartupError:
        assert ":" in flags[1], "without IPv6 the address cannot be bound"
    warnings = [line for line in caplog.messages if "NO PASSWORD" in line]
    assert len(warnings) == warns
    assert all("every address of this machine" in line and "--password-file" in line for line in warnings)


def test_a_second_start_on_a_taken_port_ends_with_a_message() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", free_port()))
        other.listen()
        port = other.getsockname()[1]
        command = [sys.executable, "app.py", "--port", str(port), "--state-db", ""]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    owner = f"in use by {Path('/proc/self/comm').read_text().strip()} (process {os.getpid()})"
    assert f"error: port {port} on 127.0.0.1 is {owner}; stop it or give another --port, " in done.stderr
    assert done.stderr.rstrip().endswith(" is free")
