"""Sessions over HTTP: stored, branched, deleted, interleaved; each as if it ran alone.

RWKV_LONG_TESTS=1 interleaves 300 sessions instead of 40.
"""

from __future__ import annotations

import os
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rwkv_batch.tokenizer import Tokenizer
from test.serving import REQUEST_TIMEOUT_S, Service, row_texts, sse_data, wait_for

STATE, MULTI, V1, RAW = (
    "/state/chat/completions", "/multi_state/chat/completions", "/v1/chat/completions", "/openai/v1/completions",
)  # fmt: skip
SESSIONS, TURNS = (300 if os.environ.get("RWKV_LONG_TESTS") else 40), 5
SAMPLED: dict[str, Any] = {
    "ignore_eos": True, "max_tokens": 8, "temperature": 0.9, "top_k": 40, "top_p": 0.8, "alpha_presence": 0.5,
    "alpha_frequency": 0.1, "alpha_decay": 0.99,
}  # fmt: skip
EXACT: dict[str, Any] = {**SAMPLED, "stop_tokens": []}
TOKENIZER = Tokenizer()
IDS = {token: number for number, token in enumerate(TOKENIZER.byte_table) if token}


def new_id(name: str = "session") -> str:
    return f"{name}-{uuid.uuid4().hex}"


def turn(service: Service, session: str, prompt: str, path: str = STATE, **fields: Any) -> dict[str, Any]:
    answer = service.post(path, {**EXACT, "contents": [prompt], "session_id": session, "seed": 1, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def text_of(body: dict[str, Any]) -> str:
    return str(body["choices"][0]["message"]["content"])


def cached(body: dict[str, Any]) -> int:
    return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])


def token_id(shown: str) -> int:
    """Return the id of a token from its text in `logprobs`."""
    if shown.startswith("bytes:"):
        return IDS[bytes.fromhex(shown.removeprefix("bytes:").replace("\\x", ""))]
    return IDS[shown.encode()]


