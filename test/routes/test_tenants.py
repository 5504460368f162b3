"""Two API keys of one service: sessions, dialogues, caches, states and adapters of each, over real HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from test.serving import Service, wait_for

pytestmark = pytest.mark.slow

ANNA, BERT, ROOT, ADMIN = "key-of-anna", "key-of-bert", "key-of-root", "password-of-admin"
FILE = f"""
[[key]]
name = "anna"
key = "{ANNA}"

[[key]]
name = "bert"
key = "{BERT}"

[[key]]
name = "root"
key = "{ROOT}"
admin = true
"""
TURN = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
LONG = "A tenant's own instructions, which no other tenant may guess by their time. " * 6


class Client:
    def __init__(self, service: Service, secret: str) -> None:
        self._service = service
        self._headers = {"Authorization": f"Bearer {secret}"}

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        return self._service.request(method, path, headers=self._headers, **options)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.request("POST", path, json=body)

    def say(self, session_id: str, text: str = "User: hello") -> httpx.Response:
        return self.post("/state/chat/completions", {**TURN, "session_id": session_id, "contents": [text]})

    def branch(self, session_id: str, dialogue: int = 0) -> httpx.Response:
        body = {**TURN, "session_id": session_id, "dialogue_idx": dialogue, "contents": ["User: hello"]}
        return self.post("/multi_state/chat/completions", body)

    def export(self, session_id: str, **query: Any) -> httpx.Response:
        return self.request("GET", "/state/export", params={"session_id": session_id, **query})

    def delete(self, session_id: str, **fields: Any) -> httpx.Response:
        return self.post("/state/delete", {"session_id": session_id, **fields})

    def sessions(self) -> list[tuple[str, int | None, str | None]]:
        """Return (id, dialogue, owner) of each listed session. The counts must agree with them."""
        page = self.post("/state/status", {"limit": 1000}).json()
        tiers = page["l1_cache_count"] + page["l2_cache_count"] + page["database_count"]
        assert page["total_sessions"] == len(page["sessions"]) == tiers
        listed = [(one["session_id"], one["dialogue_idx"], one["owner"]) for one in page["sessions"]]
        return sorted(listed, key=str)

    def clear(self) -> None:
        for name, _, _ in self.sessions():
            self.delete(name)

    def cached_tokens(self, prompt: str, **fields: Any) -> int:
        answer = self.post("/openai/v1/completions", {**TURN, "prompt": prompt, **fields})
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    def translate(self, text: str) -> None:
        body = {"source_lang": "en", "target_lang": "de", "text_list": [text]}
        assert self.post("/translate/v1/batch-translate", body).status_code == 200


Clients = tuple[Client, Client, Client]


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("tenants")
    (folder / "keys.toml").write_text(FILE)
    flags = ("--keys-file", str(folder / "keys.toml"), "--password", ADMIN, "--log-format", "json")
    with Service(folder, "--http-workers", "1", *flags) as service:
        yield service


@pytest.fixture
def clients(keyed: Service) -> Clients:
    """Anna, Bert and the administrator. No sessions are left from other tests."""
    anna, bert, admin = (Client(keyed, secret) for secret in (ANNA, BERT, ADMIN))
    admin.clear()
    return anna, bert, admin


def test_a_key_has_its_own_sessions(keyed: Service, clients: Clients) -> None:
    anna, bert, admin = clients
    first = anna.say("chat").json()
    assert anna.branch("tree").json()["dialogue_idx"] == 1
    assert bert.sessions() == []
    assert bert.export("chat").status_code == bert.export("tree", dialogue_idx=1).status_code == 404
    assert bert.delete("chat").status_code == bert.delete("tree:1").status_code == 404
    assert bert.delete("c", delete_prefix=True).status_code == 404
    refused = bert.branch("tree", 1)
    assert refused.status_code == 404 and "session 'tree' has no dialogue 1" in refused.json()["error"]
    # The same id is a new session.
    assert bert.say("chat").json()["choices"] == first["choices"]
    assert bert.branch("tree").json()["dialogue_idx"] == 1
    assert bert.delete("tree").json()["deleted"] == 1
    assert anna.sessions() == [("chat", None, "anna"), ("tree:1", 1, "anna")]
    assert bert.sessions() == [("chat", None, "bert")]
    listed = [("owner=anna/chat", None, "anna"), ("owner=anna/tree:1", 1, "anna"), ("owner=bert/chat", None, "bert")]
    assert admin.sessions() == Client(keyed, ROOT).sessions() == listed
    assert admin.export("owner=anna/chat").content == anna.export("chat").content
    assert admin.delete("owner=anna/chat").status_code == 200
    assert anna.sessions() == [("tree:1", 1, "anna")]


def test_no_id_reaches_another_key(clients: Clients) -> None:
    anna, bert, _ = clients
    anna.say("chat")
    for name in ("owner=anna/chat", "owner=anna/", "owner=anna", "owner=", "o"):
        assert bert.export(name).status_code == bert.delete(name).status_code == 404
        assert bert.delete(name, delete_prefix=True).status_code == 404
    bert.say("owner=anna/chat")
    assert bert.sessions() == [("owner=anna/chat", None, "bert")]
    assert anna.sessions() == [("chat", None, "anna")]


def test_an_imported_session_belongs_to_the_key(clients: Clients) -> None:
    anna, bert, _ = clients
    anna.say("chat")
    content = anna.export("chat").content
    for _ in range(2):
        answer = bert.request("POST", "/state/import", params={"session_id": "chat"}, content=content)
    assert answer.status_code == 409 and "there is a session 'chat' already" in answer.json()["error"]
    assert bert.sessions() == [("chat", None, "bert")]
    assert bert.say("chat", "User: two").json()["choices"] == anna.say("chat", "User: two").json()["choices"]


def test_sessions_without_an_owner_are_shared(clients: Clients) -> None:
    anna, bert, admin = clients
    admin.say("old")
    admin.branch("tree")
    assert anna.branch("tree", 1).json()["dialogue_idx"] == 2
    anna.say("old", "User: two")
    shared = [("old", None, None), ("tree:1", 1, None), ("tree:2", 2, None)]
    assert anna.sessions() == bert.sessions() == admin.sessions() == shared
    assert bert.export("old").content == anna.export("old").content == admin.export("old").content
    # An own session of that id comes first.
    bert.request("POST", "/state/import", params={"session_id": "old"}, content=bert.export("old").content)
    bert.say("old", "User: three")
    assert bert.sessions() == sorted([("old", None, "bert"), *shared], key=str)
    assert bert.delete("old").json()["deleted"] == 1
    assert anna.delete("tree:1").json()["deleted"] == 1
    assert bert.sessions() == [("old", None, None), ("tree:2", 2, None)]
    # A prefix of shared ids deletes no owner's session.
    anna.say("ours")
    bert.say("only")
    assert bert.delete("o", delete_prefix=True).json()["deleted"] == 2
    assert admin.delete("o", delete_prefix=True).status_code == 404
    assert admin.sessions() == [("owner=anna/ours", None, "anna"), ("tree:2", 2, None)]


def test_a_list_shows_which_entry_is_a_dialogue(clients: Clients) -> None:
    anna, *_ = clients
    anna.branch("fam")
    anna.say("fam:1")
    assert anna.sessions() == [("fam:1", 1, "anna"), ("fam:1", None, "anna")]


def test_a_key_learns_nothing_from_cached_prefixes(clients: Clients) -> None:
    anna, bert, _ = clients
    assert [anna.cached_tokens(LONG) > 0 for _ in range(3)] == [False, False, True]
    assert [bert.cached_tokens(LONG) > 0 for _ in range(3)] == [False, False, True]
    assert [anna.cached_tokens(LONG, cache_salt="user 7") > 0 for _ in range(3)] == [False, False, True]
    assert anna.cached_tokens(LONG) > 0


def translated_rows(service: Service) -> list[int]:
    """Return the number of rows that each translation sent to the engine. The numbers are from the access log."""
    lines = [json.loads(line) for line in service.log.read_text().splitlines() if line.startswith("{")]
    return [line.get("rows", 0) for line in lines if line.get("route") == "/translate/v1/batch-translate"]


def test_a_key_learns_nothing_from_cached_translations(keyed: Service, clients: Clients) -> None:
    anna, bert, _ = clients
    for client in (anna, anna, bert, bert):
        client.translate("Nobody else knows this sentence.")
    wait_for(lambda: len(translated_rows(keyed)) == 4, 30, "four access lines")
    assert translated_rows(keyed) == [1, 0, 1, 0]


def test_lines_of_a_batch_use_the_keys_sessions(clients: Clients) -> None:
    anna, bert, _ = clients
    body = {**TURN, "session_id": "night", "messages": [{"role": "user", "content": "hello"}]}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    file = {"file": ("lines.jsonl", json.dumps(line).encode())}
    uploaded = anna.request("POST", "/openai/v1/files", files=file, data={"purpose": "batch"}).json()
    fields = {"input_file_id": uploaded["id"], "endpoint": line["url"], "completion_window": "24h"}
    batch = anna.post("/openai/v1/batches", fields).json()
    path = f"/openai/v1/batches/{batch['id']}"
    wait_for(lambda: anna.request("GET", path).json()["status"] == "completed", 60, "the batch")
    assert anna.sessions() == [("night", None, "anna")]
    assert bert.sessions() == []


@pytest.mark.parametrize("kind", ["states", "adapters"])
def test_keys_neither_load_nor_remove_shared_files(clients: Clients, kind: str) -> None:
    anna, *_ = clients
    assert anna.post(f"/v1/{kind}", {"name": "mine", "file": "mine.pth"}).status_code == 401
    assert anna.request("DELETE", f"/v1/{kind}/mine").status_code == 401
