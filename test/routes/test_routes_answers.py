"""Answers of every route against the published schemas. Unknown fields are errors."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest

from routes.ollama.models import REFUSED
from routes.table import ROUTES
from test.conftest import rest_slow
from test.serving import Service, sse_data, wait_for
from test.state_files import random_state, write_state

V1, STATE, BRANCH = "/v1/chat/completions", "/state/chat/completions", "/multi_state/chat/completions"
CHAT, COMPLETE = "/openai/v1/chat/completions", "/openai/v1/completions"
RESPOND = "/openai/v1/responses"
SHORT: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "stop_tokens": []}
TWO: dict[str, Any] = {**SHORT, "contents": ["Hello", "你好"]}
TALK: dict[str, Any] = {**SHORT, "messages": [{"role": "user", "content": "Hi"}]}
ASKED: list[tuple[str, dict[str, Any] | None]] = [
    (V1, TWO),
    (V1, TALK),
    (V1, {**TALK, "stream_options": {"include_usage": True}}),
    (V1, {**TWO, "max_tokens": 1_000_000, "timeout_s": 0.5}),
    (V1, {**TWO, "contents": []}),
    ("/v2/chat/completions", TWO),
    ("/big_batch/completions", {**TWO, "noise": 1.5}),
    ("/big_batch/completions-status", None),
    ("/big_batch/clean", {}),
    ("/FIM/v1/batch-FIM", {**SHORT, "prefix": ["a", "b"], "suffix": ["c", "d"]}),
    ("/translate/v1/batch-translate", {"target_lang": "de", "text_list": ["Good morning", " ", "Bonjour le monde"]}),
    ("/translate/v1/batch-translate", {"target_lang": "de", "text_list": ["A {x}", "B"], "title": "T", "scores": True}),
    ("/translate/v1/batch-translate", {"target_lang": "auto", "text_list": ["Good morning"]}),
    ("/v2/translate", {"target_lang": "de", "text": ["Good morning"], "model_type": "latency_optimized"}),
    ("/v2/translate", {"target_lang": "de", "text": ["Good morning"], "formality": "more"}),
    ("/v2/languages", {"type": "target"}),
    ("/v2/usage", None),
    ("/v2/glossaries", None),
    ("/v3/glossaries", None),
    ("/v2/glossary-language-pairs", None),
    ("/translate", {"q": ["Good morning"], "target": "de", "alternatives": 1}),
    ("/translate", {"q": "Good morning", "target": "de"}),
    ("/detect", {"q": "Good morning"}),
    ("/languages", None),
    ("/frontend/settings", None),
    (STATE, {**SHORT, "contents": ["one"], "session_id": "answers", "stream_options": {"include_usage": True}}),
    (BRANCH, {**SHORT, "contents": ["one"], "session_id": "answers: branches"}),
    (BRANCH, {**SHORT, "contents": ["one"], "session_id": "answers: branches", "dialogue_idx": 99}),
    ("/state/status", {}),
    (CHAT, TALK),
    (CHAT, {**TALK, "n": 2, "stream_options": {"include_usage": True}}),
    (CHAT, {**TALK, "logprobs": True, "top_logprobs": 2, "enable_think": True}),
    (CHAT, {**TALK, "messages": []}),
    (COMPLETE, {**SHORT, "prompt": "Once", "n": 2, "logprobs": 2, "stream_options": {"include_usage": True}}),
    (COMPLETE, {**SHORT, "prompt": ["Once", "Twice"], "echo": True}),
    (COMPLETE, {**SHORT, "prompt": [[5, 6], [7]], "n": 2, "echo": True, "logprobs": 1}),
    ("/v1/completions", {**SHORT, "prompt": "Once"}),
    ("/v1/score", {"contents": ["Once", "Twice"], "candidates": [" upon", "!"], "logprobs": True}),
    ("/v1/score", {"contents": ["Once"], "candidates": [[" upon"], ["!"]]}),
    ("/tokenize", {"prompt": "Hello"}),
    ("/tokenize", {"content": "Hello é", "with_pieces": True}),
    ("/apply-template", {"messages": TALK["messages"]}),
    ("/completion", {"prompt": "Once", "n_predict": 6, "n_probs": 2, "temprature": 1}),
    ("/completion", {"prompt": [1, 70_000]}),
    ("/infill", {"input_prefix": "a", "input_suffix": "b", "n_predict": 6}),
    ("/props", None),
    ("/slots", None),
    ("/version", None),
    ("/ping", None),
    ("/openai/tokenize", {}),
    ("/detokenize", {"tokens": [33155, 0]}),
    ("/openai/detokenize", {"tokens": [-1]}),
    ("/tokenizer_info", None),
    ("/openai/tokenizer_info", None),
    ("/api/chat", {"messages": TALK["messages"], "options": {"num_predict": 6}, "logprobs": True, "think": True}),
    ("/api/chat", {"messages": []}),
    ("/v1/messages", {"messages": TALK["messages"], "max_tokens": 6, "thinking": {"type": "enabled"}}),
    ("/v1/messages", {"messages": TALK["messages"]}),
    ("/v1/messages/count_tokens", {"messages": TALK["messages"]}),
    ("/api/generate", {"prompt": "Hi", "options": {"num_predict": 6}}),
    ("/api/generate", {"prompt": "Hi", "model": "nobody"}),
    ("/api/tags", None),
    ("/api/ps", None),
    ("/api/version", None),
    ("/api/show", {"model": "rwkv7"}),
    ("/api/pull", {"model": "nobody"}),
    *((path, {}) for method, path in REFUSED if method == "POST"),
    (RESPOND, {**SHORT, "input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 1}),
    ("/v1/responses", {**SHORT, "input": "Hi"}),
    (RESPOND, {**SHORT, "input": "Hi", "reasoning": {"effort": "low"}, "instructions": "Be brief."}),
    (RESPOND, {"input": "Hi", "tools": [{"type": "function", "name": "f"}], "tool_choice": "required"}),
    (RESPOND, {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "a", "schema": {"enum": [1]}}}}),
    (
        CHAT,
        {
            **TALK,
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": "required",
            "max_tokens": 99,
        },
    ),
    ("/invocations", TALK),
    ("/invocations", {"prompt": "say One."}),
    ("/openai/v1/embeddings", {"input": "a"}),
    ("/openai/v1/models", None),
    ("/openai/v1/models/{model}", {"model": "rwkv7"}),
    ("/openai/v1/models/{model}", {"model": "nobody"}),
    ("/v1/models", None),
    ("/v1/models/{model}", {"model": "rwkv7"}),
    ("/v1/models/load", {"file": "none.pth"}),
    ("/v1/models/unload", {"name": "none"}),
    ("/v1/adapters", None),
    ("/v1/engines", None),
    ("/v1/engines/add", {"devices": ["cpu"]}),
    ("/v1/engines/remove", {"engine": "engine-0"}),
    ("/v1/engines/restart", {"engine": "none"}),
    ("/healthcheck", None),
    ("/chat/completions", TALK),
    ("/models", None),
    ("/loadmodel", {"model_filename": "none.pth", "model_viewname": "none"}),
    ("/loadstatemodel", {"state_filename": "none.pth", "state_viewname": "none"}),
    ("/mrss_loadstatemodel", {"state_filenames": ["none.pth"], "state_viewname": "none", "state_gatingweight": [1.0]}),
    ("/mrss_set_gatingweight", {"state_viewname": "none", "state_gatingweight": [1.0]}),
    ("/removestatemodel", {}),
    ("/removemodel", {}),
    ("/openai/v1/files", None),
    ("/openai/v1/batches", None),
    ("/openai/v1/fine_tuning/jobs", None),
    ("/openai/v1/fine_tuning/jobs/{job_id}", {"job_id": "ftjob-none"}),
    ("/openai/v1/files/{file_id}", {"file_id": "file-none"}),
    ("/openai/v1/batches/{batch_id}", {"batch_id": "batch_none"}),
    ("/suggest", {"q": "a", "s": "b", "source": "en", "target": "zh"}),
    ("/translate/v1/documents/{document_id}", {"document_id": "doc-none"}),
    ("/translate/v1/glossaries/{glossary_id}", {"glossary_id": "none"}),
    ("/v2/glossaries/{glossary_id}", {"glossary_id": "none"}),
    ("/v3/glossaries/{glossary_id}", {"glossary_id": "none"}),
    ("/download_file/{document_id}", {"document_id": "none"}),
    ("/v1/tokens/count", {"text": "Hello"}),
    ("/v1/tokens/count", {}),
    ("/healthz", None),
    ("/readyz", None),
    ("/authz", None),
    ("/health", None),
    ("/status", None),
    ("/metrics", None),
    ("/v1/requests", None),
    ("/openapi.json", None),
    ("/docs", None),
    ("/", None),
]
CARRIED = {
    "/state/export", "/state/import", "/state/delete", "/v1/states", "/v1/states/{name}", "/v1/adapters/{name}",
    "/web/{file}", "/api/delete", "/translate/v1/documents", "/translate/v1/documents/{filename}", "/translate_file",
    "/v2/document", "/v2/document/{document_id}", "/translate/v1/glossaries", "/translate/v1/memory",
    "/translate/v1/memory/tmx",
}  # fmt: skip
"""Routes that are called in sequence, in their own test."""


class Published:
    """The service's OpenAPI document, with unknown fields forbidden."""

    def __init__(self, service: Service) -> None:
        self._document = service.get("/openapi.json").json()
        for schema in self._document["components"]["schemas"].values():
            if "properties" in schema:
                schema.setdefault("additionalProperties", False)

    def check(self, method: str, path: str, answer: httpx.Response) -> None:
        """Raises ValidationError unless the document allows this answer."""
        responses = self._document["paths"][path][method.lower()]["responses"]
        content_type = answer.headers["content-type"].partition(";")[0]
        schema = responses[str(answer.status_code)]["content"][content_type]["schema"]
        if content_type == "text/event-stream":
            value = schema["properties"]["data"]["anyOf"][0]["contentSchema"]
            events = answer.text if "[DONE]" in answer.text else f"{answer.text}data: [DONE]"  # others have no end
            for event in sse_data(events):
                self._validate(value, event)
        elif content_type == "application/x-ndjson":
            for line in answer.text.splitlines():
                self._validate(schema["contentSchema"], json.loads(line))
        elif content_type == "application/json":
            self._validate(schema, answer.json())
        else:
            self._validate(schema, answer.text)

    def _validate(self, schema: dict[str, Any], value: Any) -> None:
        jsonschema_rs.validate({**schema, "components": self._document["components"]}, value)


