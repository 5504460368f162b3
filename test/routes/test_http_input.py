"""Invalid input and faulty clients over HTTP: each gets an answer, and others notice nothing."""

from __future__ import annotations

import gzip
import json
import socket
from typing import Any

import httpx
import pytest

from test.serving import Service, raw_request, read_all, wait_for

CHAT = "/v1/chat/completions"
OK: dict[str, Any] = {"contents": ["a"], "max_tokens": 1}
ENDLESS: dict[str, Any] = {"contents": ["a"], "max_tokens": 1_000_000, "ignore_eos": True, "stop_tokens": []}

FIELDS: list[tuple[dict[str, Any], str, Any]] = [
    ({"temperature": -1}, "temperature", -1),
    ({"temperature": 1e9}, "temperature", 1e9),
    ({"temperature": "hot"}, "temperature", "hot"),
    ({"top_k": 2.5}, "top_k", 2.5),
    ({"top_k": 10**30}, "top_k", str(10**30)),
    ({"top_p": 1.5}, "top_p", 1.5),
    ({"alpha_decay": 2}, "alpha_decay", 2),
    ({"max_tokens": 0}, "max_tokens", 0),
    ({"max_tokens": True}, "max_tokens", True),
    ({"max_tokens": 2_000_000}, "max_tokens", 2_000_000),
    ({"seed": -1}, "seed", -1),
    ({"seed": 2**64}, "seed", str(2**64)),
    ({"chunk_size": 0}, "chunk_size", 0),
    ({"stream": "yes"}, "stream", "yes"),
    ({"timeout_s": 0}, "timeout_s", 0),
    ({"stop_tokens": [0, 65536]}, "stop_tokens[1]", 65536),
    ({"stop_tokens": [True]}, "stop_tokens[0]", True),
    ({"stop_tokens": ["x" * 300]}, "stop_tokens[0]", None),
    ({"stop_tokens": "User"}, "stop_tokens", "User"),
    ({"contents": []}, "contents", None),
    ({"contents": "a"}, "contents", "a"),
    ({"contents": ["a", ""]}, "contents[1]", ""),
    ({"contents": ["a"] * 10_000}, "contents", 10_000),
    ({"contents": None, "messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role", "wizard"),
]


@pytest.mark.parametrize(("change", "field", "given"), FIELDS, ids=[f"{n}-{case[1]}" for n, case in enumerate(FIELDS)])
def test_an_invalid_field_is_named_with_its_value(
    service: Service, change: dict[str, Any], field: str, given: Any
) -> None:
    answer = service.post(CHAT, {**OK, **change})
    body = answer.json()
    assert answer.status_code == 422, body
    assert body["field"] == field
    assert field.split("[", maxsplit=1)[0] in body["error"]
    if given is not None:
        assert body["given"] == given
        assert (given if isinstance(given, str) else json.dumps(given)) in body["error"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_invalid_numbers_are_refused(service: Service, number: str) -> None:
    answer = service.post(CHAT, content=f'{{"contents": ["a"], "temperature": {number}}}')
    assert answer.status_code == 422
    assert answer.json()["field"] == "temperature"


@pytest.mark.parametrize("body", [b"", b"{", b"hello", b'{"contents": ["a"]', b"\xff\xfe", b"[" * 100_000])
def test_invalid_json_is_400(service: Service, body: bytes) -> None:
    answer = service.post(CHAT, content=body)
    assert answer.status_code == 400
    assert "JSON" in answer.json()["error"]


@pytest.mark.parametrize("body", [[], "a", 7, None, True])
def test_json_that_is_not_an_object_is_422(service: Service, body: Any) -> None:
    answer = service.post(CHAT, content=json.dumps(body))
    assert answer.status_code == 422
    assert answer.json()["field"] == "body"


def test_a_prompt_with_too_many_tokens_is_refused(service: Service) -> None:
    answer = service.post(CHAT, {**OK, "contents": ["ok", "\x00" * 300_000]})
    assert answer.status_code == 422
    assert answer.json()["field"] == "contents[1]"
    assert "262144" in answer.json()["error"]


def test_a_body_over_the_limit_is_413(service: Service) -> None:
    answer = service.post(CHAT, content=b'{"contents": ["' + b"a" * 50_000_000 + b'"]}')
    assert answer.status_code == 413
    assert "--max-body-mb" in answer.json()["error"]


def test_half_a_body_is_400(service: Service) -> None:
    with service.connect() as connection:
        connection.sendall(raw_request(CHAT, json.dumps(OK).encode(), length=1000))
        connection.shutdown(socket.SHUT_WR)
        answer = read_all(connection)
    # The HTTP library may drop the connection without an answer. The status must not be 200.
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400")
    assert service.post(CHAT, OK).status_code == 200


def test_a_form_is_refused_in_favour_of_json(service: Service) -> None:
    """Robyn parses it before us. So its length is not that of the body."""
    answer = service.request("POST", CHAT, files={"file": ("name", b"content")}, data=OK)
    assert answer.status_code == 400
    assert "multipart/form-data" in answer.json()["error"] and "JSON" in answer.json()["error"]


FORM = {"Content-Type": "multipart/form-data; boundary=x"}
PART = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nabc'


@pytest.mark.parametrize(
    ("content", "headers", "reason"),
    [
        (b"", FORM, "incomplete"),
        (PART, FORM, "incomplete"),
        (b"--x\r\nno header\r\n\r\nabc\r\n--x--", FORM, "Header"),
        (PART + b"\r\n--x--", {"Content-Type": "multipart/form-data"}, "boundary is not found"),
        (PART + b"\r\n--x--", {"Content-Type": "Multipart/Form-Data; boundary=x"}, "small letters"),
    ],
)
def test_a_broken_form_is_400_with_the_reason(
    service: Service, content: bytes, headers: dict[str, str], reason: str
) -> None:
    """Robyn's own answer is 500 without a reason."""
    answer = service.post("/v1/states", content=content, headers=headers)
    assert answer.status_code == 400 and reason in answer.json()["error"], answer.text
    answer = service.post("/openai/v1/files", content=content, headers=headers)
    assert answer.status_code == 400 and reason in answer.json()["error"]["message"], answer.text


def test_a_broken_form_is_refused_while_another_is_sent(service: Service) -> None:
    with service.connect() as other:
        other.sendall(b"POST /openai/v1/files HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\n1")
        assert service.post("/openai/v1/files", content=PART, headers=FORM).status_code in (400, 500)
        other.settimeout(0.05)
        with pytest.raises(TimeoutError):
            other.recv(1)


def test_the_broken_form_of_a_client_that_left_harms_no_other(service: Service) -> None:
    with service.connect() as other, service.connect() as culprit:
        other.sendall(b"POST /openai/v1/files HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\n1")
        head = f"POST /openai/v1/files HTTP/1.1\r\nHost: h\r\nContent-Type: {FORM['Content-Type']}\r\n"
        culprit.sendall(f"{head}Content-Length: {len(PART)}\r\n\r\n".encode() + PART)
        culprit.shutdown(socket.SHUT_WR)
        read_all(culprit)
        other.settimeout(0.05)
        with pytest.raises(TimeoutError):
            other.recv(1)


def test_compressed_bodies_have_a_clear_error(service: Service) -> None:
    packed = gzip.compress(json.dumps(OK).encode())
    answer = service.post(CHAT, content=packed, headers={"Content-Encoding": "gzip"})
    assert answer.status_code == 400
    assert "Content-Encoding gzip: send it uncompressed" in answer.json()["error"]


def test_unknown_paths_and_wrong_methods(service: Service) -> None:
    assert service.get("/nowhere").status_code == 404
    assert service.get("/").status_code in (200, 404)
    assert "/nowhere" in service.post("/nowhere/deep", {}).json()["error"]
    for path in ("/v1/files", "/v1/files/file-1", "/v1/embeddings", "/v1/batches"):
        assert f"it is /openai{path} here" in service.get(path).json()["error"]["message"]
    assert "it is /openai/v1/models/rwkv7 here" in service.get("/models/rwkv7").json()["error"]["message"]
    refused = service.post("/openai/chat/completions", {})
    assert "it is /openai/v1/chat/completions here" in refused.json()["error"]["message"]
    for method in ("GET", "PUT", "DELETE", "PATCH"):
        answer = service.request(method, CHAT)
        assert answer.status_code == 405
        assert answer.headers["allow"] == "OPTIONS, POST"
        assert "error" in answer.json()

    def listed() -> set[tuple[str, str]]:
        entries = service.get("/v1/requests").json()["requests"]
        return {(entry["method"], entry["route"]) for entry in entries if entry["status"] == 405}

    wait_for(lambda: listed() >= {("GET", CHAT), ("PATCH", CHAT)}, 20, "both are reported")
    assert service.post("/v1/models", {}).status_code == 405
    assert service.post("/v1/models/rwkv7", {}).status_code == 405
    assert service.request("HEAD", "/healthz").status_code == 200


def test_differently_spelt_paths_are_404(service: Service) -> None:
    for target in ("/%2f", "/stat%75s%2f"):
        with service.connect() as connection:
            connection.sendall(f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            assert read_all(connection).startswith(b"HTTP/1.1 404"), target


def test_translate_refuses_invalid_fields(service: Service) -> None:
    path = "/translate/v1/batch-translate"
    assert service.post(path, {"text_list": ["a"]}).json()["field"] == "target_lang"
    assert service.post(path, {"target_lang": "de", "text_list": [3]}).json()["field"] == "text_list[0]"
    assert service.post(path, {"target_lang": "de", "text_list": ["a"] * 5000}).json()["given"] == 5000
    assert service.post(path, {"target_lang": "de", "text_list": []}).json() == {"translations": []}
    for field, given in (
        ("target_lang", ""), ("target_lang", " "), ("target_lang", "de\n"), ("target_lang", "German\nUser"),
        ("target_lang", "auto"), ("target_lang", "AUTO"), ("source_lang", "\t"), ("source_lang", "en\r\nzh"),
    ):  # fmt: skip
        refused = service.post(path, {"target_lang": "de", "text_list": ["a"], field: given})
        assert refused.status_code == 422
        assert (refused.json()["field"], refused.json()["given"]) == (field, given)
        assert refused.json()["error"].startswith(f"{field}: must ")


def open_streams(service: Service, count: int, body: dict[str, Any]) -> list[socket.socket]:
    """Open streams and read each until its answer begins."""
    connections = [service.sent(CHAT, {**body, "stream": True}) for _ in range(count)]
    for connection in connections:
        assert connection.recv(12) == b"HTTP/1.1 200", connection.recv(1000)
    return connections


def test_500_disconnects_mid_stream_free_every_slot(service: Service) -> None:
    before = service.wait_idle()["free_slots"]
    for connection in open_streams(service, 500, ENDLESS):
        connection.close()
    status = service.wait_idle(60)
    assert status["free_slots"] == before
    wait_for(
        lambda: all(worker["jobs"] == 0 for worker in service.status()["processes"]["http_workers"]), 10, "no jobs"
    )


def test_a_disconnect_without_a_stream_frees_the_rows(service: Service) -> None:
    service.wait_idle()
    connection = service.sent(CHAT, {**ENDLESS, "contents": ["a"] * 8})
    wait_for(lambda: service.status()["running_rows"] == 8, 30, "8 rows run")
    connection.close()
    service.wait_idle(20)


def test_a_full_queue_is_429_with_retry_after(service: Service) -> None:
    connections = [service.sent(CHAT, {**ENDLESS, "contents": ["a"] * 4096, "stream": True}) for _ in range(4)]
    try:
        wait_for(
            lambda: service.status()["waiting_rows"] > 2048, 60, "more than fits together with another such request"
        )
        refused = wait_for(lambda: _refused(service), 30, "a refusal")
        assert int(refused.headers["retry-after"]) >= 1
        assert "6144 for one client (max_waiting_rows_per_client)" in refused.json()["error"]
    finally:
        for connection in connections:
            connection.close()
    service.wait_idle(60)
    assert service.post(CHAT, OK).status_code == 200


def _refused(service: Service) -> httpx.Response | None:
    answer = service.post(CHAT, {**OK, "contents": ["a"] * 4096, "timeout_s": 0.1})
    return answer if answer.status_code == 429 else None


def test_an_interactive_request_runs_next_to_many_streams(service: Service) -> None:
    connections = open_streams(service, 100, ENDLESS)
    try:
        assert service.post(CHAT, {**OK, "max_tokens": 4}).status_code == 200
        assert service.status()["running_rows"] == 100, "it waited for none of them"
    finally:
        for connection in connections:
            connection.close()
    service.wait_idle(60)
