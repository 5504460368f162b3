"""Names of models in requests: Ollama's tag, unknown names."""

from __future__ import annotations

from typing import Any

import pytest

from routes.request.model_names import TunedModel, parse_model_id
from test.serving import Service, sse_data

V1, COMPLETE = "/v1/chat/completions", "/openai/v1/completions"
BODIES: list[tuple[str, dict[str, Any]]] = [
    (V1, {"contents": ["Hi"], "max_tokens": 2}),
    (V1, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}),
    (COMPLETE, {"prompt": "Hi", "max_tokens": 2}),
]


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


@pytest.mark.parametrize("tag", ["", ":latest"])
def test_a_fine_tuned_model_has_a_state_an_adapter_or_both(tag: str) -> None:
    """Its name in the engine never changes, because files have it."""
    for kind, has_state, has_adapter, name in (
        ("s", True, False, "ft-abac8132d08b91a7b50dbf03"),
        ("l", False, True, "ft-29da97e849a23a9634bd90d4"),
        ("b", True, True, "ft-142f63c4bbce55387d3bb24d"),
    ):
        found = parse_model_id(f"ft:rwkv7:me:poems:{kind}12{tag}")
        assert found == TunedModel("rwkv7", "me", name, has_state, has_adapter)


def test_the_entry_of_a_model_with_ollamas_tag(fake: Service) -> None:
    assert fake.get("/v1/models/rwkv7:latest").json()["id"] == "rwkv7"


def test_a_query_of_a_route_that_reads_none_names_no_model(strict: Service) -> None:
    assert strict.get("/v1/models?model=gpt-9").status_code == 200
