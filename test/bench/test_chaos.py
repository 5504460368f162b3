"""What the clients of bench.chaos do when an answer is none."""

from __future__ import annotations

import threading

import httpx
import pytest

from bench.chaos.crash import Conversation, Turn, ask
from bench.chaos.disturbances import Disturbances
from bench.chaos.traffic import Client, Findings


def answered(status: int, body: object) -> httpx.Client:
    return httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(status, json=body)))


@pytest.mark.parametrize("status", [200, 503])
def test_a_turn_that_failed_has_no_text_whatever_its_status(status: int) -> None:
    """A failure that comes late comes behind a status 200."""
    turn = Turn("User: a\n\nAssistant:", 1)
    with pytest.raises(httpx.HTTPStatusError) as failed:
        ask(answered(status, {"error": "the engine was lost"}), "http://t", Conversation("s", False), turn, "s")
    assert failed.value.response.status_code == status
    assert turn.text is None


def test_a_client_that_breaks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one client fewer, and no word of it, the rest would be taken for all."""

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
