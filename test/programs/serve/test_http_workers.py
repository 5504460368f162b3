"""Ended HTTP workers are replaced at once, any number of times; /readyz covers all of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from programs.serve.http_workers import HANG_S, SPARES, HttpWorkers, Worker
from rwkv_batch.ipc.served_model import ModelCommand
from test.serving import (
    START_TIMEOUT_S,
    FreshService,
    Service,
    children,
    is_process_alive,
    raw_request,
    read_all,
    wait_for,
)

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
SHORT: dict[str, Any] = {"contents": ["abc"], "max_tokens": 1}
NOTICED = "engine engine-0 is lost"
MALFORMED = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nZZZ\r\n"


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service without a model; requests do not wait for its engine."""
    folder = tmp_path_factory.mktemp("workers")
    # Without batches, whose process is forked as spares are: spares are counted here.
    flags = ("--engine-wait-s", "0", "--files-dir", "none")
    with Service(folder, *flags, program="test/fake_app.py", PYTHONPATH=".") as running:
        yield running


def workers(service: Service) -> dict[str, int]:
    """Return process id by name of the serving HTTP workers."""
    return {name: pid for name, pid in service.pids().items() if name.startswith("http-")}


def wait_ready_once(service: Service) -> None:
    wait_for(lambda: service.get("/readyz").status_code == 200, 60, "ready")


def test_a_service_without_a_folder_keeps_no_files(fake: Service) -> None:
    refused = fake.get("/openai/v1/files")
    assert refused.status_code == 404 and "stores no files" in refused.json()["error"]["message"]


def test_repeated_malformed_packets_refuse_no_connection(fake: Service) -> None:
    fake.wait_ready()
    before = workers(fake)
    for _ in range(16):
        with fake.connect() as connection:  # never refused: the sockets listen whoever reads them
            connection.sendall(MALFORMED)
            read_all(connection)
    wait_for(lambda: _changed(fake, before), 30, "both workers are others")
    reported = "(SIGABRT); a spare replaces it"
    wait_for(lambda: fake.log.read_text().count(reported) == 16, 10, "each end is logged")
    assert "is tried in" not in fake.log.read_text()


def test_streams_of_other_workers_continue_while_one_is_replaced(fake: Service) -> None:
    fake.wait_ready()
    body = json.dumps({"contents": ["abc"], "max_tokens": 1_000_000, "chunk_size": 1, "stream": True}).encode()
    streams = [fake.connect() for _ in range(8)]
    words, ended = [0] * 8, [False] * 8

    def read(number: int) -> None:
        with contextlib.suppress(ConnectionResetError):
            while piece := streams[number].recv(65536):
                words[number] += piece.count(b"abc")
        ended[number] = True

    def going_on() -> int:
        return sum(now > then + 50 for now, then in zip(words, before, strict=True))

    try:
        for number, stream in enumerate(streams):
            stream.sendall(raw_request(CHAT, body))
            threading.Thread(target=read, args=(number,), daemon=True).start()
        wait_for(lambda: fake.status()["running_rows"] == 8, 10, "8 streams run")
        lost = next(one for one in fake.processes()["http_workers"] if one["jobs"] < 8)
        os.kill(lost["pid"], signal.SIGABRT)
        wait_for(lambda: sum(ended) == lost["jobs"], 30, "its streams end")
        before = list(words)
        wait_for(lambda: going_on() == 8 - lost["jobs"], 30, "the others go on")
        assert sum(ended) == lost["jobs"]
    finally:
        for stream in streams:
            with contextlib.suppress(OSError):  # reset by the one that was lost
                stream.shutdown(socket.SHUT_RDWR)
    fake.wait_idle()


def test_a_signalled_worker_still_accepts(fake: Service) -> None:
    """A process manager signals the whole group; the supervisor decides when workers end."""
    fake.wait_ready()
    serving = workers(fake)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        for pid in serving.values():
            os.kill(pid, number)
    for _ in range(16):  # each connection meets one of them by chance
        assert fake.get("/healthz").status_code == 200
    assert workers(fake) == serving


def test_a_lost_spare_is_replaced(fake: Service) -> None:
    fake.wait_ready()
    serving = workers(fake)
    origin = _parent(serving["http-0"])
    lost = wait_for(lambda: _all_spares(origin, serving), 30, "all spares").pop()
    os.kill(lost, signal.SIGKILL)
    wait_for(lambda: lost not in (_all_spares(origin, serving) or {lost}), 30, "another spare")
    assert workers(fake) == serving


