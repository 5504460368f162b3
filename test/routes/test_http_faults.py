"""Faults that a healthy engine does not have: stalled readers, and jobs and threads that fail mid-stream."""

from __future__ import annotations

import json
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from test.serving import REQUEST_TIMEOUT_S, Service, raw_request, read_all, sse_data, wait_for

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
STATE = "/state/chat/completions"
ENDLESS: dict[str, Any] = {"max_tokens": 1_000_000, "stream": True, "chunk_size": 1}


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with an engine without a model. Its one HTTP worker writes at most 5 answers at a time."""
    flags = ("--max-streams", "5", "--max-streams-per-client", "3", "--max-body-mb", "0.01", "--resubmit", "0")
    with one_worker(tmp_path_factory.mktemp("fake"), *flags) as running:
        yield running


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The same with a stall timeout of one second."""
    with one_worker(tmp_path_factory.mktemp("impatient"), "--stall-timeout-s", "1", "--max-streams", "5") as running:
        yield running


@contextmanager
def one_worker(folder: Path, *flags: str) -> Iterator[Service]:
    flags = ("--http-workers", "1", "--trusted-proxies", "127.0.0.1", *flags)
    with Service(folder, *flags, program="test/fake_app.py", PYTHONPATH=".") as running:
        yield running


def running_rows(service: Service) -> int:
    return int(service.status()["running_rows"])


def test_stalled_clients_are_disconnected_and_uncounted(impatient: Service) -> None:
    body = {**ENDLESS, "contents": ["flood"]}
    connections = [impatient.sent(CHAT, body, {"X-Forwarded-For": f"10.0.1.{number}"}) for number in range(5)]
    try:
        assert [connection.recv(12) for connection in connections] == [b"HTTP/1.1 200"] * 5
        # The clients keep their connections open: only the missing reads end them.
        wait_for(lambda: running_rows(impatient) == 0, 30, "the rows are cancelled")
        asked = {"contents": ["a"], "max_tokens": 1}
        wait_for(lambda: impatient.post(CHAT, asked).status_code == 200, 30, "a place is free")
    finally:
        for connection in connections:
            connection.close()


def test_a_slow_reader_gets_the_whole_answer(impatient: Service) -> None:
    received = b""
    with impatient.sent(CHAT, {**ENDLESS, "contents": ["xyz"], "max_tokens": 300}) as connection:
        while piece := connection.recv(400):
            received += piece
            time.sleep(0.02)
    assert received.count(b"xyz") == 300  # letters that occur in no identifier and no hexadecimal length
    assert b"[DONE]" in received


def test_a_job_that_fails_mid_stream_ends_with_an_error_event(fake: Service) -> None:
    events = sse_data(fake.post(CHAT, {**ENDLESS, "contents": ["break it"]}).text)
    assert events[0]["choices"][0]["delta"]["content"] == "break it"
    assert events[-1]["error"] == "broken on demand"


def test_a_job_that_fails_before_any_output_is_500(fake: Service) -> None:
    answer = fake.post(CHAT, {**ENDLESS, "contents": ["break it"], "stream": False})
    assert (answer.status_code, answer.json()["error"]) == (500, "broken on demand")


@contextmanager
def streams(service: Service, clients: list[str]) -> Iterator[None]:
    """One endless stream per client, identified by a trusted proxy's header."""
    body = {**ENDLESS, "contents": ["abc"]}
    connections = [service.sent(CHAT, body, {"X-Forwarded-For": client}) for client in clients]
    try:
        wait_for(lambda: running_rows(service) == len(clients), 10, "all streams run")
        yield
    finally:
        for connection in connections:
            connection.close()
    wait_for(lambda: running_rows(service) == 0, 10, "all streams are gone")


def test_answers_above_the_limit_are_429(fake: Service) -> None:
    with streams(fake, [f"10.0.0.{number}" for number in range(5)]):
        refused = fake.post(CHAT, {"contents": ["a"]})
        assert refused.status_code == 429
        assert "--max-streams)" in refused.json()["error"]
        assert int(refused.headers["retry-after"]) >= 1
        assert fake.get("/readyz").status_code == 200


