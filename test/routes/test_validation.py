"""Unknown and ignored fields: warnings in answers and the log, refused with --strict-fields."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from pydantic import BaseModel

from routes.openai.request import ChatBody, CompletionBody
from routes.openai.responses_body import ResponsesBody
from routes.request.bodies import PromptBody
from routes.request.json_body import validate
from routes.request.validation import MAX_WARNINGS, find_ignored, validated
from routes.request_context import RequestContext, set_current_request
from routes.translation import translator
from rwkv_batch.errors import ServiceError
from rwkv_batch.translation.plan import Origin, Translation
from test.programs.batch.test_openai_batches import begun, chat_line, ended, lines_of
from test.routes.conftest import openai_client
from test.serving import Service, sse_data, wait_for

V1, V2, BIG = "/v1/chat/completions", "/v2/chat/completions", "/big_batch/completions"
STATE, BRANCH, FIM = "/state/chat/completions", "/multi_state/chat/completions", "/FIM/v1/batch-FIM"
TRANSLATE = "/translate/v1/batch-translate"
CHAT, COMPLETE, RESPOND = "/openai/v1/chat/completions", "/openai/v1/completions", "/openai/v1/responses"
TWO: dict[str, Any] = {"contents": ["Hello", "Goodbye"], "max_tokens": 3}
ONE: dict[str, Any] = {"contents": ["Hello"], "max_tokens": 3}
TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
STREAMED: list[tuple[str, dict[str, Any]]] = [
    (V1, TWO),
    (V1, TALK),
    (V2, TWO),
    (BIG, {**TWO, "stream": False}),
    (FIM, {"prefix": ["a"], "suffix": ["b"], "max_tokens": 3}),
    (STATE, {**ONE, "session_id": "ignored"}),
    (BRANCH, {**ONE, "session_id": "ignored: branches"}),
    (CHAT, TALK),
    (CHAT, {**TALK, "n": 2}),
    (COMPLETE, {"prompt": "Once", "max_tokens": 3}),
    (RESPOND, {"input": "Hi", "max_output_tokens": 3}),
]
OTHERS: list[tuple[str, dict[str, Any]]] = [
    (TRANSLATE, {"source_lang": "en", "target_lang": "de", "text_list": ["42"]}),
    ("/v1/tokens/count", {"text": "Hello"}),
    ("/api/chat", {"messages": TALK["messages"], "stream": False, "options": {"num_predict": 6}}),
    ("/api/generate", {"prompt": "Hi", "stream": False, "options": {"num_predict": 6}}),
    ("/v1/messages", TALK),
    ("/v1/messages/count_tokens", {"messages": TALK["messages"]}),
    ("/completion", {"prompt": "Hi", "n_predict": 3}),
    ("/state/status", {}),
]


def path_id(value: Any) -> str | None:
    return value.replace("/", "-") if isinstance(value, str) else None


UNKNOWN = "temprature: is not a field of this request; the nearest known name is temperature"
MISSPELT = {"field": "temprature", "message": f"{UNKNOWN}; it was ignored"}


def fields_of(warnings: list[dict[str, str]]) -> list[str]:
    return [warning["field"] for warning in warnings]


@pytest.mark.parametrize(("path", "body"), [*STREAMED, *OTHERS], ids=path_id)
def test_an_answer_names_an_unknown_field(fake: Service, path: str, body: dict[str, Any]) -> None:
    answer = fake.post(path, {**body, "temprature": 0.5})
    assert answer.status_code == 200 and fields_of(answer.json()["warnings"]) == ["temprature"]
    assert "warnings" not in fake.post(path, {**body, "unknown": None}).json()


@pytest.mark.parametrize(("path", "body"), STREAMED, ids=path_id)
def test_the_first_event_of_a_stream_names_an_unknown_field(fake: Service, path: str, body: dict[str, Any]) -> None:
    first, *others = sse_data(fake.post(path, {**body, "temprature": 0.5, "stream": True}).text)
    if path == RESPOND:
        assert all(event["response"]["warnings"] == [MISSPELT] for event in (first, others[-1]))
    else:
        assert first["warnings"] == [MISSPELT] and not any("warnings" in event for event in others)


def test_a_query_that_is_not_read_is_named(fake: Service, strict: Service) -> None:
    (warning,) = fake.post(f"{V1}?temperature=0.5", TWO).json()["warnings"]
    problem = "?temperature: is in the query, which this route does not read"
    assert warning == {"field": "?temperature", "message": f"{problem}; it was ignored"}
    refused = strict.post(f"{V1}?temperature=0.5", TWO)
    assert refused.status_code == 422 and refused.json()["error"].startswith(problem)
    (warning,) = fake.get("/version?limit=3").json()["warnings"]
    assert warning["field"] == "?limit"
    many = "&".join(f"x{i}=1" for i in range(MAX_WARNINGS + 5))
    assert len(fake.get(f"/version?{many}").json()["warnings"]) == MAX_WARNINGS


def test_the_access_log_names_the_ignored_fields(fake: Service) -> None:
    fake.post(V1, {**TWO, "temprature": 0.5, "logged\nonce": 1})
    wait_for(lambda: r"ignored=['temprature', 'logged\nonce']" in fake.log.read_text(), 10, "the line is logged")


def test_the_official_client_has_the_warnings(fake: Service) -> None:
    messages: list[Any] = [{"role": "user", "content": "Hi", "nmae": "Ann"}]
    fields: dict[str, Any] = {"model": "rwkv7", "max_tokens": 3, "user": "u1", "extra_body": {"temprature": 0.5}}
    expected = ["messages[0].nmae", "user", "temprature"]
    for base in ("/openai/v1", "/v1"):
        with openai_client(fake, base) as client:
            answer: Any = client.chat.completions.create(messages=messages, **fields)
            assert answer.choices[0].message.content is not None
            assert sorted(fields_of(answer.warnings)) == sorted(expected)
            chunks: list[Any] = list(client.chat.completions.create(messages=messages, stream=True, **fields))
            assert sorted(fields_of(chunks[0].warnings)) == sorted(expected)
            assert all(chunk.choices for chunk in chunks) and not hasattr(chunks[1], "warnings")
    with openai_client(fake) as client:
        fields = {"model": "rwkv7", "input": "Hi", "truncation": "auto", "max_output_tokens": 3}
        response: Any = client.responses.create(**fields)
        assert fields_of(response.warnings) == ["truncation"]
        events: list[Any] = list(client.responses.create(stream=True, **fields))
        assert [fields_of(events[at].response.warnings) for at in (0, -1)] == [["truncation"], ["truncation"]]


def test_a_batch_line_has_its_warnings(fake: Service) -> None:
    with openai_client(fake) as client:
        batch = begun(client, [chat_line(0, temprature=0.5), chat_line(1)])
        answers = lines_of(client, ended(client, batch.id).output_file_id)
    assert answers["c0"]["response"]["body"]["warnings"] == [MISSPELT]
    assert "warnings" not in answers["c1"]["response"]["body"]


def test_an_unknown_language_is_a_warning(fake: Service) -> None:
    for code in ("de", "zh-TW", "iw", "German", "german", "Traditional Chinese"):
        answer = fake.post(TRANSLATE, {"source_lang": "en", "target_lang": code, "text_list": ["42"]})
        assert "warnings" not in answer.json()
    for code, near in (("Germn", "; the nearest known name is German"), ("xx-YY", "")):
        answer = fake.post(TRANSLATE, {"source_lang": "auto", "target_lang": code, "text_list": ["42"]})
        (warning,) = answer.json()["warnings"]
        assert warning == {
            "field": "target_lang",
            "message": f"target_lang: unknown language {code!r}; use an ISO code or an English name{near}; "
            "the prompt has it unchanged",
        }


@pytest.mark.parametrize(("path", "body"), [*STREAMED, *OTHERS[:-1]], ids=path_id)
def test_strict_fields_refuse_an_unknown_field(strict: Service, path: str, body: dict[str, Any]) -> None:
    refused = strict.post(path, {**body, "temprature": 0.5})
    expected = "temprature: is not a field of this request"
    error = refused.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert message.startswith(expected)
    if path.startswith(("/openai", "/completion")) or (path, body) == (V1, TALK):
        assert error["param"] == "temprature"
    elif not path.startswith("/v1/messages"):
        assert (refused.json()["field"], refused.json()["given"]) == ("temprature", 0.5)
    is_native = refused.status_code == 422
    assert refused.status_code in (400, 422)
    assert is_native == (isinstance(error, str) and not path.startswith("/api"))


def test_strict_fields_refuse_more(strict: Service) -> None:
    """Nested fields, queries, languages and lines of batches; known fields that are ignored stay warnings."""
    with openai_client(strict) as client:
        messages: list[Any] = [{"role": "user", "content": "Hi", "nmae": "Ann"}]
        with pytest.raises(BadRequestError) as refused:
            client.chat.completions.create(model="rwkv7", messages=messages)
        assert refused.value.param == "messages[0].nmae"
        assert "is not a field of messages[0]; the nearest known name is name" in refused.value.message
        answer: Any = client.chat.completions.create(
            model="rwkv7", messages=[{"role": "user", "content": "a"}], max_tokens=3, user="u"
        )
        assert fields_of(answer.warnings) == ["user"]
        batch = begun(client, [chat_line(0, temprature=0.5)])
        errors = lines_of(client, ended(client, batch.id).error_file_id)
        assert errors["c0"]["response"]["body"]["error"]["param"] == "temprature"
    exported = strict.get("/state/export", params={"session_id": "a", "dialog_idx": 1})
    assert exported.status_code == 422 and exported.json()["field"] == "dialog_idx"
    translated = strict.post(TRANSLATE, {"source_lang": "Germn", "target_lang": "en", "text_list": ["42"]})
    assert translated.status_code == 422 and translated.json()["field"] == "source_lang"
    assert "the nearest known name is German" in translated.json()["error"]


def test_the_simplest_route_ignores_the_sampling_fields_of_others(strict: Service) -> None:
    fields = {"top_k": 5, "top_p": 0.5, "alpha_presence": 1.0, "alpha_decay": 0.9, "frequency_penalty": 1}
    answer = strict.post(BIG, {**TWO, **fields, "stream": False})
    assert answer.status_code == 200 and fields_of(answer.json()["warnings"]) == list(fields)


def test_an_answer_can_be_sent_back(strict: Service) -> None:
    """The fields of earlier answers are known, and no warning names them."""
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    with openai_client(strict) as client:
        asked: list[Any] = [{"role": "user", "content": "Hi"}]
        first = client.chat.completions.create(model="rwkv7", messages=asked, max_tokens=3)
        again: Any = client.chat.completions.create(
            model="rwkv7", messages=[*asked, first.choices[0].message, *asked], tools=tools, max_tokens=3
        )
        assert not hasattr(again, "warnings")
        response = client.responses.create(model="rwkv7", input="Hi", max_output_tokens=3)
        items: Any = [item.model_dump() for item in response.output]
        answer: Any = client.responses.create(model="rwkv7", input=[*items, *asked], max_output_tokens=3)
        assert not hasattr(answer, "warnings")


@pytest.mark.parametrize(
    ("model", "method"),
    [
        (ChatBody, lambda client: client.chat.completions.create),
        (PromptBody, lambda client: client.chat.completions.create),
        (CompletionBody, lambda client: client.completions.create),
        (ResponsesBody, lambda client: client.responses.create),
    ],
)
def test_every_parameter_of_the_official_client_is_known(model: type[BaseModel], method: Any) -> None:
    client_only = {"extra_headers", "extra_query", "extra_body", "timeout"}
    names = set(inspect.signature(method(OpenAI(api_key="none"))).parameters) - client_only
    known = {info.alias or name for name, info in model.model_fields.items()}
    elsewhere = {"parallel_tool_calls", "functions", "function_call", "audio", "modalities", "verbosity"}
    on_openai_only = elsewhere | {"reasoning_effort", "web_search_options"} if model is PromptBody else set()
    assert names - known == on_openai_only


def found(model: type[Any], data: dict[str, Any]) -> list[str]:
    return [one.field for one in find_ignored(validate(model, data), data)]


def test_nested_fields_are_named_with_their_place() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"any": 1}, "stric": True}, "x": 1}
    chat = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}], "tool_cals": []}
        ],
        "tools": [tool],
        "tool_choice": {"type": "function", "function": {"name": "f", "b": 1}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "shema": {}, "schema": {"any": 1}}},
        "stream_options": {"include_usages": True, "include_obfuscation": False},
        "template": {"sytem": "S"},
        "states": [{"nam": "a", "name": ""}],
        "logit_bias": {"5": 1},
    }
    assert found(ChatBody, chat) == [
        "messages[0].content[0].cache_control",
        "messages[0].tool_cals",
        "tools[0].function.stric",
        "tools[0].x",
        "tool_choice.function.b",
        "response_format.json_schema.shema",
        "stream_options.include_usages",
        "template.sytem",
        "states[0].nam",
    ]
    item = {"role": "user", "content": "a", "x": 1}
    response = {"input": [item], "text": {"format": {"type": "text", "y": 1}}, "reasoning": {"efort": "low"}}
    assert found(ResponsesBody, response) == ["input[0].x", "text.format.y", "reasoning.efort"]


def test_warnings_are_bounded() -> None:
    request = RequestContext()
    set_current_request(request)
    body = {"contents": ["a"], **{f"{'n' * 300}{i}": 1 for i in range(100)}}
    validated(PromptBody, body)
    assert len(request.warnings) == MAX_WARNINGS + 1 and request.warnings[-1]["field"] == ""
    assert len(json.dumps(request.warnings)) < MAX_WARNINGS * 300
    with pytest.raises(ServiceError) as refused:
        validated(PromptBody, body, is_strict=True)
    assert len(str(refused.value)) < 300


def test_a_suspicious_translation_is_not_logged_as_ignored() -> None:
    request = RequestContext()
    set_current_request(request)
    translator._report_problems(
        [Translation("a", "en", 1.0, ["repeats itself"], Origin.MODEL)] * (MAX_WARNINGS + 1), "text_list"
    )
    assert request.warnings[0] == {"field": "text_list[0]", "message": "text_list[0]: the translation repeats itself"}
    assert len(request.warnings) == MAX_WARNINGS + 1 and request.ignored == []
