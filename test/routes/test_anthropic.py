"""Anthropic's Messages API with its own package. The fake engine says the text in the last user message."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from routes.anthropic.messages import ANTHROPIC_ERRORS, PING
from routes.anthropic.request import MessagesBody
from routes.response.event_stream import OutputDecoder
from routes.response.generate import SseChunks
from rwkv_batch.request import Delta, JobEvents
from test.routes.test_handlers import ENDED, FakeStream, Silent
from test.serving import Service

if TYPE_CHECKING:  # its import takes a second of each of pytest's workers
    from anthropic import Anthropic

CALL = '```json\n{"name": "weather", "arguments": {"place": "Rome"}}\n```'
TOOLS: list[Any] = [
    {
        "name": "weather",
        "description": "The weather.",
        "input_schema": {"type": "object", "properties": {"place": {"type": "string", "maxLength": 5}}},
        "cache_control": {"type": "ephemeral"},
    }
]
MODEL = "rwkv7"


def say(text: str) -> list[Any]:
    return [{"role": "user", "content": f"say {text}"}]


def opened(service: Service, **options: Any) -> Anthropic:
    from anthropic import Anthropic

    return Anthropic(base_url=service.url, **{"api_key": "none", "max_retries": 0, "timeout": 120, **options})


@pytest.fixture
def client(fake: Service) -> Iterator[Anthropic]:
    with opened(fake) as made:
        yield made


@pytest.fixture
def real(service: Service) -> Iterator[Anthropic]:
    with opened(service) as made:
        yield made


def test_time_of_many_blocks_grows_with_their_number() -> None:
    blocks = [{"type": "text", "text": "x" * 300}] * 10_000
    body = MessagesBody.model_validate({"max_tokens": 1, "messages": [{"role": "user", "content": blocks}]})
    started = time.thread_time()
    (message,) = body.chat().messages
    assert time.thread_time() - started < 1, "CPU time of this thread, however busy the machine is"
    assert message.text == "\n".join(["x" * 300] * 10_000)
    results = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": blocks[:2]}]}
    body = MessagesBody.model_validate({"max_tokens": 1, "messages": [results]})
    assert body.size == 600, "decides whether a thread reads it"


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_text_and_calls_are_blocks(client: Anthropic, stream: bool) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    system: list[Any] = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    ask: dict[str, Any] = {"model": MODEL, "max_tokens": 99, "tools": TOOLS, "thinking": thinking, "system": system}
    ask["messages"] = say(f">Hm.</think>So: {CALL}\n{CALL}")
    if stream:
        with client.messages.stream(**ask) as events:
            kinds = [event.type for event in events]
            message: Any = events.get_final_message()
        assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
        assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    else:
        message = client.messages.create(**ask)
    thought, text, one, other = message.content
    assert (thought.type, thought.thinking, text.type, text.text) == ("thinking", "Hm.", "text", "So:")
    assert [(call.type, call.name, call.input) for call in (one, other)] == [
        ("tool_use", "weather", {"place": "Rome"})
    ] * 2
    assert one.id != other.id and message.stop_reason == "tool_use" and message.stop_sequence is None
    assert client.messages.create(**{**ask, "messages": [*say("x"), message_of(message), *results(one, other)]})


def message_of(answer: Any) -> Any:
    return {"role": "assistant", "content": answer.content}


def results(*calls: Any) -> list[Any]:
    blocks = [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny", "is_error": True} for call in calls]
    return [{"role": "user", "content": [*blocks, {"type": "text", "text": "say Thanks."}]}]


def test_text_helpers(client: Anthropic) -> None:
    with client.messages.stream(model=MODEL, max_tokens=9, messages=say("One.\u2028Two.")) as events:
        assert "".join(events.text_stream) == "One.\u2028Two."
        message = events.get_final_message()
    assert message.stop_reason == "end_turn" and message.usage.output_tokens > 0 and message.usage.input_tokens > 0
    assert message.id.startswith("msg_") and events.response.headers["request-id"]


def test_a_stop_sequence_is_named(real: Anthropic) -> None:
    ask: dict[str, Any] = {"model": MODEL, "max_tokens": 40, "messages": say("x"), "extra_body": {"temperature": 0}}
    whole = real.messages.create(**ask)
    (block,) = whole.content
    assert block.type == "text" and whole.stop_sequence is None
    cut = block.text[3:6]
    banned = real.messages.create(**ask | {"extra_body": {"temperature": 0, "bad_words": [block.text[:5]]}})
    assert block.text[:5] not in banned.content[0].text  # type: ignore[union-attr]
    stopped = real.messages.create(**ask, stop_sequences=["no such text", cut])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", cut)
    with real.messages.stream(**ask, stop_sequences=[cut]) as events:
        streamed = events.get_final_message()
    assert (streamed.stop_reason, streamed.stop_sequence) == ("stop_sequence", cut)
    assert streamed.content[0].text == block.text[: block.text.index(cut)]  # type: ignore[union-attr]


def test_a_forced_call_a_schema_and_a_count(real: Anthropic) -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": say("x"), "tools": TOOLS}
    choice: Any = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    called = real.messages.create(**ask, max_tokens=200, tool_choice=choice)
    (call,) = called.content
    assert call.type == "tool_use" and called.stop_reason == "tool_use" and set(call.input) <= {"place"}
    counted = real.messages.count_tokens(**ask, tool_choice=choice)
    usage = called.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    config: Any = {"format": {"type": "json_schema", "schema": schema}}
    said = real.messages.create(model=MODEL, max_tokens=99, messages=say("x"), output_config=config).content[0]
    assert said.type == "text" and json.loads(said.text)["a"] in (1, 2)
    cut = real.messages.create(**ask, max_tokens=3, tool_choice=choice)
    assert cut.stop_reason == "max_tokens"


def test_messages_become_a_prompt(fake: Service, client: Anthropic) -> None:
    call = {"type": "tool_use", "id": "1", "name": "weather", "input": {"place": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "sunny"}]}
    messages: list[Any] = [
        {"role": "user", "content": "Hi."},
        {"role": "user", "content": [{"type": "text", "text": "Rome?"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}, call]},
        {"role": "user", "content": [{**result, "is_error": True}, {"type": "text", "text": "So?"}]},
        {"role": "assistant", "content": "It is"},
    ]
    counted = client.messages.count_tokens(model=MODEL, messages=messages, tools=TOOLS, system="Be brief.")
    function = {"name": "weather", "arguments": '{"place": "Rome"}'}
    openai = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi.\nRome?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": "Error: sunny"},
        {"role": "user", "content": "So?"},
        {"role": "assistant", "content": "It is"},
    ]
    tool = {"name": "weather", "description": "The weather.", "parameters": TOOLS[0]["input_schema"]}
    body = {"messages": openai, "tools": [{"type": "function", "function": tool}], "max_tokens": 1}
    usage = fake.post("/openai/v1/chat/completions", body).json()["usage"]
    assert counted.input_tokens == usage["prompt_tokens"]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"model": "ft:x"}, "NotFoundError", "model 'ft:x' not found"),
        ({"max_tokens": 0}, "BadRequestError", "max_tokens: must"),
        ({"max_tokens": 2_000_000}, "BadRequestError", "max_tokens: must be at most 1048576"),
        ({"messages": []}, "BadRequestError", "messages: must"),
        ({"tools": [{"type": "web_search_1", "name": "s"}]}, "BadRequestError", "server tools are not"),
        ({"tools": TOOLS + TOOLS}, "BadRequestError", "two functions are named"),
        ({"tool_choice": {"type": "tool", "name": "f"}, "tools": TOOLS}, "BadRequestError", "names 'f'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "BadRequestError",
            r"messages\[0\].content\[0\]: must be of type text, .* images, documents",
        ),
        ({"messages": [{"role": "user", "content": "fail@1"}]}, "InternalServerError", "broken on demand"),
    ],
)
def test_errors_have_anthropics_form(client: Anthropic, fields: dict[str, Any], error: str, message: str) -> None:
    import anthropic

    with pytest.raises(getattr(anthropic, error), match=message) as refused:
        client.messages.create(**{"model": MODEL, "max_tokens": 9, "messages": say("x"), **fields})
    body: Any = refused.value.body
    assert body["type"] == "error" and body["error"]["type"] in (
        "invalid_request_error",
        "not_found_error",
        "api_error",
    )
    assert refused.value.request_id == body["request_id"]


def test_an_error_in_a_stream(client: Anthropic) -> None:
    import anthropic

    ask: list[Any] = [{"role": "user", "content": "break"}]
    failure = pytest.raises(anthropic.APIStatusError, match="broken on demand")
    with failure, client.messages.stream(model=MODEL, max_tokens=99, messages=ask) as events:
        list(events)


def test_a_heartbeat_is_a_ping() -> None:
    class Quiet(Silent):
        error_format = ANTHROPIC_ERRORS

    events = FakeStream([], [JobEvents(job_id="j", deltas=[Delta(0, b"", 1, ENDED)], done=True)])
    chunks = SseChunks(events, OutputDecoder(1), Quiet())  # type: ignore[arg-type]
    assert list(chunks) == [PING, PING] and PING == b'event: ping\ndata: {"type":"ping"}\n\n'


def test_models_and_unknown_fields(fake: Service, client: Anthropic) -> None:
    (model,) = client.models.list(limit=1000).data
    assert (model.id, model.display_name, model.type) == (MODEL, MODEL, "model") and model.created_at
    assert client.models.retrieve(MODEL).id == MODEL
    body = {"model": "claude-x", "max_tokens": 9, "messages": say("Hi."), "context_management": {"edits": []}}
    answer = fake.post("/v1/messages?beta=true", body, headers={"anthropic-beta": "a,b"}).json()
    assert [one["field"] for one in answer["warnings"]] == ["model", "context_management"]
    assert client.beta.messages.count_tokens(model=MODEL, messages=say("Hi.")).input_tokens > 0
