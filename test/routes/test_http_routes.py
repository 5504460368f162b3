"""The routes' answers over HTTP."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from test.serving import ROOT, Service, row_texts, sse_data, wait_for

CHAT = "/v1/chat/completions"
TRANSLATE = "/translate/v1/batch-translate"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "stop_tokens": []}


def test_the_batch_format(service: Service) -> None:
    answer = service.post(CHAT, {**GREEDY, "contents": ["Hello", "English: a cat\n\nChinese:"], "model": "any"})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert body["id"] == "rwkv7-batch"
    assert body["object"] == "chat.completion"
    assert body["model"] == "any"
    assert isinstance(body["created"], int)
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert all(choice["message"]["role"] == "assistant" for choice in body["choices"])
    assert all(choice["finish_reason"] == "length" for choice in body["choices"])
    usage = body["usage"]
    assert usage["completion_tokens"] == 24
    assert usage["total_tokens"] == usage["prompt_tokens"] + 24
    counted = service.post("/v1/tokens/count", {"contents": ["Hello", "English: a cat\n\nChinese:"]}).json()
    assert counted == {"tokens": usage["prompt_tokens"]}


@pytest.mark.parametrize("chunk_size", [1, 3, 100])
def test_a_stream_has_the_same_text(service: Service, chunk_size: int) -> None:
    body = {**GREEDY, "contents": ["你好", "Привет", "Hello"], "max_tokens": 40}
    whole = service.post(CHAT, body).json()
    streamed = service.post(CHAT, {**body, "stream": True, "chunk_size": chunk_size})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    events = sse_data(streamed.text)
    assert all(event["object"] == "chat.completion.chunk" for event in events)
    texts = row_texts(events)
    assert texts == {choice["index"]: choice["message"]["content"] for choice in whole["choices"]}
    ends = [choice for event in events for choice in event["choices"] if "finish_reason" in choice]
    assert sorted(end["index"] for end in ends) == [0, 1, 2]
    assert all(end["delta"] == {} and end["finish_reason"] == "length" for end in ends)


def test_stops_are_strings_or_ids_and_are_not_returned(service: Service) -> None:
    text = service.post(CHAT, {**GREEDY, "contents": ["Hello"]}).json()["choices"][0]["message"]["content"]
    cut = text[3:6]
    for stream in (False, True):
        answer = service.post(CHAT, {**GREEDY, "contents": ["Hello"], "stop_tokens": [0, cut], "stream": stream})
        if stream:
            events = sse_data(answer.text)
            assert row_texts(events)[0] == text[: text.index(cut)]
            assert events[-1]["choices"][-1]["finish_reason"] == "stop"
        else:
            choice = answer.json()["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == (text[: text.index(cut)], "stop")


def test_stop_token_ids_add_to_the_stops(service: Service) -> None:
    body = {**GREEDY, "contents": ["Hello"], "logprobs": None}
    text = service.post(CHAT, body).json()["choices"][0]["message"]["content"]
    ids = service.post("/tokenize", {"prompt": text}).json()["tokens"]
    stopped = service.post(CHAT, {**body, "stop_token_ids": [ids[-1]]}).json()["choices"][0]
    assert stopped["finish_reason"] == "stop" and text.startswith(stopped["message"]["content"])
    assert service.post(CHAT, {**body, "stop_token_ids": [65_536]}).json()["field"] == "stop_token_ids[0]"


def test_messages_become_a_prompt(service: Service) -> None:
    turns = [
        {"role": "system", "content": "Be kind.\r\n\r\n\r\nBe brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]},
    ]
    prompt = "System: Be kind.\nBe brief.\n\nUser: Hi\nthere\n\nAssistant: <think>\n</think>"
    as_messages = service.post(CHAT, {**GREEDY, "messages": turns}).json()
    as_contents = service.post(CHAT, {**GREEDY, "contents": [prompt]}).json()
    assert as_messages["usage"] == as_contents["usage"]
    assert as_messages["choices"][0]["message"]["content"] == as_contents["choices"][0]["message"]["content"].lstrip()
    assert as_messages["id"].startswith("chatcmpl-")
    thinking = service.post(CHAT, {**GREEDY, "messages": turns, "enable_think": True}).json()
    assert thinking["choices"][0]["message"]["content"].startswith("<think")
    counted = service.post("/v1/tokens/count", {"messages": turns}).json()["tokens"]
    assert counted == as_messages["usage"]["prompt_tokens"]


def test_a_timeout_ends_rows_with_partial_text(service: Service) -> None:
    body = {**GREEDY, "contents": ["Hello"], "max_tokens": 1_000_000}
    for seconds in (0.7, 7.0, 50.0):  # a busy machine may generate nothing for a while
        choice = service.post(CHAT, {**body, "timeout_s": seconds}).json()["choices"][0]
        assert choice["finish_reason"] == "timeout"
        if choice["message"]["content"]:
            break
    assert choice["message"]["content"]


def test_a_cancelled_answer_has_all_rows(service: Service) -> None:
    body = {**GREEDY, "contents": ["Hello"] * 8, "max_tokens": 1_000_000, "stream": False}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(service.post, "/big_batch/completions", body)
        wait_for(lambda: service.post("/big_batch/clean").json()["cancelled"], 30, "it runs and is cancelled")
        answer = waiting.result()
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert [choice["finish_reason"] for choice in answer.json()["choices"]] == ["cancelled"] * 8


@pytest.mark.parametrize(
    "fields",
    [
        {"states": [{"name": "a"}, {}]},
        {"mrss_gatingweight": [1, 2]},
        {"choice": ["a"]},
        {"json_schema": {"type": "object"}},
        {"regex": "a"},
        {"grammar": 'start: "a"'},
    ],
)
def test_routes_with_fixed_sampling_refuse_other_sampling_fields(service: Service, fields: dict[str, Any]) -> None:
    score = {"contents": ["x"], "candidates": ["y"]}
    translation = {"source_lang": "en", "target_lang": "de", "text_list": ["A word."]}
    for path, body in (("/v1/score", score), ("/translate/v1/batch-translate", translation)):
        refused = service.post(path, {**body, **fields})
        assert refused.status_code == 422, refused.text
        assert (
            refused.json()["field"].split("[")[0] in fields
            and "is not supported on this route" in refused.json()["error"]
        )


def test_translate_keeps_order_length_and_blanks(service: Service) -> None:
    texts = ["Good morning", "", " \n ", "Good morning", "Bonjour tout le monde", "First part\n\n\nSecond part"]
    body = {"source_lang": "auto", "target_lang": "zh-CN", "text_list": texts, "placeholders": ["{", "}"]}
    answer = service.post(TRANSLATE, body).json()["translations"]
    assert len(answer) == len(texts)
    assert [answer[1]["text"], answer[2]["text"]] == ["", " \n "]
    assert answer[0] == answer[3]
    assert answer[0]["detected_source_lang"] == "en"
    assert answer[4]["detected_source_lang"] == "fr"
    assert "\n\n\n" in answer[5]["text"]
    assert service.post(TRANSLATE, body).json()["translations"] == answer


@pytest.mark.parametrize(
    ("source", "target", "labels"),
    [("en", "zh-TW", ("English", "Traditional Chinese")), ("Elvish", "tlh", ("Elvish", "tlh"))],
    ids=["codes", "names of no table"],
)
def test_translate_prompt_names_the_languages(
    service: Service, source: str, target: str, labels: tuple[str, str]
) -> None:
    body = {"source_lang": source, "target_lang": target, "text_list": ["a cat"]}
    text = service.post(TRANSLATE, body).json()["translations"][0]["text"]
    prompt = f"{labels[0]}: a cat\n\n{labels[1]}:"
    stops = ["\n\n", *(f"\n{label}:" for label in labels)]
    raw = {"contents": [prompt], "temperature": 0, "alpha_presence": 0, "alpha_frequency": 0, "stop_tokens": stops}
    tokens = service.post("/v1/tokens/count", {"text": prompt}).json()["tokens"]
    answer = service.post(CHAT, {**raw, "max_tokens": 64 + 4 * tokens}).json()
    assert text == answer["choices"][0]["message"]["content"].strip()


def test_a_context_is_read_once(service: Service) -> None:
    """Each text starts from the state after the context."""
    words = " ".join(f"word {index}" for index in range(60))
    tokens = service.post("/v1/tokens/count", {"text": words}).json()["tokens"]

    def saved() -> int:
        return int(service.status()["pool"]["prefix_cache"]["saved_tokens"])

    before = saved()
    body = {"source_lang": "en", "target_lang": "de", "text_list": list("abcdef"), "context": words}
    assert service.post(TRANSLATE, body).status_code == 200
    assert saved() - before >= (len("abcdef") - 1) * (tokens - 1)


def test_a_repeated_translation_generates_no_tokens(service: Service) -> None:
    body = {"source_lang": "en", "target_lang": "de", "text_list": ["a text that was not seen before"]}
    # Each HTTP worker has its own cache and requests reach random workers. After this many all have the text.
    for _ in range(40):
        service.post(TRANSLATE, body)
    before = service.wait_idle()["generated_tokens"]
    for _ in range(4):
        service.post(TRANSLATE, body)
    status = service.status()
    assert status["generated_tokens"] - before <= 0
    assert status["generated_tokens"] == status["drawn_tokens"]  # the older name


def test_models_status_ready_and_openapi(service: Service) -> None:
    models = service.get("/v1/models").json()
    assert models["object"] == "list"
    assert models["data"][0]["id"] == "rwkv7"
    status = service.status()
    for key in ("running_rows", "waiting_rows", "free_slots", "samplers", "kernels", "devices", "pool"):
        assert key in status
    assert len(status["processes"]["http_workers"]) == 2
    assert service.get("/healthz").json() == {"status": "ok"}
    assert service.get("/readyz").status_code == 200
    document = service.get("/openapi.json").json()
    assert document["openapi"].startswith("3.")
    body = document["components"]["schemas"]["PromptBody"]["properties"]
    assert body["temperature"]["maximum"] == 100
    assert body["stop_tokens"]["default"] == [0, 261, 24281]
    assert set(document["paths"][CHAT]["post"]["responses"]) >= {"200", "400", "401", "413", "422", "429", "503"}


def test_metrics_are_the_same_from_every_worker(service: Service) -> None:
    service.post(CHAT, {**GREEDY, "contents": ["a", "b"]})
    service.wait_idle()
    asked = 'rwkv_http_requests_total{route="/v1/chat/completions",status="200"}'
    wait_for(lambda: asked in service.get("/metrics").text, 20, "the worker that answered has reported it")
    figures = set()
    for _ in range(8):
        lines = service.get("/metrics").text.splitlines()
        figures.add(next(line for line in lines if line.startswith("rwkv_completion_tokens_total")))
        assert any(line.startswith(asked) for line in lines)
        assert {'rwkv_running_rows{engine="engine-0"} 0.0', "rwkv_big_batch_jobs 0"} <= set(lines)
        assert any(line.startswith("rwkv_pool_prefix_cache_hits{") for line in lines)
    assert len(figures) == 1


def test_the_last_requests_are_listed_with_the_reasons_of_errors(service: Service) -> None:
    assert service.post(CHAT, {**GREEDY, "contents": ["listed"]}).status_code == 200
    assert service.post(CHAT, {"contents": [], "max_tokens": 1}).status_code == 422
    assert service.get("/v1/models").status_code == 200

    def newest() -> list[dict[str, Any]]:
        answer = service.get("/v1/requests").json()
        assert answer["logged"] is True
        found: list[dict[str, Any]] = answer["requests"]
        return found

    wait_for(lambda: newest()[0]["status"] == 422 and newest()[1]["status"] == 200, 20, "both are reported")
    refused, done = newest()[:2]
    assert (refused["route"], refused["outcome"], refused["refused"]["field"]) == (CHAT, "invalid_field", "contents")
    assert (done["outcome"], done["rows"]) == ("done", 1) and done["completion_tokens"] > 0 and done["at"] > 1e9
    assert not [entry for entry in newest() if entry["method"] == "GET" and entry["status"] < 400]


def test_preflights_of_every_route(service: Service) -> None:
    paths = service.get("/openapi.json").json()["paths"]
    for path, operations in paths.items():
        preflight = service_options(service, path)
        assert preflight.status_code == 204
        assert {method.upper() for method in operations} <= set(
            preflight.headers["access-control-allow-methods"].split(", ")
        )
        assert "Authorization" in preflight.headers["access-control-allow-headers"]


def service_options(service: Service, path: str) -> Any:
    return service.request("OPTIONS", path, headers={"Origin": "http://a", "Access-Control-Request-Method": "POST"})


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_tutorials_examples(service: Service) -> None:
    ran = subprocess.run(
        ["bash", str(ROOT / "test/test_curl.sh"), service.url], capture_output=True, text=True, timeout=170, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
