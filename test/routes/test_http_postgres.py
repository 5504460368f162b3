"""Two services, as on two machines, with sessions in one PostgreSQL database."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from test.postgres import Server, unavailable_reason
from test.serving import Service

TURN = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}

pytestmark = pytest.mark.cluster


@pytest.fixture
def server() -> Iterator[Server]:
    if (why := unavailable_reason()) is not None:
        pytest.skip(why)
    started = Server()
    yield started
    started.close()


def say(service: Service, session_id: str, text: str) -> str:
    answer = service.post("/state/chat/completions", {**TURN, "session_id": session_id, "contents": [text]})
    answer.raise_for_status()
    content: str = answer.json()["choices"][0]["message"]["content"]
    return content


def sessions(service: Service) -> dict[str, str]:
    prompt_functions = service.post("/state/status", {}).json()
    return {entry["session_id"]: entry["cache_level"] for entry in prompt_functions["sessions"]}


def test_a_session_continues_on_another_service(tmp_path: Path, tiny_model: Path, server: Server) -> None:
    address = server.database()
    options = ("--model-path", str(tiny_model), "--http-workers", "1", "--files-dir", "none")
    services = [Service(tmp_path, *options, state_db=address) for _ in range(2)]
    try:
        one, two = (service.wait_ready() for service in services)
        reported = [say(service, "moves", f"User: {n}\n\nAssistant:") for n, service in enumerate([one, two, one, two])]
        alone = [say(one, "stays", f"User: {n}\n\nAssistant:") for n in range(4)]
        assert reported == alone
        assert sessions(one).keys() == sessions(two).keys() == {"moves", "stays"}
        server.kill()
        with ThreadPoolExecutor() as pool:  # sessions wait, other requests do not
            waits = pool.submit(say, two, "moves", "User: 5\n\nAssistant:")
            assert one.post("/v1/chat/completions", {**TURN, "contents": ["User: 1"]}).status_code == 200
            assert not waits.done()
            server.start()
            assert waits.result() == say(one, "stays", "User: 5\n\nAssistant:")
        assert one.post("/state/delete", {"session_id": "moves"}).status_code == 200
        assert sessions(two).keys() == {"stays"}
        assert "secret" not in one.log.read_text() + one.get("/status").text
    finally:
        for service in services:
            service.close()