def test_answers_above_the_limit_per_client_are_429_for_that_client(fake: Service) -> None:
    with streams(fake, ["10.0.0.1"] * 3):
        refused = fake.post(CHAT, {"contents": ["a"]}, headers={"X-Forwarded-For": "6.6.6.6, 10.0.0.1"})
        assert refused.status_code == 429
        assert "10.0.0.1" in refused.json()["error"]
        assert "--max-streams-per-client" in refused.json()["error"]
        other = fake.post(CHAT, {"contents": ["a"], "max_tokens": 1}, headers={"X-Forwarded-For": "10.0.0.2"})
        assert other.status_code == 200


def test_the_body_limit_is_a_flag(fake: Service) -> None:
    answer = fake.post(CHAT, {"contents": ["a" * 11_000]})
    assert answer.status_code == 413
    assert str(int(0.01 * 1024 * 1024)) in answer.json()["error"]


def test_an_engine_thread_that_dies_is_replaced(fake: Service) -> None:
    before = fake.pids()["engine"]
    turn = {**ENDLESS, "contents": ["abc"], "session_id": "s"}
    with fake.stream(CHAT, {**ENDLESS, "contents": ["abc"]}) as plain, fake.stream(STATE, turn) as session:
        lines, turn_lines = plain.iter_lines(), session.iter_lines()
        assert "abc" in next(line for line in lines if line.startswith("data:"))
        assert "abc" in next(line for line in turn_lines if line.startswith("data:"))
        fake.post(CHAT, {"contents": ["die now"], "stream": True}, timeout=30)
        rest = [line for line in lines if line.startswith("data:")]
        rest_of_turn = [line for line in turn_lines if line.startswith("data:")]
    assert "the engine process was lost" in rest[-2] and "send the request again" in rest[-2]
    assert "the engine process was lost" in rest_of_turn[-2] and "may have been kept" in rest_of_turn[-2]
    assert rest[-1] == rest_of_turn[-1] == "data: [DONE]"
    wait_for(lambda: fake.get("/readyz").status_code == 200, 30, "ready again")
    wait_for(lambda: fake.pids()["engine"] != before, 30, "a new engine")
    assert fake.post(CHAT, {"contents": ["abc"], "max_tokens": 1}).json()["choices"][0]["message"]["content"] == "abc"


