"""Ollama's API with its own package. The fake engine says the text in the last user message."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import ollama
import pytest

from routes.ollama.generation import OLLAMA_ERRORS, CallCollector
from routes.ollama.request import OllamaGenerateBody
from routes.response.event_stream import OutputDecoder
from routes.response.generate import SseChunks
from routes.response.tool_call_parser import DeltaToolCall
from rwkv_batch.request import Delta, JobEvents
from rwkv_batch.tokenizer import Tokenizer
from test.routes.test_handlers import ENDED, FAILED, FakeStream, Silent
from test.serving import Service

CALL = '```json\n{"name": "weather", "arguments": {"place": "Rome", "days": [1, 2]}}\n```'
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}


def weather(place: str) -> str:
    """Return the weather.

    Args:
        place: where
    """
    return place


def say(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"say {text}"}]


@pytest.fixture
def client(fake: Service) -> ollama.Client:
    return ollama.Client(fake.url)


def test_lists_of_models(client: ollama.Client) -> None:
    (listed,), (loaded,) = client.list().models, client.ps().models
    assert listed.model == loaded.model == "rwkv7:latest"
    assert listed.digest == loaded.digest and len(listed.digest or "") == 64 and listed.modified_at
    assert loaded.expires_at and loaded.context_length == 262_144


def test_about_a_model(service: Service) -> None:
    for name in ("rwkv7", "rwkv7:latest"):
        shown = ollama.Client(service.url).show(name)
        assert {"completion", "tools", "thinking", "insert"} == set(shown.capabilities or ())
        assert shown.modelinfo and shown.modelinfo["general.architecture"] == "rwkv7"
        assert shown.modelinfo["rwkv7.context_length"] == 262_144 and shown.modelinfo["rwkv7.block_count"] == 2
        assert shown.details and shown.details.family == "rwkv7" and shown.details.format == "pth"
    assert "temperature 1.0" in (shown.parameters or "")
    version = service.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)
    assert service.post("/api/show", {"name": "rwkv7"}).status_code == 200
    assert service.request("HEAD", "/").status_code == 200


def test_a_stream_has_the_text_of_the_whole_answer(service: Service) -> None:
    client = ollama.Client(service.url)
    ask: dict[str, Any] = {"model": "rwkv7:latest", "messages": say("x"), "options": {"num_predict": 9, "seed": 3}}
    ask["options"]["stop"] = ["no such text"]
    whole = client.chat(**ask, logprobs=True, top_logprobs=1)
    *parts, last = client.chat(**ask, stream=True)
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert not any(part.done for part in parts) and last.done and last.message.content == ""
    assert (last.eval_count, last.prompt_eval_count) == (whole.eval_count, whole.prompt_eval_count)
    assert last.done_reason == whole.done_reason
    for one in (last, whole):  # the prompt's time is the engine's, with a stream and without
        prompt, evaluation = one.prompt_eval_duration or 0, one.eval_duration or 0
        assert 0 < prompt < prompt + evaluation <= (one.total_duration or 0) and evaluation > 1
    assert "".join(one.token for one in whole.logprobs or ()).strip() == (whole.message.content or "").strip()
    assert len((whole.logprobs or ())[0].top_logprobs or ()) == 1


def test_a_format_constrains_the_answer(service: Service) -> None:
    client = ollama.Client(service.url)
    ask: dict[str, Any] = {"model": "rwkv7", "messages": say("x"), "options": {"num_predict": 200}}
    said = json.loads(client.chat(**ask, format=SCHEMA).message.content or "")
    assert list(said) == ["a"] and 1 <= said["a"] <= 9
    raw = client.generate("rwkv7", "x", raw=True, format=SCHEMA, options={"num_predict": 200}).response
    assert list(json.loads(raw)) == ["a"]
    bad = {"type": "object", "properties": {"a": {"type": "strang"}}}
    for stream in (False, True):  # the status of a stream waits for the schema
        with pytest.raises(ollama.ResponseError, match=r"format\.properties\.a: ") as refused:
            list(client.chat(**ask, format=bad, stream=stream))
        assert refused.value.status_code == 400


def test_lines_are_json_without_blank_ones(fake: Service) -> None:
    answer = fake.post("/api/chat", {"messages": say("One.\u2028Two."), "options": {"tfs_z": 0.5, "num_ctx": 9}})
    assert answer.headers["content-type"] == "application/x-ndjson" and answer.text.endswith("}\n")
    first, *others = map(json.loads, answer.text.splitlines())
    assert [one["field"] for one in first["warnings"]] == ["options.tfs_z"]
    assert not any("warnings" in other for other in others)
    assert "".join(one["message"]["content"] for one in (first, *others)) == "One.\u2028Two."


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_and_calls(client: ollama.Client, stream: bool) -> None:
    answer = client.chat("rwkv7", messages=say(f">Hm.</think>{CALL}"), think=True, tools=[weather], stream=stream)
    parts = list(answer) if stream else [answer]
    assert "".join(part.message.thinking or "" for part in parts) == "Hm."
    (call,) = [call.function for part in parts for call in part.message.tool_calls or ()]
    assert (call.name, call.arguments) == ("weather", {"place": "Rome", "days": [1, 2]})
    assert parts[-1].done and parts[-1].done_reason == "stop" and not parts[-1].message.content


def test_a_call_that_was_cut_off_is_dropped() -> None:
    deltas = [DeltaToolCall(0, "f", "{}"), DeltaToolCall(1, "g", '{"a": ')]
    collector = CallCollector()
    assert collector.feed(deltas[:1], final=False) == []
    assert collector.feed(deltas[1:], final=True) == [{"function": {"name": "f", "arguments": {}}}]


def test_earlier_messages(fake: Service, client: ollama.Client) -> None:
    """An answer is sent back with the results of its calls."""
    answer = client.chat("rwkv7", messages=say(CALL), tools=[weather])
    messages = [*say(CALL), answer.message, {"role": "tool", "content": "sunny", "tool_name": "weather"}]
    actual = client.chat("rwkv7", messages=messages, tools=[weather], options={"num_predict": 1})
    arguments = '{"place": "Rome", "days": [1, 2]}'
    call = {"id": "1", "function": {"name": "weather", "arguments": arguments}}
    openai = [*say(CALL), {"role": "assistant", "content": None, "tool_calls": [call]}]
    openai.append({"role": "tool", "tool_call_id": "1", "content": "sunny"})
    tool = ollama._utils.convert_function_to_tool(weather).model_dump(exclude_none=True)
    counted = fake.post("/v1/tokens/count", {"messages": openai, "tools": [tool]}).json()["tokens"]
    assert actual.prompt_eval_count == counted


def test_a_context_continues_an_answer(client: ollama.Client) -> None:
    first = client.generate("rwkv7", "say Hello.", system="Be brief.")
    prompt = "System: Be brief.\n\nUser: say Hello.\n\nAssistant: <think>\n</think>"
    tokenizer = Tokenizer()
    assert list(first.context or ()) == tokenizer.encode(prompt) + tokenizer.encode("Hello.")
    second = client.generate("rwkv7", "say Bye.", context=first.context)
    added = tokenizer.encode("\n\nUser: say Bye.\n\nAssistant: <think>\n</think>")
    assert second.prompt_eval_count == len(first.context or ()) + len(added)
    *_, last = client.generate("rwkv7", "say Bye.", context=first.context, stream=True)
    assert last.context == second.context and second.response == "Bye."


def test_raw_prompts(client: ollama.Client) -> None:
    assert client.generate("rwkv7", "say  As it is ", raw=True).response == " As it is "
    filled = client.generate("rwkv7", "a(", suffix=")", options={"num_predict": 1})
    assert filled.prompt_eval_count == len(Tokenizer().encode("✿prefix✿✿suffix✿)✿middle✿a("))


def test_loading_and_unloading(client: ollama.Client) -> None:
    assert client.generate("rwkv7").done_reason == "load"
    assert client.chat("rwkv7", messages=[], keep_alive=0).done_reason == "unload"
    (line,) = client.generate("rwkv7", stream=True)
    assert line.done and line.response == ""
    assert client.pull("rwkv7").status == "success"


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_output_has_its_status(client: ollama.Client, stream: bool) -> None:
    """Also in a stream."""
    asked: list[tuple[str, dict[str, Any], int, str]] = [
        ("nobody", {}, 404, "model 'nobody' not found"),
        ("rwkv7", {"options": {"temperature": -1}}, 400, "options.temperature: must"),
        ("rwkv7", {"options": {"num_predict": 2_000_000}}, 400, "options.num_predict: must be at most 1048576"),
        ("rwkv7", {"messages": [{"role": "user", "content": "fail@3"}]}, 500, "broken on demand"),
    ]
    for model, fields, status, message in asked:
        with pytest.raises(ollama.ResponseError, match=message) as refused:
            list(client.chat(**{"model": model, "messages": say("x"), "stream": stream, **fields}))
        assert refused.value.status_code == status


def test_an_error_in_a_stream_is_a_line(client: ollama.Client) -> None:
    lines = client.chat("rwkv7", messages=[{"role": "user", "content": "break"}], stream=True)
    assert next(lines).message.content == "break"
    with pytest.raises(ollama.ResponseError, match="broken on demand") as broken:
        list(lines)
    assert broken.value.status_code == -1


def test_a_heartbeat_is_white_space_before_the_next_line() -> None:
    class Quiet(Silent):
        error_format = OLLAMA_ERRORS

        def chunk(self, updates: list[Any]) -> bytes:
            return b'{"done": true}\n' if updates[0].row == 0 else b""

    failed = JobEvents(job_id="j", deltas=[Delta(1, b"", 1, FAILED)])
    events = FakeStream([], [], [failed], [], [JobEvents(job_id="j", deltas=[Delta(0, b"", 1, ENDED)], done=True)])
    chunks = SseChunks(events, OutputDecoder(2), Quiet())  # type: ignore[arg-type]
    first, second = b"".join(chunks).decode().splitlines()
    assert json.loads(first)["error"] and json.loads(second) == {"done": True}


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.pull("llama3"),
        lambda client: client.show("llama3"),
        lambda client: client.push("rwkv7"),
        lambda client: client.create("mine", from_="rwkv7"),
        lambda client: client.copy("rwkv7", "mine"),
        lambda client: client.delete("rwkv7"),
        lambda client: client.embed("rwkv7", "a"),
        lambda client: client.embeddings("rwkv7", "a"),
    ],
)
def test_what_is_not_supported_is_refused(client: ollama.Client, call: Callable[[ollama.Client], Any]) -> None:
    with pytest.raises(ollama.ResponseError, match=r"not supported|not found") as refused:
        call(client)
    assert refused.value.status_code == 404


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"context": [1] * 262_144}, "context"),
        ({"logprobs": True, "top_logprobs": 20, "options": {"num_predict": 1_000_000}}, "logprobs"),
        ({"format": "json", "options": {"num_predict": 2_000_000}}, "options.num_predict"),
    ],
)
def test_errors_name_fields_of_the_request(fake: Service, fields: dict[str, Any], field: str) -> None:
    """Not those of the OpenAI routes, also in their texts."""
    refused = fake.post("/api/generate", {"prompt": "Hi", "stream": False, **fields})
    assert (refused.status_code, refused.json()["field"]) == (400, field), refused.text
    assert "max_tokens" not in refused.text


def test_a_json_answer_has_the_constraint_of_its_field() -> None:
    for raw in (False, True):
        constraint = (
            OllamaGenerateBody.model_validate({"prompt": "a", "format": "json", "raw": raw}).request().constraint
        )
        assert constraint is not None and constraint.field == "format"


def test_an_image_is_refused(fake: Service) -> None:
    body = {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}
    refused: httpx.Response = fake.post("/api/chat", body)
    assert refused.status_code == 400 and refused.json()["field"] == "messages[0].images"