class Alone:
    """The same conversation without a session: every turn sends all token ids."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.ids: list[int] = []

    def turn(self, prompt: str, **fields: Any) -> str:
        self.ids += TOKENIZER.encode(f"\n\n{prompt}" if self.ids else prompt)
        body = {**EXACT, "prompt": self.ids, "logprobs": 0, "seed": 1, "use_prefix_cache": False, **fields}
        choice = self._service.post(RAW, body).json()["choices"][0]
        self.ids += [token_id(token) for token in choice["logprobs"]["tokens"]]
        return str(choice["text"])


def prompts_of(number: int) -> list[str]:
    return [f"User: question {number}.{turn}, please?\n\nAssistant:" for turn in range(TURNS)]


@pytest.mark.slow
def test_interleaved_sessions_are_the_same_as_alone(service: Service) -> None:
    sessions = [(number, new_id("many")) for number in range(SESSIONS)]
    answers_by_number: dict[int, list[str]] = {number: [] for number, _ in sessions}
    reference = {number: Alone(service) for number, _ in sessions}

    def in_session(number: int, session: str, at: int) -> None:
        body = turn(service, session, prompts_of(number)[at], seed=number * 10 + at)
        answers_by_number[number].append(text_of(body))

    def by_itself(number: int) -> list[str]:
        alone = reference[number]
        return [alone.turn(prompt, seed=number * 10 + i) for i, prompt in enumerate(prompts_of(number))]

    with ThreadPoolExecutor(16) as pool:
        for i in range(TURNS):
            order = sessions[i:] + sessions[:i]
            list(pool.map(lambda one, i=i: in_session(*one, i), order))
        expected = list(pool.map(by_itself, answers_by_number))
    assert list(answers_by_number.values()) == expected
    assert len({text for texts in answers_by_number.values() for text in texts}) > SESSIONS
    deleted = service.post("/state/delete", {"session_id": "many-", "delete_prefix": True}).json()
    assert deleted["deleted"] == SESSIONS


def test_a_stop_is_not_part_of_the_state(service: Service) -> None:
    session, alone = new_id(), Alone(service)
    first = alone.turn("Hello")
    generated = alone.ids[-8:]
    stop = next(token for token in generated[2:] if token not in generated[:2])
    kept = generated[: generated.index(stop)]
    body = turn(service, session, "Hello", stop_tokens=[stop])
    assert body["choices"][0]["finish_reason"] == "stop"
    assert first.startswith(text_of(body))
    alone.ids = alone.ids[:-8] + kept
    again = turn(service, session, "And then?")
    assert text_of(again) == alone.turn("And then?")
    assert cached(again) == body["usage"]["prompt_tokens"] + len(kept)


def test_a_blank_line_is_added_before_a_later_prompt(service: Service) -> None:
    twins = new_id(), new_id()
    for session in twins:
        turn(service, session, "\n\nUser: a\n\nAssistant:")
    plain = turn(service, twins[0], "User: b\n\nAssistant:")
    ready = turn(service, twins[1], "\n\nUser: b\n\nAssistant:")
    assert text_of(plain) == text_of(ready)
    assert plain["usage"] == ready["usage"]


def test_a_streamed_turn_is_the_same_and_is_stored(service: Service) -> None:
    twins = new_id(), new_id()
    whole = text_of(turn(service, twins[0], "Hello"))
    body = {**EXACT, "contents": ["Hello"], "session_id": twins[1], "seed": 1, "stream": True, "chunk_size": 3}
    events = sse_data(service.post(STATE, body).text)
    assert row_texts(events)[0] == whole
    assert text_of(turn(service, twins[0], "More")) == text_of(turn(service, twins[1], "More"))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"contents": ["a", "b"]}, "contents"),
        ({"contents": []}, "contents"),
        ({"contents": [""]}, "contents[0]"),
        ({"session_id": None}, "session_id"),
        ({"session_id": ""}, "session_id"),
        ({"session_id": "x" * 257}, "session_id"),
        ({"wait": "no"}, "wait"),
    ],
)
def test_a_turn_is_one_prompt_of_one_session(service: Service, change: dict[str, Any], field: str) -> None:
    refused = service.post(STATE, {**EXACT, "contents": ["a"], "session_id": "s", **change})
    assert (refused.status_code, refused.json()["field"]) == (422, field)


def test_concurrent_turns_run_one_after_the_other(service: Service) -> None:
    session, prompts = new_id(), ["first", "second"]
    turn(service, session, "begin")
    answers: dict[str, str] = {}
    threads = [
        threading.Thread(target=lambda prompt=prompt: answers.update({prompt: text_of(turn(service, session, prompt))}))
        for prompt in prompts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    orders = []
    for order in (prompts, prompts[::-1]):
        twin = new_id()
        turn(service, twin, "begin")
        orders.append({prompt: text_of(turn(service, twin, prompt)) for prompt in order})
    assert answers in orders
    assert orders[0] != orders[1]


def run_endless(service: Service, session: str, stream: bool, answers: list[Any]) -> threading.Thread:
    """Start a turn that does not end by itself."""
    body = {**EXACT, "contents": ["on and on"], "session_id": session, "max_tokens": 1_000_000, "stream": stream}
    service.wait_idle()
    thread = threading.Thread(target=lambda: answers.append(service.post(STATE, {**body, "timeout_s": 150})))
    thread.start()
    wait_for(lambda: service.status()["running_rows"] == 1, 20, "the turn runs")
    return thread


def test_a_busy_session_and_one_that_is_deleted_while_it_runs(service: Service) -> None:
    for stream in (True, False):
        session, answers = new_id(), list[Any]()
        turn(service, session, "begin")
        thread = run_endless(service, session, stream, answers)
        busy = service.post(STATE, {**EXACT, "contents": ["a"], "session_id": session, "wait": False})
        assert busy.status_code == 409
        assert session in busy.json()["error"]
        assert (busy.json()["field"], busy.json()["given"]) == ("session_id", session)
        assert service.post("/state/delete", {"session_id": session}).json()["status"] == "success"
        thread.join(REQUEST_TIMEOUT_S)
        assert not thread.is_alive()
        assert '"error":' in answers[0].text
        assert "deleted" in answers[0].text
        assert answers[0].status_code in (200, 404)  # depends on whether the answer had begun
        if stream and answers[0].status_code == 200:
            assert answers[0].text.endswith("data: [DONE]\n\n")
        assert service.post("/state/delete", {"session_id": session}).status_code == 404
        assert cached(turn(service, session, "begin")) == 0, "a new session began"


def test_a_cancelled_turn_does_not_change_the_session(service: Service) -> None:
    session, twin = new_id(), new_id()
    for one in (session, twin):
        turn(service, one, "begin")
    lost = service.post(
        STATE, {**EXACT, "contents": ["x"], "session_id": session, "max_tokens": 10**6, "timeout_s": 0.3}
    )
    assert lost.json()["choices"][0]["finish_reason"] == "timeout"
    assert text_of(turn(service, session, "next")) == text_of(turn(service, twin, "next"))


def test_sessions_are_listed_newest_first_and_deleted(service: Service) -> None:
    name = new_id("list")
    sessions = [f"{name}-{number}" for number in range(4)]
    for session in sessions:
        turn(service, session, "a")
    status = service.post("/state/status", {"limit": 4}).json()
    assert status["status"] == "success"
    assert [entry["session_id"] for entry in status["sessions"]] == sessions[::-1]
    counts = status["l1_cache_count"] + status["l2_cache_count"] + status["database_count"]
    assert counts == status["total_sessions"] >= 4
    for entry in status["sessions"]:
        assert entry["cache_level"] in ("L1 (VRAM)", "L2 (RAM)", "Database (Disk)")
        assert {"last_updated", "timestamp"} <= entry.keys()
    page = service.post("/state/status", {"limit": 2, "offset": 1}).json()["sessions"]
    assert [entry["session_id"] for entry in page] == [sessions[2], sessions[1]]
    deleted = service.post("/state/delete", {"session_id": sessions[0]}).json()
    assert deleted == {"status": "success", "message": f"Session {sessions[0]} deleted successfully", "deleted": 1}
    assert service.post("/state/delete", {"session_id": f"{name}-", "delete_prefix": True}).json()["deleted"] == 3
    missing = service.post("/state/delete", {"session_id": sessions[0]})
    assert (missing.status_code, missing.json()["status"]) == (404, "not_found")


def test_dialogues_branch_and_never_change(service: Service) -> None:
    session = new_id("branch")
    root = turn(service, session, "Once", MULTI)
    assert root["dialogue_idx"] == 1
    left = turn(service, session, "Left", MULTI, dialogue_idx=1)
    right = turn(service, session, "Right", MULTI, dialogue_idx=1)
    again = turn(service, session, "Left", MULTI, dialogue_idx=1)
    assert [body["dialogue_idx"] for body in (left, right, again)] == [2, 3, 4]
    assert text_of(left) == text_of(again) != text_of(right)
    alone = Alone(service)
    assert [alone.turn("Once"), alone.turn("Left"), alone.turn("On")] == [
        text_of(root), text_of(left), text_of(turn(service, session, "On", MULTI, dialogue_idx=2)),
    ]  # fmt: skip
    shown = [entry["session_id"] for entry in service.post("/state/status", {"limit": 5}).json()["sessions"]]
    assert {f"{session}:{number}" for number in (1, 2, 3, 4, 5)} == set(shown)


def test_a_streamed_branch_returns_its_number_before_the_end(service: Service) -> None:
    session = new_id("branch")
    body = {**EXACT, "contents": ["Once"], "session_id": session, "stream": True}
    events = sse_data(service.post(MULTI, body).text)
    assert events[-1] == {"object": "multi_state.dialogue_idx", "session_id": f"{session}:1", "dialogue_idx": 1}


@pytest.mark.parametrize("parent", [1, 7])
def test_an_unknown_parent_is_404(service: Service, parent: int) -> None:
    body = {**EXACT, "contents": ["a"], "session_id": new_id(), "dialogue_idx": parent}
    refused = service.post(MULTI, body)
    assert refused.status_code == 404
    assert (refused.json()["field"], refused.json()["given"]) == ("dialogue_idx", parent)
    assert str(parent) in refused.json()["error"]
    assert service.post(MULTI, {**body, "dialogue_idx": -1}).status_code == 422


def test_every_route_continues_the_same_session(service: Service) -> None:
    asked = [{"role": "user", "content": "Hi"}]
    reported = [*asked, {"role": "assistant", "content": "whatever"}, {"role": "user", "content": "Why?"}]
    begin = "User: Hi\n\nAssistant: <think>\n</think>"
    then = "User: Why?\n\nAssistant: <think>\n</think>"
    twins = [new_id() for _ in range(3)]
    expected = [text_of(turn(service, twins[0], prompt)).lstrip() for prompt in (begin, then)]
    for path, session in ((V1, twins[1]), ("/openai/v1/chat/completions", twins[2])):
        bodies = [{**EXACT, "messages": messages, "session_id": session, "seed": 1} for messages in (asked, reported)]
        assert [text_of(service.post(path, body).json()) for body in bodies] == expected
    refused = service.post(V1, {**EXACT, "contents": ["a", "b"], "session_id": twins[0]})
    assert (refused.status_code, refused.json()["field"]) == (422, "contents")


def test_a_session_id_of_64_kib_of_combining_characters(service: Service) -> None:
    """It is refused with a short answer. The longest allowed one is stored, listed, exported and deleted."""
    long_id, allowed = "e" + "\u0301" * 32_768, "e" + "\u0301" * 255
    for path, body in ((STATE, {"contents": ["a"]}), ("/state/delete", {})):
        refused = service.post(path, {**body, "session_id": long_id})
        assert refused.status_code == 422 and refused.json()["field"] == "session_id" and len(refused.text) < 4096
    assert service.get("/state/export", params={"session_id": long_id[:5000]}).status_code == 422
    assert service.post(STATE, {"contents": ["a"], "max_tokens": 2, "session_id": allowed}).status_code == 200
    assert allowed in [one["session_id"] for one in service.post("/state/status", {}).json()["sessions"]]
    file = service.get("/state/export", params={"session_id": allowed})
    assert file.status_code == 200
    imported = service.post("/state/import", params={"session_id": allowed[:-1]}, content=file.content)
    assert imported.status_code == 200, "another id, although it looks alike"
    for one in (allowed, allowed[:-1]):
        assert service.post("/state/delete", {"session_id": one}).status_code == 200
