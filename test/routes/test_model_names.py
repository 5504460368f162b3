"""Names of models in requests: Ollama's tag, unknown names, and keys in Anthropic's header."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from test.programs.batch.runs import fake_service
from test.serving import Service, sse_data

V1, COMPLETE = "/v1/chat/completions", "/openai/v1/completions"
BODIES: list[tuple[str, dict[str, Any]]] = [
    (V1, {"contents": ["Hi"], "max_tokens": 2}),
    (V1, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}),
    (COMPLETE, {"prompt": "Hi", "max_tokens": 2}),
]
KEY = "secret-key-1"


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    flags = ("--strict-model", "true", "--http-workers", "1", "--password", KEY)
    running = fake_service(tmp_path_factory.mktemp("strict"), *flags, password=KEY)
    try:
        yield running
    finally:
        running.close()


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("name", ["rwkv7", "rwkv7:latest", ""])
def test_ollamas_tag_names_the_model(
    fake: Service, strict: Service, path: str, body: dict[str, Any], name: str
) -> None:
    for service in (fake, strict):
        answer = service.post(path, {**body, "model": name})
        assert answer.status_code == 200 and "warnings" not in answer.json(), answer.text


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_an_unknown_name_is_warned_of_or_refused(
    fake: Service, strict: Service, path: str, body: dict[str, Any]
) -> None:
    (warning,) = fake.post(path, {**body, "model": "gpt-9"}).json()["warnings"]
    message = "model: 'gpt-9' is not served; 'rwkv7' answers (--strict-model refuses)"
    assert warning == {"field": "model", "message": message}
    first, *_ = sse_data(fake.post(path, {**body, "model": "gpt-9", "stream": True}).text)
    assert first["warnings"] == [warning]
    refused = strict.post(path, {**body, "model": "gpt-9"})
    assert refused.status_code == 404 and "model 'gpt-9' not found; available: 'rwkv7'" in refused.text


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_fine_tuned_model_that_is_not_there_is_refused(fake: Service, path: str, body: dict[str, Any]) -> None:
    refused = fake.post(path, {**body, "model": "ft:rwkv7:me::1"})
    assert refused.status_code == 404 and "model 'ft:rwkv7:me::1' not found" in refused.text


def test_the_entry_of_a_model_with_ollamas_tag(fake: Service) -> None:
    assert fake.get("/v1/models/rwkv7:latest").json()["id"] == "rwkv7"


def test_a_query_of_a_route_that_reads_none_names_no_model(strict: Service) -> None:
    assert strict.get("/v1/models?model=gpt-9").status_code == 200


def test_anthropics_header_has_the_key(strict: Service) -> None:
    path, body = BODIES[0]
    for header, status in (("x-api-key", 200), ("x-key", 401)):
        assert strict.request("POST", path, json=body, headers={header: KEY}).status_code == status
    wrong = {"x-api-key": KEY, "Authorization": "Bearer wrong"}
    assert strict.request("POST", path, json=body, headers=wrong).status_code == 200
    answer = strict.request("POST", path, json=body, headers={"x-api-key": f"{KEY}0"})
    assert answer.status_code == 401 and answer.headers["request-id"] == answer.headers["x-request-id"]