def test_an_engine_that_hangs_is_replaced(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Its thread lives but its loop hangs: only the watchdog can detect it."""
    flags = ("--http-workers", "1", "--step-timeout-s", "1.5", "--resubmit", "0")
    with Service(tmp_path_factory.mktemp("hang"), *flags, program="test/fake_app.py", PYTHONPATH=".") as hanging:
        before = hanging.pids()["engine"]
        lost = hanging.post(CHAT, {**ENDLESS, "contents": ["hang now"]}, timeout=30)
        assert "the engine process was lost" in lost.text
        wait_for(lambda: hanging.pids()["engine"] != before, 30, "a new engine")
        assert "has hung for 1.5 s (step_timeout_s)" in hanging.log.read_text()
        assert hanging.post(CHAT, {"contents": ["abc"], "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_early_error_has_its_status(fake: Service, stream: bool) -> None:
    session = {"session_id": "fails"} if stream else {}
    answer = fake.post(CHAT, {"contents": ["fail@3 then"], "max_tokens": 5, "stream": stream, **session})
    assert (answer.status_code, answer.json()["error"]) == (500, "broken on demand")
    assert answer.json()["request_id"] == answer.headers["x-request-id"]
    wait_for(lambda: running_rows(fake) == 0, 10, "nothing is left")


def test_a_late_error_is_in_the_stream(fake: Service) -> None:
    with fake.stream(CHAT, {"contents": ["held until"], "max_tokens": 5, "stream": True}) as answer:
        pieces = answer.iter_text()
        text = next(pieces)
        fake.post(CHAT, {"contents": ["release"], "max_tokens": 1})
        text += "".join(pieces)
    assert answer.status_code == 200
    error = sse_data(text)[-1]
    assert (error["error"], error["request_id"]) == ("broken on demand", answer.headers["x-request-id"])
    assert text.startswith(": hb")


def test_the_status_waits_for_the_result_and_clients_that_leave_are_noticed(fake: Service) -> None:
    """Without a stream. The connections are kept alive from an earlier request."""
    body = json.dumps({"contents": ["held"], "max_tokens": 5}).encode()
    half_closed, closed, reset, waiting = connections = [fake.connect() for _ in range(4)]
    for number, connection in enumerate(connections):
        client = f"X-Forwarded-For: 10.0.2.{number}"
        connection.sendall(f"GET /healthz HTTP/1.1\r\nHost: t\r\n{client}\r\n\r\n".encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        connection.sendall(raw_request(CHAT, body, extra=f"{client}\r\n"))
    wait_for(lambda: running_rows(fake) == 4, 10, "they run")
    half_closed.shutdown(socket.SHUT_WR)
    wait_for(lambda: running_rows(fake) == 3, 10, "the first is cancelled")
    closed.close()
    wait_for(lambda: running_rows(fake) == 2, 10, "the second is cancelled")
    reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    reset.close()
    wait_for(lambda: running_rows(fake) == 1, 10, "the third is cancelled")
    waiting.settimeout(3)
    with pytest.raises(TimeoutError):
        waiting.recv(1)
    assert running_rows(fake) == 1
    fake.post(CHAT, {"contents": ["release"], "max_tokens": 1})
    waiting.settimeout(REQUEST_TIMEOUT_S)
    head, _, answer = read_all(waiting).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 500") and json.loads(answer)["error"] == "broken on demand"
    half_closed.close()
    waiting.close()


def test_a_worker_without_a_free_descriptor_keeps_serving(fake: Service) -> None:
    """Clients may hold all of them."""
    before = fake.pids()
    limits = resource.prlimit(before["http-0"], resource.RLIMIT_NOFILE)
    with httpx.Client(base_url=fake.url) as client, fake.sent(CHAT, {"contents": ["held"], "max_tokens": 5}) as leaving:
        wait_for(lambda: client.get("/status").json()["running_rows"] == 1, 10, "it runs")
        resource.prlimit(before["http-0"], resource.RLIMIT_NOFILE, (1, limits[1]))
        try:
            leaving.shutdown(socket.SHUT_RDWR)
            wait_for(lambda: client.get("/status").json()["running_rows"] == 0, 10, "housekeeping cancels it")
        finally:
            resource.prlimit(before["http-0"], resource.RLIMIT_NOFILE, limits)
    assert fake.pids() == before


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_lost_before_the_first_token_gives_an_error(fake: Service, stream: bool) -> None:
    """Other clients get the error too."""
    wait_for(lambda: fake.get("/readyz").status_code == 200, 30, "ready")
    answers: list[Any] = []
    session = {"session_id": "is lost"} if stream else {}
    body = {"contents": ["held"], "max_tokens": 5, "stream": stream, **session}
    waiting = threading.Thread(target=lambda: answers.append(fake.post(CHAT, body)))
    waiting.start()
    wait_for(lambda: running_rows(fake) == 1, 10, "it runs")
    dying = fake.post(CHAT, {**body, "contents": ["die now"], "session_id": "dies" if stream else None})
    waiting.join()
    assert dying.status_code == 503 and answers[0].status_code in ((200, 503) if stream else (503,))
    assert all("the engine process was lost" in answer.text for answer in (dying, answers[0]))
    assert dying.headers.get("x-should-retry") == ("false" if stream else None)
    wait_for(lambda: fake.get("/readyz").status_code == 200, 30, "ready again")


def test_a_disconnect_before_the_status_is_detected(fake: Service) -> None:
    connection = fake.sent(CHAT, {"contents": ["held"], "stream": True})
    wait_for(lambda: running_rows(fake) == 1, 10, "it runs")
    connection.close()
    wait_for(lambda: running_rows(fake) == 0, 20, "it is cancelled")


def test_complete_and_refused_answers_are_uncounted(fake: Service) -> None:
    for _ in range(8):
        assert fake.post(CHAT, {"contents": ["a"], "max_tokens": 1}).status_code == 200
        assert fake.post(CHAT, {"contents": []}).status_code == 422
        assert fake.get("/nowhere").status_code == 404
    assert fake.post(CHAT, {"contents": ["a"], "max_tokens": 2, "stream": True}).status_code == 200