@pytest.fixture(scope="module")
def published(service: Service) -> Published:
    return Published(service)


def test_every_route_is_tested() -> None:
    assert {route.path for route in ROUTES} == {path for path, _ in ASKED} | CARRIED


@pytest.mark.parametrize(
    ("path", "body"), rest_slow(ASKED, 40), ids=lambda value: value if isinstance(value, str) else None
)
def test_answers_match_the_schema(
    service: Service, published: Published, path: str, body: dict[str, Any] | None
) -> None:
    routes = [route for route in ROUTES if route.path == path]
    route = next((one for one in routes if one.method == "GET"), routes[0])
    if route.method == "GET":
        published.check("GET", path, service.get(path.format(**(body or {}))))
        return
    for stream in (False, True) if route.events else (False,):
        published.check("POST", path, service.post(path, {**(body or {}), "stream": stream}))


def test_a_session_is_exported_imported_and_deleted(service: Service, published: Published) -> None:
    assert service.post(STATE, {**SHORT, "contents": ["one"], "session_id": "answers: carried"}).status_code == 200
    published.check("POST", "/state/status", service.post("/state/status", {}))
    file = service.get("/state/export", params={"session_id": "answers: carried"})
    published.check("GET", "/state/export", file)
    published.check("GET", "/state/export", service.get("/state/export", params={"session_id": "nobody"}))
    for content, status in ((file.content, 200), (file.content, 409), (b"x", 422)):
        brought = service.post("/state/import", params={"session_id": "answers: brought"}, content=content)
        assert brought.status_code == status
        published.check("POST", "/state/import", brought)
    for name, status in (("answers: brought", 200), ("answers: brought", 404)):
        deleted = service.post("/state/delete", {"session_id": name})
        assert deleted.status_code == status
        published.check("POST", "/state/delete", deleted)


