"""Clients of bench.chaos with failed answers."""

from __future__ import annotations

import threading

import httpx
import pytest

from bench.chaos.reloads import Administrator, Files
from bench.chaos.service import Disturbances
from bench.chaos.traffic import Client, Conversation, Findings, Turn, send_turn


def client_with_answer(status: int, body: object) -> httpx.Client:
    return httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(status, json=body)))


@pytest.mark.parametrize("status", [200, 503])
def test_a_failed_turn_has_no_text_with_any_status(status: int) -> None:
    """A late failure follows a status 200."""
    turn = Turn("User: a\n\nAssistant:", 1)
    with pytest.raises(httpx.HTTPStatusError) as failed:
        send_turn(
            client_with_answer(status, {"error": "the engine was lost"}),
            "http://t",
            Conversation("s", False),
            turn,
            "s",
        )
    assert failed.value.response.status_code == status
    assert turn.text is None


def test_a_failing_client_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a client could stop unnoticed."""

    def breaks(client: object) -> None:
        raise KeyError("usage")

    findings, gate = Findings(), threading.Event()
    gate.set()
    client = Client("http://t", 0, Disturbances("http://t"), findings, gate)
    monkeypatch.setattr(client, "_one", breaks)
    with pytest.raises(KeyError):
        client.run()
    assert findings.unexplained == ["client: ended KeyError('usage')"]
    assert client.is_waiting.is_set()


@pytest.mark.parametrize(("status", "num_requests"), [("ready", 3), ("loading", 1), ("failed", 1)])
def test_a_model_is_used_when_it_is_ready(status: str, num_requests: int) -> None:
    """A slow machine answers 200 with `loading` after the time that the request waits."""
    paths: list[str] = []
    findings = Findings()

    def answer(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.path)
        return httpx.Response(200, json={"status": status})

    files: Files = object.__new__(Files)  # no models on the disk
    administrator = Administrator(
        "http://t", 0, Disturbances("http://t"), findings, threading.Event(), supervisor=0, files=files
    )
    administrator._reload_model(httpx.Client(base_url="http://t", transport=httpx.MockTransport(answer)))
    assert len(paths) == num_requests and len(findings.unexplained) == (status == "failed")
