"""Constrained texts over HTTP: every field, both formats, streams, errors."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import openai
import pytest

from test.routes.conftest import openai_client
from test.serving import Service, row_texts, sse_data

pytestmark = pytest.mark.slow

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
SAMPLING = {"max_tokens": 400, "seed": 3, "alpha_presence": 0, "alpha_frequency": 0}


@pytest.fixture(scope="module")
def client(one_worker: Service) -> openai.OpenAI:
    return openai_client(one_worker)


def content(answer: Any) -> list[str]:
    assert "choices" in answer, answer
    return [choice["message"]["content"] for choice in answer["choices"]]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v2/chat/completions", "/big_batch/completions"])
def test_native_routes_constrain_every_row(one_worker: Service, path: str) -> None:
    body = {"contents": ["one", "two", "three"], "stream": False, **SAMPLING}
    for text in content(one_worker.post(path, {**body, "json_schema": SCHEMA}).json()):
        jsonschema_rs.validate(SCHEMA, json.loads(text))
    assert set(content(one_worker.post(path, {**body, "choice": ["yes", "no"]}).json())) <= {"yes", "no"}
    numbers = content(one_worker.post(path, {**body, "regex": "[0-9]{4}"}).json())
    assert all(len(text) == 4 and text.isdigit() for text in numbers), numbers
    answer = one_worker.post(path, {**body, "grammar": 'start: "(" N ")"\nN: /[0-9]+/', "max_tokens": 6}).json()
    assert all(text[0] == "(" for text in content(answer))


def test_a_stream_ends_with_the_grammar(one_worker: Service) -> None:
    events = sse_data(
        one_worker.post("/v1/chat/completions", {"contents": ["x"], "choice": ["a\n\nb"], "stream": True}).text
    )
    assert row_texts(events) == {0: "a\n\nb"}, "the usual stops are not those of a constrained text"
    assert events[-1]["choices"][-1]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"json_schema": {"properties": {"a": {"not": {}}}}}, "json_schema.properties.a"),
        ({"json_schema": {"const": float("nan")}}, "json_schema.const"),
        ({"json_schema": 3}, "json_schema"),
        ({"grammar": "start: nothing"}, "grammar"),
        ({"regex": "("}, "regex"),
        ({"choice": []}, "choice"),
        ({"choice": [""]}, "choice[0]"),
        ({"choice": ["a"], "regex": "a"}, "choice"),
        ({"regex": "a" * 200_000}, "regex"),
    ],
)
def test_unsupported_constraints_are_422_with_their_field(
    one_worker: Service, fields: dict[str, Any], field: str
) -> None:
    response = one_worker.post("/v1/chat/completions", {"contents": ["x"], **fields})
    assert (response.status_code, response.json()["field"]) == (422, field), response.text
    assert response.json()["given"] is not None


def test_openai_response_format(client: openai.OpenAI) -> None:
    def ask(expected: Any, **fields: Any) -> str:
        answer = client.chat.completions.create(
            model="rwkv7",
            messages=[{"role": "user", "content": "A person, please."}],
            response_format=expected,
            max_tokens=400,
            seed=4,
            **fields,
        )
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].message.content or ""

    named = {"name": "person", "schema": SCHEMA, "strict": True}
    jsonschema_rs.validate(SCHEMA, json.loads(ask({"type": "json_schema", "json_schema": named})))
    loose = {"name": "person", "schema": {**SCHEMA, "not": {}}, "strict": False}
    jsonschema_rs.validate(SCHEMA, json.loads(ask({"type": "json_schema", "json_schema": loose})))
    assert isinstance(ask({"type": "text"}, stop=["e"]), str)


def test_response_format_of_raw_prompts(one_worker: Service) -> None:
    named = {"name": "person", "schema": SCHEMA, "strict": True}
    body = {"prompt": ["one", "two"], **SAMPLING, "response_format": {"type": "json_schema", "json_schema": named}}
    for choice in one_worker.post("/openai/v1/completions", body).json()["choices"]:
        assert choice["finish_reason"] == "stop"
        jsonschema_rs.validate(SCHEMA, json.loads(choice["text"]))
    both = one_worker.post("/openai/v1/completions", {**body, "regex": "a"})
    assert (both.status_code, both.json()["error"]["param"]) == (400, "response_format")


TOOL = {"type": "function", "function": {"name": "f"}}
BATCH, TURN = {"contents": ["x"]}, {"contents": ["x"], "session_id": "s"}
SISTERS: dict[str, dict[str, Any]] = {
    "/openai/v1/completions": {"prompt": "x"}, "/v1/chat/completions": BATCH, "/v2/chat/completions": BATCH,
    "/big_batch/completions": BATCH, "/FIM/v1/batch-FIM": {"prefix": ["x"], "suffix": ["y"]},
    "/state/chat/completions": TURN, "/multi_state/chat/completions": TURN, "/openai/v1/responses": {"input": "x"},
}  # fmt: skip


@pytest.mark.parametrize("path", SISTERS)
def test_fields_of_other_routes_are_supported_or_refused_by_name(one_worker: Service, path: str) -> None:
    refused: list[dict[str, Any]] = [{"response_format": {"type": "nonsense"}}]
    harmless: dict[str, Any] = {"response_format": {"type": "text"}}
    if path != "/openai/v1/responses":
        refused += [{"tools": [TOOL]}, {"tool_choice": "required"}, {"tool_choice": {"type": "function"}}]
        harmless |= {"tools": [], "tool_choice": "auto"}
    if path != "/openai/v1/completions":
        refused += [{"response_format": {"type": "json_object"}}]
    for fields in refused:
        response = one_worker.post(path, {**SISTERS[path], **fields})
        answer = response.json()
        field = answer["error"]["param"] if path.startswith("/openai") else answer["field"]
        assert response.status_code in (400, 422) and field.split(".")[0] in fields, response.text
    assert one_worker.post(path, {**SISTERS[path], **harmless, "max_tokens": 1, "stream": False}).status_code == 200


def test_json_object_is_an_object(client: openai.OpenAI) -> None:
    text = ""
    stream = client.chat.completions.create(
        model="rwkv7",
        messages=[{"role": "user", "content": "JSON, please."}],
        response_format={"type": "json_object"},
        logit_bias={"126": 20, "2364": -100},
        max_tokens=400,
        stream=True,
    )
    for chunk in stream:
        text += chunk.choices[0].delta.content or ""
    assert isinstance(json.loads(text), dict)


def test_an_openai_error_names_the_path_in_the_schema(client: openai.OpenAI) -> None:
    named = {"name": "x", "schema": {"properties": {"a": {"not": {}}}}, "strict": True}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="rwkv7",
            messages=[{"role": "user", "content": "x"}],
            response_format={"type": "json_schema", "json_schema": named},  # type: ignore[arg-type]
        )
    assert refused.value.param == "response_format.json_schema.schema.properties.a"
    assert "not" in str(refused.value)


RULES = 8000
HARMFUL = {
    "a chain of rules": {
        "grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(RULES)) + f'r{RULES}: "a"'
    },
    "a chain of references": {
        "json_schema": {
            "$ref": "#/$defs/0",
            "$defs": {**{str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(3000)}, "3000": {"type": "string"}},
        }
    },
    "intersections": {"grammar": "start: T\nT: " + " & ".join(f"/(?s:.*)a(?s:.{{{i}}})/" for i in range(1, 60))},
    "repetitions of repetitions": {"regex": "(((a{1000}){1000}){1000}){1000}"},
}


@pytest.mark.parametrize("harm", HARMFUL)
def test_harmful_constraints_are_refused(one_worker: Service, harm: str) -> None:
    engine = one_worker.pids()["engine"]
    refused = one_worker.post(
        "/v1/chat/completions", {"contents": ["one"], "stream": False, **SAMPLING, **HARMFUL[harm]}
    )
    (field,) = HARMFUL[harm]
    assert refused.status_code == 422 and refused.json()["field"].startswith(field), refused.text
    answer = one_worker.post("/v1/chat/completions", {"contents": ["one"], "stream": False, "choice": ["yes"]}).json()
    assert content(answer) == ["yes"]
    assert one_worker.pids()["engine"] == engine