def test_a_tuned_state_is_loaded_and_removed(service: Service, published: Published, tmp_path: Path) -> None:
    content = write_state(tmp_path / "s.pth", random_state(1, layers=2, width=64)).read_bytes()
    for status in (200, 409):
        form = {"data": {"name": "answers"}, "files": {"file": ("s.pth", content)}}
        added = service.request("POST", "/v1/states", **form)
        assert added.status_code == status
        published.check("POST", "/v1/states", added)
    published.check("POST", "/v1/states", service.post("/v1/states", {"name": "x", "file": "no.pth"}))
    for path in ("/v1/states", "/v1/models"):
        published.check("GET", path, service.get(path))
    for status in (200, 404):
        removed = service.request("DELETE", "/v1/states/answers")
        assert removed.status_code == status
        published.check("DELETE", "/v1/states/{name}", removed)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "prompt"), [(STATE, {"contents": ["one"]}), (CHAT, {"messages": TALK["messages"]})])
def test_an_error_while_a_turn_runs(
    service: Service, published: Published, path: str, prompt: dict[str, Any], stream: bool
) -> None:
    session = f"answers: doomed {path} {stream}"
    body = {**SHORT, **prompt, "max_tokens": 1_000_000, "session_id": session, "stream": stream}
    answers: list[httpx.Response] = []
    service.wait_idle()
    request_thread = threading.Thread(target=lambda: answers.append(service.post(path, body)))
    request_thread.start()
    wait_for(lambda: service.status()["running_rows"], 30, "the turn runs")
    wait_for(lambda: service.post("/state/delete", {"session_id": session}).status_code == 200, 30, "it is deleted")
    request_thread.join()
    assert answers[0].status_code in ((200, 404) if stream else (404,))
    assert "was deleted while its turn ran" in answers[0].text
    published.check("POST", path, answers[0])


def test_a_missing_adapter(service: Service, published: Published) -> None:
    published.check("DELETE", "/v1/adapters/{name}", service.request("DELETE", "/v1/adapters/none"))
    published.check("POST", "/v1/adapters", service.post("/v1/adapters", {"name": "x", "file": "no.pth"}))