def test_losing_the_fork_server_harms_no_worker(fake: Service) -> None:
    """Streams continue, and replacements come from a new fork server."""
    fake.wait_ready()
    serving = workers(fake)
    origin = _parent(serving["http-0"])
    spares = wait_for(lambda: _all_spares(origin, serving), 30, "all spares")
    body = json.dumps({"contents": ["abc"], "max_tokens": 1_000_000, "chunk_size": 1, "stream": True}).encode()
    with fake.connect() as stream:
        stream.sendall(raw_request(CHAT, body))
        assert stream.recv(65536)
        os.kill(origin, signal.SIGKILL)
        wait_for(lambda: not is_process_alive(origin), 30, "it is lost")
        idle = next(one for one in fake.processes()["http_workers"] if not one["jobs"])
        for lost in (*spares, idle["pid"]):
            os.kill(lost, signal.SIGKILL)
        now = wait_for(lambda: _others(fake, idle["pid"]), 60, "one takes over")
        assert set(now.values()) & set(serving.values())
        for _ in range(100):
            assert stream.recv(65536)
    fake.wait_idle()
    fake.wait_ready()
    assert all(fake.post(CHAT, SHORT).status_code == 200 for _ in range(8))


def test_the_fork_server_may_be_lost_before_its_first_fork(tmp_path: Path) -> None:
    """All its pending forks count as one failure and are retried. These include the batch process."""
    flags = ("--http-workers", "2", "--files-dir", str(tmp_path / "files"))
    service = FreshService(tmp_path, *flags, program="test/fake_app.py", PYTHONPATH=".")
    try:
        origin = wait_for(lambda: _imports(service.process.pid), 30, "it imports")
        time.sleep(0.3)  # it is asked for them, and imports for a second
        os.kill(origin, signal.SIGKILL)
        service.wait_ready()
        assert service.log.read_text().count("an HTTP worker did not start") <= 1
    finally:
        service.close()


def _imports(supervisor: int) -> int | None:
    """Return the process that forks workers, once it exists."""
    return next((one for one, command in children(supervisor).items() if b"forkserver" in command), None)


def _all_spares(origin: int, serving: dict[str, int]) -> set[int] | None:
    spares = set(children(origin)) - set(serving.values())
    return spares if len(spares) == SPARES else None


def _others(service: Service, lost: int) -> dict[str, int] | None:
    now = workers(service)
    return now if len(now) == 2 and lost not in now.values() else None


def _changed(service: Service, before: dict[str, int]) -> bool:
    now = workers(service)
    return set(now) == set(before) and not set(now.values()) & set(before.values())


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def test_sighup_without_a_key_file_ends_nothing(fake: Service) -> None:
    """SIGHUP reloads other services; it must not end this one."""
    before = fake.pids()
    fake.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "start it with --keys-file" in fake.log.read_text(), 20, "the warning about the missing key file")
    assert fake.process.poll() is None and fake.pids() == before


def test_after_the_first_ready_no_worker_refuses_work(fake: Service) -> None:
    fake.wait_ready()
    for _ in range(3):
        noticed = fake.log.read_text().count(NOTICED) + 2
        os.kill(fake.pids()["engine"], signal.SIGKILL)
        wait_for(lambda n=noticed: fake.log.read_text().count(NOTICED) == n, 30, "both workers have noticed the loss")
        wait_ready_once(fake)
        assert [fake.post(CHAT, SHORT).status_code for _ in range(20)] == [200] * 20


class RecordingProcess:
    def __init__(self) -> None:
        self.reported: list[Any] = []

    def send_command(self, what: Any) -> None:
        self.reported.append(what)


def make_workers(is_ready: bool = False) -> HttpWorkers:
    """Those of two sockets, without processes."""
    nothing: Any = None
    return HttpWorkers(nothing, (), num_sockets=2, keys=nothing, engines=nothing, is_ready=is_ready)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The supervisor's clock, in seconds."""
    seconds = [0.0]
    monkeypatch.setattr("programs.serve.http_workers.time", SimpleNamespace(monotonic=lambda: seconds[0]))
    return seconds


def test_ready_needs_a_connected_worker_on_every_socket() -> None:
    workers = make_workers()
    workers.workers = [Worker(child=RecordingProcess(), socket=number) for number in (0, 1, None)]  # type: ignore[arg-type]
    first, second, spare = workers.workers

    def reported() -> list[Any]:
        workers._send_readiness()
        assert first.child.reported == second.child.reported  # type: ignore[attr-defined]
        assert spare.child.reported == []  # type: ignore[attr-defined]
        return list(first.child.reported)  # type: ignore[attr-defined]

    first.serves = second.serves = first.has_engine = True
    assert reported() == [], "the second has no engine yet"
    second.has_engine = True
    assert reported() == reported() == [("all_ready", True)]
    first.serves = False
    assert reported() == [("all_ready", True), ("all_ready", False)]


