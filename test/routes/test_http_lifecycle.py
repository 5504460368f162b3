"""Failed starts, killed processes and signals, with real processes over HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app import main
from test.serving import (
    REQUEST_TIMEOUT_S,
    ROOT,
    FreshService,
    Service,
    children,
    free_port,
    is_process_alive,
    read_all,
    sse_data,
    wait_for,
)

pytestmark = pytest.mark.slow

CHAT, BIG = "/v1/chat/completions", "/big_batch/completions"
ENDLESS: dict[str, Any] = {
    "contents": ["a"],
    "max_tokens": 1_000_000,
    "ignore_eos": True,
    "stop_tokens": [],
    "stream": True,
}
Refusal = Callable[..., str]


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service whose processes may be killed. Every test leaves it ready, except the last one, which ends it."""
    flags = ("--resubmit", "0", "--drain-timeout-s", "150")
    with FreshService(tmp_path_factory.mktemp("mortal"), *flags, program="test/fake_app.py", PYTHONPATH=".") as running:
        yield running


@pytest.fixture
def refusal(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Refusal:
    """Calls the command with wrong arguments. Returns its one error line."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # the command replaces it

    def refused(*arguments: str) -> str:
        assert main(list(arguments)) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert line.startswith("error: ")
        return str(line)

    return refused


def start(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RWKV_")}
    return subprocess.run(
        [sys.executable, str(ROOT / "app.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=REQUEST_TIMEOUT_S,
        env={**clean, **environment},
        check=False,
    )


def one_line(ended: subprocess.CompletedProcess[str]) -> str:
    """Return the one error line. Warnings may precede it."""
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    return errors[0]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--nonsense"], "--nonsense"),
        (["--por", "1"], "--por"),
        (["--port", "many"], "--port"),
        (["--port", "70000"], "65535"),
        (["--dtype", "int3"], "--dtype"),
        (["--pp-devices", "gpu"], "--pp-devices"),
        (["--host", "no.such.host.invalid"], "--host"),
        (["--password-file", "/no/such/file"], "/no/such/file"),
    ],
)
def test_bad_flags_end_with_2_and_one_line(refusal: Refusal, arguments: list[str], named: str) -> None:
    assert named in refusal(*arguments)


def test_a_directory_is_refused_as_database_without_a_lock_file(refusal: Refusal, tmp_path: Path) -> None:
    folder = tmp_path / "sessions"
    folder.mkdir()
    refused = refusal("--state-db", str(folder))
    assert "--state-db" in refused and f"got the directory {folder}" in refused
    assert list(tmp_path.iterdir()) == [folder]
    assert not list(folder.iterdir())


def test_a_bad_variable_ends_with_2_and_its_name(refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RWKV_PORT", "http")
    assert "RWKV_PORT" in refusal()


def test_a_port_in_use_ends_with_1(tiny_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = start("--port", str(port), "--model-path", str(tiny_model))
    assert ended.returncode == 1
    assert str(port) in one_line(ended)
    assert "--port" in one_line(ended)


@pytest.mark.parametrize("exists", [False, True])
def test_a_model_that_cannot_be_served_ends_with_1(tmp_path: Path, exists: bool) -> None:
    import torch

    path = tmp_path / "model.pth"
    if exists:
        torch.save({"emb.weight": torch.zeros(8, 64), "blocks.0.att.time_maa_x": torch.zeros(1, 1, 64)}, path)
    ended = start("--port", str(free_port()), "--model-path", str(path), RWKV_STATE_DB=str(tmp_path / "s.db"))
    assert ended.returncode == 1
    assert str(path) in one_line(ended)
    assert "RWKV-6" in one_line(ended) or not exists, "an incomplete model of another architecture"


class Reader(threading.Thread):
    """Reads one endless stream to its end."""

    def __init__(self, service: Service) -> None:
        super().__init__(daemon=True)
        self.connection = service.sent(CHAT, ENDLESS)
        self.received = self.connection.recv(1)
        self.start()

    def run(self) -> None:
        self.received += read_all(self.connection)


def test_a_killed_engine_ends_streams_with_an_error_and_comes_back(mortal: Service) -> None:
    readers = [Reader(mortal) for _ in range(8)]
    wait_for(lambda: mortal.status()["running_rows"] == 8, 30, "8 streams run")
    os.kill(mortal.pids()["engine"], signal.SIGKILL)
    for reader in readers:
        reader.join(REQUEST_TIMEOUT_S)
        assert not reader.is_alive(), "a stream waits for ever"
        text = reader.received.decode(errors="replace")
        assert '"error":"the engine process was lost' in text
        assert text.rstrip("\r\n0").endswith("data: [DONE]")
    refused = mortal.post(CHAT, {"contents": ["a"], "max_tokens": 1})
    assert refused.status_code in (200, 503)
    if refused.status_code == 503:
        assert "engine" in refused.json()["error"]
        assert "retry-after" in refused.headers
    mortal.wait_ready()
    wait_for(lambda: mortal.post(CHAT, {"contents": ["a"], "max_tokens": 1}).status_code == 200, 60, "served again")


def test_a_killed_http_worker_restarts_and_the_others_continue(mortal: Service) -> None:
    mortal.wait_ready()
    readers = [Reader(mortal) for _ in range(16)]
    wait_for(lambda: mortal.status()["running_rows"] == 16, 30, "16 streams run")
    workers = {worker["pid"]: worker["jobs"] for worker in mortal.status()["processes"]["http_workers"]}
    victim, lost = next(iter(workers.items()))
    os.kill(victim, signal.SIGKILL)
    status = wait_for(lambda: mortal.status(), 30, "an answer of the other worker")
    wait_for(lambda: mortal.status()["running_rows"] == 16 - lost, 30, "the lost worker's rows are cancelled")
    wait_for(lambda: sum(reader.is_alive() for reader in readers) == 16 - lost, 10, "its streams have ended")
    assert status["processes"]["engine"]["pid"] == mortal.pids()["engine"]
    wait_for(lambda: len(mortal.status()["processes"]["http_workers"]) == 2, 30, "a new worker")
    for reader in readers:
        reader.connection.close()
    mortal.wait_idle()


def test_malformed_chunks_end_one_worker_at_most(mortal: Service) -> None:
    mortal.wait_ready()
    readers = [Reader(mortal) for _ in range(12)]
    wait_for(lambda: mortal.status()["running_rows"] == 12, 30, "12 streams run")
    jobs = [worker["jobs"] for worker in mortal.status()["processes"]["http_workers"]]
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    with mortal.connect() as connection:
        connection.sendall(head + b"zz\r\nnonsense\r\n\r\n")
        read_all(connection)
    wait_for(lambda: len(mortal.status()["processes"]["http_workers"]) == 2, 30, "both workers")
    wait_for(lambda: mortal.status()["running_rows"] in {12, *jobs}, 30, "the other worker's streams go on")
    assert mortal.post(CHAT, {"contents": ["a"], "max_tokens": 1}).status_code == 200
    for reader in readers:
        reader.connection.close()
    mortal.wait_idle()


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Service]:
    """A service without a model whose own process a test ends."""
    flags = ("--http-workers", "1", "--drain-timeout-s", "0.5")
    with FreshService(tmp_path, *flags, program="test/fake_app.py", PYTHONPATH=".") as running:
        yield running


def test_a_stream_cut_by_the_shutdown_gets_an_error(fake: Service) -> None:
    """A second signal cuts it at once: see test_terminal.py."""
    reader = Reader(fake)
    fake.process.send_signal(signal.SIGTERM)
    reader.join()
    text = reader.received.decode(errors="replace")
    assert "the service was shut down before this answer was complete" in text
    assert "[DONE]" in text
    assert "takes no new" not in text
    assert "restarted" not in text
    assert fake.process.wait(REQUEST_TIMEOUT_S) == 0


def test_children_do_not_outlive_a_killed_supervisor(fake: Service) -> None:
    pids = list(fake.pids().values())
    fake.process.kill()
    fake.process.wait(60)
    wait_for(lambda: not any(map(is_process_alive, pids)), 30, "no child lives on")


def test_sigterm_drains_and_exits_with_0_and_no_warning_of_a_killed_engine(mortal: Service) -> None:
    received: dict[bool, str] = {}

    def ask(stream: bool) -> None:
        received[stream] = mortal.post(BIG, {**ENDLESS, "stream": stream}).text

    threads = [threading.Thread(target=ask, args=(stream,)) for stream in (True, False)]
    for thread in threads:
        thread.start()
    wait_for(lambda: mortal.status()["running_rows"] == 2, 30, "2 rows run")
    processes = children(mortal.process.pid)
    mortal.process.send_signal(signal.SIGTERM)

    def drains() -> bool:
        """Workers get the signal one after the other. Each handles some of the requests."""
        return all(mortal.get("/readyz").status_code == 503 for _ in range(16))

    wait_for(drains, 10, "every worker drains")
    assert mortal.get("/readyz").json() == {"status": "draining", "error": "draining"}
    assert mortal.get("/health").status_code == 503
    refused = mortal.post(CHAT, {"contents": ["a"], "max_tokens": 1})
    assert refused.status_code == 503
    assert "shutting down" in refused.json()["error"]
    assert mortal.get("/healthz").status_code == 200
    assert not received and mortal.status()["running_rows"] == 2, "they are not cut"
    assert mortal.post("/big_batch/clean").json()["cancelled"] == 2
    for thread in threads:
        thread.join()
    assert sse_data(received[True])[-1]["choices"][-1]["finish_reason"] == "cancelled"
    assert json.loads(received[False])["choices"][0]["finish_reason"] == "cancelled"
    assert mortal.process.wait(REQUEST_TIMEOUT_S) == 0
    # Python's resource tracker also warns, after the supervisor has ended.
    wait_for(lambda: not any(map(is_process_alive, processes)), 20, "the last process has ended")
    assert "resource_tracker" not in mortal.log.read_text()
