"""A key that is removed from the keys file: its requests, streams and batches end with a reason."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from test.routes.conftest import bearer, openai_client
from test.serving import Service, read_all, sse_data, wait_for

pytestmark = pytest.mark.slow

NATIVE, OPENAI = "/v1/chat/completions", "/openai/v1/chat/completions"
STAYS, LEAVES, OTHER, BOSS = (f"sk-{name}-0123456789" for name in ("stays", "leaves", "another", "boss"))
ENDLESS: dict[str, Any] = {"contents": ["abc"], "max_tokens": 1_000_000, "chunk_size": 1}
CONVERSATION = {"model": "rwkv7", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1_000_000}


class KeyedService(Service):
    def set_keys(self, **keys: str) -> None:
        """Write the keys file, and wait until every HTTP worker has it."""
        self.keys_file.write_text(keys_text(keys))
        self.process.send_signal(signal.SIGHUP)
        wait_for(lambda: all(self._knows(key) for key in keys.values() for _ in range(20)), 30, "the keys are in force")

    def _knows(self, key: str) -> bool:
        return self.request("GET", "/status", headers=bearer(key)).status_code == 200

    @property
    def keys_file(self) -> Path:
        return self.log.parent / "keys.toml"


def keys_text(keys: dict[str, str]) -> str:
    """Return a keys file with these keys and the administrator's. The key `chief` has admin rights too."""
    tables = [f'[[key]]\nname = "{name}"\nkey = "{key}"\n' for name, key in {**keys, "boss": BOSS}.items()]
    return "".join(f"{table}admin = true\n" if '"boss"' in table or '"chief"' in table else table for table in tables)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedService]:
    folder = tmp_path_factory.mktemp("keyed")
    file = folder / "keys.toml"
    file.write_text(keys_text({"stays": STAYS}))
    flags = ("--http-workers", "2", "--keys-file", str(file))
    with KeyedService(folder, *flags, program="test/fake_app.py", PYTHONPATH=".") as running:
        running.headers, running.admin_headers = bearer(STAYS), bearer(BOSS)
        yield running


def begun(service: Service, path: str, body: dict[str, Any], key: str) -> socket.socket:
    connection = service.sent(path, {**body, "stream": True}, bearer(key))
    assert connection.recv(12) == b"HTTP/1.1 200"
    return connection


def last_event(connection: socket.socket) -> Any:
    """Read a stream to its end. Return its last event, which a [DONE] follows."""
    lines = read_all(connection).decode().splitlines()
    return sse_data("\n".join(line for line in lines if line.startswith("data: ")))[-1]


def test_answers_of_a_removed_key_end_with_a_reason(keyed: KeyedService) -> None:
    keyed.set_keys(stays=STAYS, leaves=LEAVES)
    with (
        ThreadPoolExecutor(2) as pool,
        begun(keyed, NATIVE, ENDLESS, LEAVES) as native,
        begun(keyed, OPENAI, CONVERSATION, LEAVES) as openais,
        begun(keyed, NATIVE, {**ENDLESS, "contents": ["xyz"]}, STAYS) as stays,
    ):
        full = pool.submit(keyed.post, NATIVE, ENDLESS, headers=bearer(LEAVES))
        full_openai = pool.submit(keyed.post, OPENAI, CONVERSATION, headers=bearer(LEAVES))
        wait_for(lambda: keyed.status()["running_rows"] == 5, 20, "all run")
        keyed.set_keys(stays=STAYS)
        assert "removed from --keys-file" in last_event(native)["error"]
        error = last_event(openais)["error"]
        assert "removed from --keys-file" in error["message"] and error["code"] == "invalid_api_key"
        for answer in (full.result(), full_openai.result()):
            assert answer.status_code == 401 and "removed from --keys-file" in answer.text
        wait_for(lambda: keyed.status()["running_rows"] == 1, 20, "only the other key's row runs")
        received = b""
        while received.count(b"xyz") < 3:
            received += stays.recv(65536)
    keyed.wait_idle()


def test_a_key_with_another_secret_ends_streams_and_keeps_batches(keyed: KeyedService) -> None:
    """The old secret may be known to a stranger. The batch belongs to the name."""
    keyed.set_keys(stays=STAYS, leaves=LEAVES)
    batch_id = endless_batch(keyed, LEAVES)
    with begun(keyed, NATIVE, ENDLESS, LEAVES) as stream:
        wait_for(lambda: keyed.status()["running_rows"] == 2, 20, "both run")
        keyed.set_keys(stays=STAYS, leaves=OTHER)
        assert "removed from --keys-file" in last_event(stream)["error"]
    wait_for(lambda: keyed.status()["running_rows"] == 1, 20, "the batch's row runs")
    assert batch_of(keyed, OTHER, batch_id)["status"] == "in_progress"
    keyed.post(f"/openai/v1/batches/{batch_id}/cancel", {}, headers=bearer(OTHER))
    keyed.wait_idle()


@pytest.mark.parametrize("name", ["leaves", "chief"])
def test_a_batch_of_a_removed_key_fails_with_the_reason(keyed: KeyedService, name: str) -> None:
    keyed.set_keys(stays=STAYS, **{name: LEAVES})
    batch_id = endless_batch(keyed, LEAVES)
    wait_for(lambda: batch_of(keyed, LEAVES, batch_id)["request_counts"]["completed"] == 1, 30, "one line is answered")
    keyed.set_keys(stays=STAYS)
    wait_for(lambda: batch_of(keyed, BOSS, batch_id)["status"] == "failed", 30, "it ends")
    keyed.wait_idle()
    batch = batch_of(keyed, BOSS, batch_id)
    assert batch["status"] == "failed" and batch["output_file_id"]
    assert batch["errors"]["data"][0]["code"] == "api_key_removed"
    assert f"{name} was removed from --keys-file" in batch["errors"]["data"][0]["message"]


def endless_batch(service: Service, key: str) -> str:
    client = openai_client(service, key=key)
    bodies = [{"contents": ["n"], "max_tokens": 1}, ENDLESS]
    lines = [{"custom_id": str(i), "method": "POST", "url": NATIVE, "body": body} for i, body in enumerate(bodies)]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=NATIVE, completion_window="24h").id


def batch_of(service: Service, key: str, batch_id: str) -> dict[str, Any]:
    answer = httpx.get(f"{service.url}/openai/v1/batches/{batch_id}", headers=bearer(key))
    answer.raise_for_status()
    batch: dict[str, Any] = answer.json()
    return batch