def test_an_info_call_is_answered_without_the_engine() -> None:
    workers = make_workers()

    class Asks(RecordingProcess):
        def messages(self) -> list[Any]:
            return [("model", ModelCommand(7, is_barrier=True))]

    child: Any = Asks()
    workers._listen(Worker(child=child, socket=0))
    assert child.reported == [("model", 7, None)]


def test_other_workers_hear_of_a_lost_worker_first() -> None:
    workers = make_workers(is_ready=True)
    other = RecordingProcess()

    class Lost(RecordingProcess):
        name, was_forked = "http-0", True

        def reap(self) -> str:
            assert other.reported == [("all_ready", False)]
            return "SIGABRT"

    children: list[Any] = [Lost(), other]
    workers.workers = [Worker(child, True, number, True, True) for number, child in enumerate(children)]
    workers._reap(workers.workers[0])
    assert [worker.child for worker in workers.workers] == [other]


def test_pending_forks_of_a_lost_process_are_one_failed_start(now: list[float]) -> None:
    workers = make_workers()

    class Unforked:
        was_forked = False

        def __init__(self) -> None:
            self.started = now[0]

        def reap(self) -> str:
            now[0] += 10
            return "exit code 255"

    for times in (1, 2):
        now[0] += 1
        workers.workers = [Worker(child=Unforked()) for _ in range(2 + SPARES)]  # type: ignore[arg-type]
        for worker in list(workers.workers):
            workers._reap(worker)
        assert workers.failures == times


def test_only_a_worker_with_a_hanging_event_loop_is_killed(now: list[float]) -> None:
    workers = make_workers()

    class Looked(RecordingProcess):
        name, was_forked, ended = "http-0", True, False

        def __init__(self, answers: bool) -> None:
            super().__init__()
            self.answers, self.words = answers, 0

        def send_command(self, what: Any) -> None:
            super().send_command(what)
            self.words += self.answers

        def messages(self) -> list[Any]:
            words, self.words = self.words, 0
            return [("heartbeat", None)] * words

        def end(self) -> None:
            self.ended = True

        def reap(self) -> str:
            return "SIGKILL; too little memory?"

    hung, healthy, spare = Looked(False), Looked(True), Looked(False)
    children: list[Any] = [hung, healthy, spare]
    workers.workers = [
        Worker(children[0], True, 0, True),
        Worker(children[1], True, 1, True),
        Worker(children[2], True),
    ]

    def looked(seconds: float) -> None:
        until = now[0] + seconds
        while now[0] < until:
            now[0] += 1
            for worker in workers.workers:
                workers._listen(worker)
            workers._check_heartbeats()

    looked(HANG_S - 10)
    now[0] += 10 * HANG_S  # nobody could look: the machine slept
    assert [one.ended for one in children] == [False] * 3
    looked(20)
    assert [one.ended for one in children] == [True, False, False]
    assert hung.reported == ["ping"] and spare.reported == [] and len(healthy.reported) > HANG_S // 10
    assert "did not respond for 120 s" in workers.workers[0].failure_reason


def test_a_hanging_worker_is_replaced(tmp_path: Path) -> None:
    program = "test/programs/serve/impatient_app.py"
    with Service(tmp_path, "--files-dir", "none", "--http-workers", "2", program=program, PYTHONPATH=".") as service:
        before = workers(service)
        os.kill(before["http-0"], signal.SIGSTOP)
        reported = "process http-0 ended (its event loop did not respond for 5 s); a spare replaces it"
        wait_for(lambda: reported in service.log.read_text(), 30, "it is logged")
        service.wait_ready()
        now = workers(service)
        assert now["http-0"] != before["http-0"] and now["http-1"] == before["http-1"]


def test_requests_wait_for_a_restarting_engine(tmp_path: Path) -> None:
    service = Service(tmp_path, "--engine-wait-s", "60", program="test/fake_app.py", PYTHONPATH=".")
    try:
        # Nobody waits for readiness: the engine may not be there yet.
        wait_for(lambda: service.get("/healthz").status_code == 200, 60, "alive")
        assert service.post(CHAT, SHORT).status_code == 200
        os.kill(service.wait_ready().pids()["engine"], signal.SIGKILL)
        wait_for(lambda: service.get("/readyz").status_code == 503, 10, "the loss is noticed")
        assert [service.post(CHAT, SHORT).status_code for _ in range(4)] == [200] * 4
    finally:
        service.close()


def test_when_no_worker_can_start_the_service_ends_with_the_reason(tmp_path: Path) -> None:
    service = Service(tmp_path, program="test/programs/serve/no_http_app.py", PYTHONPATH=".")
    try:
        assert service.process.wait(START_TIMEOUT_S) == 1
        assert "error: no HTTP worker can start: no threads are left" in service.log.read_text()
    finally:
        service.close()
