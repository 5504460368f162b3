"""/v2, /big_batch and FIM over real HTTP."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from test.serving import Service, row_texts, sse_data, wait_for

V1, V2, BIG, FIM = "/v1/chat/completions", "/v2/chat/completions", "/big_batch/completions", "/FIM/v1/batch-FIM"
EXACT: dict[str, Any] = {"ignore_eos": True, "stop_tokens": [], "max_tokens": 12}
NAKED: dict[str, Any] = {"top_k": 0, "top_p": 1, "alpha_presence": 0, "alpha_frequency": 0}
"""Only temperature has an effect."""


def texts_of(answer: Any) -> list[str]:
    return [choice["message"]["content"] for choice in answer.json()["choices"]]


def ends_of(events: list[Any]) -> dict[int, str]:
    return {
        choice["index"]: choice["finish_reason"]
        for event in events
        for choice in event.get("choices", ())
        if "finish_reason" in choice
    }


def test_v2_puts_token_0_before_the_prompt(service: Service) -> None:
    body = {**EXACT, "contents": ["Hello", "你好"], "seed": 5}
    padded, plain = service.post(V2, body), service.post(V2, {**body, "pad_zero": False})
    assert padded.json()["usage"]["prompt_tokens"] == plain.json()["usage"]["prompt_tokens"] + 2
    assert texts_of(padded) == texts_of(service.post(V1, {**body, "pad_zero": True}))
    assert texts_of(plain) == texts_of(service.post(V1, body))
    assert texts_of(padded) != texts_of(plain)


def test_v2_streams_the_same_text(service: Service) -> None:
    body = {**EXACT, "contents": ["Hello", "你好"], "seed": 5}
    events = sse_data(service.post(V2, {**body, "stream": True, "chunk_size": 5}).text)
    assert [text for _, text in sorted(row_texts(events).items())] == texts_of(service.post(V2, body))
    assert ends_of(events) == {0: "length", 1: "length"}


def test_big_batch_streams_by_default(service: Service) -> None:
    body = {**EXACT, "contents": ["a", "b", "c"], "seed": 1}
    streamed = service.post(BIG, body)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    events = sse_data(streamed.text)
    whole = service.post(BIG, {**body, "stream": False})
    assert [row_texts(events)[row] for row in range(3)] == texts_of(whole)
    assert ends_of(events) == {0: "length", 1: "length", 2: "length"}


def test_big_batch_uses_only_the_temperature(service: Service) -> None:
    body = {**EXACT, "contents": ["Once upon"], "seed": 11, "stream": False}
    exact = texts_of(service.post(BIG, body))
    assert exact == texts_of(service.post(V1, {**body, **NAKED}))
    # These fields would make other routes greedy or penalise repetition.
    assert exact == texts_of(service.post(BIG, {**body, "top_k": 1, "top_p": 0, "alpha_presence": 9}))
    assert exact != texts_of(service.post(BIG, {**body, "temperature": 0.01}))


def test_big_batch_noise(service: Service) -> None:
    body = {**EXACT, "contents": ["Once upon"], "stream": False}
    greedy = texts_of(service.post(BIG, {**body, "temperature": 0}))
    assert texts_of(service.post(BIG, {**body, "noise": 0, "seed": 3})) == greedy
    assert texts_of(service.post(BIG, {**body, "noise": 5, "temperature": 0})) == greedy
    noisy = [texts_of(service.post(BIG, {**body, "noise": 5, "seed": seed})) for seed in (1, 1, 2)]
    assert noisy[0] == noisy[1] != noisy[2]
    assert noisy[0] != texts_of(service.post(BIG, {**body, "seed": 1}))
    refused = service.post(BIG, {**body, "noise": -1})
    assert (refused.status_code, refused.json()["field"]) == (422, "noise")


def test_big_batch_status_and_clean(service: Service) -> None:
    status = service.get("/big_batch/completions-status").json()
    assert (status["generating"], status["requests"]) == (False, 0)
    endless = {**EXACT, "contents": ["a", "b"], "max_tokens": 1_000_000}
    answers: list[Any] = []
    threads = [
        threading.Thread(
            target=lambda path=path: answers.append((path, service.post(path, {**endless, "timeout_s": 150})))
        )
        for path in (BIG, BIG)
    ]
    with service.stream(V1, {**endless, "stream": True}) as other:
        for thread in threads:
            thread.start()
        wait_for(lambda: service.get("/big_batch/completions-status").json()["requests"] == 2, 20, "both run")
        assert service.get("/big_batch/completions-status").json()["generating"] is True
        cleaned = service.post("/big_batch/clean").json()
        assert (cleaned["status"], cleaned["cancelled"]) == ("success", 2)
        for thread in threads:
            thread.join()
        assert all(ends_of(sse_data(answer.text)) == {0: "cancelled", 1: "cancelled"} for _, answer in answers)
        assert len(answers) == 2
        assert service.status()["running_rows"] == 2, "another route's rows were cancelled"
        assert other.status_code == 200
    assert service.post("/big_batch/clean", {"password": "any"}).json()["cancelled"] == 0


def test_fim_is_a_batch_of_gaps(service: Service) -> None:
    body = {**EXACT, "prefix": ["def f(", "a = "], "suffix": ["):", "\n"], "seed": 2, "stop_tokens": [0]}
    answer = service.post(FIM, body)
    assert answer.json()["object"] == "FIM.completion"
    raw = [f"✿prefix✿✿suffix✿{suffix}✿middle✿{prefix}" for prefix, suffix in (("def f(", "):"), ("a = ", "\n"))]
    same = service.post(V1, {**EXACT, "contents": raw, "seed": 2, "stop_tokens": [0, "✿"]})
    assert texts_of(answer) == texts_of(same)
    events = sse_data(service.post(FIM, {**body, "stream": True}).text)
    assert all(event["object"] == "FIM.completion.chunk" for event in events)
    assert [row_texts(events)[row] for row in (0, 1)] == texts_of(answer)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"suffix": ["a", "b"]}, "prefix"),
        ({"prefix": []}, "prefix"),
        ({"prefix": "def"}, "prefix"),
        ({"suffix": None}, "suffix"),
    ],
)
def test_fim_refuses_unequal_sides(service: Service, change: dict[str, Any], field: str) -> None:
    refused = service.post(FIM, {**EXACT, "prefix": ["a"], "suffix": ["b"], **change})
    assert (refused.status_code, refused.json()["field"]) == (422, field)


def test_the_fim_stop_ends_a_row(service: Service) -> None:
    body = {"model": "rwkv7", "prompt": "a", "suffix": "b", "max_tokens": 5, "logit_bias": {"10060": 100}}
    choice = service.post("/openai/v1/completions", {**body, "alpha_presence": 0}).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


@pytest.mark.parametrize(
    "body",
    [
        (V2, {"contents": ["a"]}),
        (BIG, {"contents": ["a"]}),
        (FIM, {"prefix": ["a"], "suffix": ["b"]}),
        ("/state/chat/completions", {"contents": ["a"], "session_id": "patience"}),
        ("/multi_state/chat/completions", {"contents": ["a"], "session_id": "patience"}),
        ("/openai/v1/completions", {"prompt": "a"}),
    ],
    ids=lambda case: case[0],
)
def test_every_route_has_timeouts_and_detects_disconnects(service: Service, body: tuple[str, dict[str, Any]]) -> None:
    path, own = body
    endless = {**EXACT, "max_tokens": 1_000_000, **own}
    timed = service.post(path, {**endless, "stream": True, "timeout_s": 0.4})
    end = sse_data(timed.text)[-1]["choices"][-1]
    assert end.get("end_reason", end["finish_reason"]) == "timeout"  # OpenAI's clients do not know this `finish_reason`
    service.wait_idle()
    connection = service.sent(path, {**endless, "stream": True})
    wait_for(lambda: service.status()["running_rows"] == 1, 20, "the row runs")
    connection.close()
    service.wait_idle(20)


def test_routes_share_the_running_batch(service: Service) -> None:
    fields = {**EXACT, "seed": 21, "stream": False}
    bodies = [
        (V1, {**fields, "contents": ["x", "y"]}),
        (V2, {**fields, "contents": ["x", "y"]}),
        (BIG, {**fields, "contents": ["x", "y"]}),
        (BIG, {**fields, "contents": ["x", "y"], "noise": 2}),
        (FIM, {**fields, "prefix": ["x"], "suffix": ["y"]}),
    ]
    alone = [texts_of(service.post(*body)) for body in bodies]
    with ThreadPoolExecutor(10) as pool:
        for _ in range(2):
            futures = [pool.submit(service.post, *body) for body in bodies]
            assert [texts_of(future.result()) for future in futures] == alone
