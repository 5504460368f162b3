"""`/openai/v1/responses` with OpenAI's own package: text, JSON, reasoning, calls, errors; complete and streamed."""

from __future__ import annotations

import json
import uuid
from typing import Any, Literal

import msgspec
import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, ConfigDict, TypeAdapter

from routes.openai.responses import ResponsesFormatter
from routes.openai.responses_body import ResponsesBody
from routes.response.event_stream import DecodedRow
from rwkv_batch.request import Finish, FinishReason

MODEL = "rwkv7"
EXACT: dict[str, Any] = {"ignore_eos": True, "stop_tokens": []}
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"unit": {"enum": ["c", "f"]}}, "required": ["unit"]},
        "strict": None,
    }
]
CALL = '```json\n{"name": "get_weather", "arguments": {"unit": "c"}}\n```'


IMAGE = {"type": "input_image", "image_url": "x"}
UNSERVED = {"type": "json_schema", "name": "n", "strict": True, "schema": {"contains": {}}}


class Pick(BaseModel):
    """A schema for an answer."""

    model_config = ConfigDict(extra="forbid")
    pick: Literal["tea", "code"]
    count: Literal[1, 2]


def respond(client: OpenAI, **fields: Any) -> Any:
    extra = {**EXACT, **fields.pop("extra_body", {})}
    fields = {"model": MODEL, "input": "What is a river?", "max_output_tokens": 12, "seed": 1, **fields}
    extra["seed"] = fields.pop("seed")
    return client.responses.create(**fields, extra_body=extra)


def test_a_whole_answer(client: OpenAI) -> None:
    answer = respond(client, instructions="Be brief.", metadata={"a": "b"}, temperature=0.7, store=True)
    strictly: Any = Response.model_validate(answer.model_dump(), strict=False)
    assert strictly.output_text == answer.output_text != ""
    assert answer.id.startswith("resp_")
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.model_extra or {}).get("store", getattr(answer, "store", None)) is False
    assert (answer.metadata, answer.temperature, answer.instructions) == ({"a": "b"}, 0.7, "Be brief.")
    assert answer.usage.output_tokens == 12
    assert answer.usage.total_tokens == answer.usage.input_tokens + 12
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a river?"}],
        max_tokens=12, seed=1, temperature=0.7, extra_body=EXACT,
    )  # fmt: skip
    assert chat.choices[0].message.content == answer.output_text
    assert chat.usage is not None and chat.usage.prompt_tokens == answer.usage.input_tokens


def test_a_stream_says_the_same(client: OpenAI) -> None:
    whole = respond(client, max_output_tokens=30)
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    events = list(respond(client, max_output_tokens=30, stream=True))
    for event in events:
        adapter.validate_python(event.model_dump())
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage == whole.usage
    assert len({event.response.id for event in events if hasattr(event, "response")}) == 1


def test_the_prompt_equals_the_chat_routes(client: OpenAI) -> None:
    calls = [{"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"unit": "c"}'}}]
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Weather?\nNow!"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "user", "content": "Thanks."},
    ]
    items: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "Weather?"}, {"type": "input_text", "text": "Now!"}],
        },
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": '{"unit": "c"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
        {"role": "user", "content": "Thanks."},
    ]
    answer = respond(client, input=items, tools=TOOLS, tool_choice="none")
    chat = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=12, seed=1, extra_body=EXACT)
    assert chat.usage is not None and chat.usage.prompt_tokens == answer.usage.input_tokens
    assert chat.choices[0].message.content == answer.output_text


def test_an_answer_is_parsed_into_a_model(client: OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "input": "Pick one.", "max_output_tokens": 200, "text_format": Pick}
    for seed in range(4):
        parsed = client.responses.parse(**fields, extra_body={"seed": seed})
        assert isinstance(parsed.output_parsed, Pick) and parsed.status == "completed"
        with client.responses.stream(**fields, extra_body={"seed": seed}) as stream:
            assert stream.get_final_response().output_parsed == parsed.output_parsed
    plain = respond(
        client, text={"format": {"type": "json_object"}}, max_output_tokens=400, extra_body={"seed": 2, "top_k": 1}
    )
    assert plain.output_text.startswith("{")


def test_reasoning_is_a_separate_item(client: OpenAI) -> None:
    fields: dict[str, Any] = {"reasoning": {"effort": "high"}, "max_output_tokens": 24}
    answer = respond(client, **fields)
    assert [item.type for item in answer.output] == ["reasoning"]
    thought = answer.output[0].content[0].text
    assert thought and "<think" not in thought
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens <= 25
    events = list(respond(client, **fields, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == thought


def test_a_random_model_makes_valid_calls(client: OpenAI) -> None:
    named = {"type": "function", "name": "get_weather"}
    for choice in ("required", named, {"type": "allowed_tools", "mode": "required", "tools": [named]}):
        answer = respond(client, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, max_output_tokens=100)
        (call,) = answer.output
        assert (answer.status, call.type, call.status, call.name) == (
            "completed",
            "function_call",
            "completed",
            "get_weather",
        )
        assert json.loads(call.arguments)["unit"] in ("c", "f")


@pytest.mark.parametrize(("stop", "item"), [("unit", ("function_call", '{"')), ("name", ("message", None))])
def test_a_call_cut_by_a_stop_is_incomplete(client: OpenAI, stop: str, item: tuple[str, str | None]) -> None:
    fields: dict[str, Any] = {
        "tools": TOOLS,
        "tool_choice": {"type": "function", "name": "get_weather"},
        "max_output_tokens": 100,
        "extra_body": {"stop_tokens": [stop]},
    }
    last = list(respond(client, **fields, stream=True))[-1]
    assert last.type == "response.incomplete"
    for answer in (last.response, respond(client, **fields)):
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "stop")
        (only,) = answer.output
        assert (only.status, only.type, getattr(only, "arguments", None)) == ("incomplete", *item)


@pytest.mark.parametrize(
    ("said", "status", "items"),
    [
        (f'Let me see.\n{CALL}\n```json\n{{"na', "incomplete", ["completed", "completed"]),
        (CALL.removesuffix("```"), "completed", ["completed"]),
        (f"{CALL}\n{CALL[: CALL.index('unit')]}", "incomplete", ["completed", "incomplete"]),
        ('Let me see.\n```json\n{"na', "incomplete", ["completed"]),
        ('```json\n{"na', "incomplete", ["incomplete"]),
    ],
)
def test_only_a_cut_item_is_incomplete(echo_client: OpenAI, said: str, status: str, items: list[str]) -> None:
    """The unfinished opening of a call after it does not count. It is left out."""
    fields: dict[str, Any] = {"model": MODEL, "input": f"say {said}", "tools": TOOLS}
    last = list(echo_client.responses.create(**fields, stream=True))[-1]
    for answer in (last.response, echo_client.responses.create(**fields)):
        assert (answer.status, [item.status for item in answer.output]) == (status, items), answer.output


def test_text_and_calls_are_items_complete_and_streamed(echo_client: OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "input": f"say Let me see.\n{CALL}\n{CALL}", "tools": TOOLS}
    answer = echo_client.responses.create(**fields)
    assert [item.type for item in answer.output] == ["message", "function_call", "function_call"]
    assert (answer.status, answer.output_text) == ("completed", "Let me see.")
    with echo_client.responses.stream(**fields) as stream:
        events = list(stream)
        final = stream.get_final_response()
    received = [(item.type, getattr(item, "arguments", None)) for item in final.output]
    assert received == [("message", None), ("function_call", '{"unit": "c"}'), ("function_call", '{"unit": "c"}')]
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert {event.output_index for event in deltas} == {1, 2}
    calls = [item for item in final.output if item.type == "function_call"]
    assert len({call.call_id for call in calls}) == len({call.id for call in calls}) == 2


def test_log_probabilities_of_the_text(client: OpenAI) -> None:
    received: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    entries = respond(client, **received).output[0].content[0].logprobs
    assert len(entries) == 12 and all(len(entry.top_logprobs) == 2 for entry in entries)
    events = respond(client, **received, stream=True)
    streamed = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]


def test_a_session_computes_only_new_messages(client: OpenAI) -> None:
    session = f"responses-{uuid.uuid4().hex}"
    first = respond(client, extra_body={"session_id": session})
    second = respond(client, input="Why?", extra_body={"session_id": session})
    assert second.usage.input_tokens_details.cached_tokens == first.usage.total_tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"input": []}, "input"),
        ({"input": [{"type": "image_generation_call"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"text": {"format": UNSERVED}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_unsupported_values_are_refused_by_name(client: OpenAI, fields: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refusal:
            respond(client, **fields, stream=stream)
        assert (refusal.value.param, refusal.value.type) == (param, "invalid_request_error")


def test_a_stream_reports_an_error(echo_client: OpenAI) -> None:
    with pytest.raises(openai.APIError, match="broken on demand"):
        list(echo_client.responses.create(model=MODEL, input="break it", stream=True, max_output_tokens=100))
    with pytest.raises(openai.InternalServerError, match="broken on demand"):
        echo_client.responses.create(model=MODEL, input="break it", max_output_tokens=100)


@pytest.mark.parametrize(
    ("answer_text", "items"),
    [
        ("<think>So it is", [("reasoning", "incomplete")]),
        ("<think>So it is.</think>", [("reasoning", "completed")]),
        ("<think>So it is.</think>\n\n", [("reasoning", "completed")]),
        ("<think>So it is.</think>\n\nYe", [("reasoning", "completed"), ("message", "incomplete")]),
    ],
)
def test_complete_reasoning_is_not_incomplete(answer_text: str, items: list[tuple[str, str]]) -> None:
    body = ResponsesBody.model_validate({"model": "m", "input": "Is it so?"})
    end = Finish(reason=FinishReason.LENGTH, prompt_tokens=1, completion_tokens=1)
    answer = ResponsesFormatter(body, len).full_body([DecodedRow(0, answer_text, finish=end)])
    statuses = msgspec.to_builtins(answer)
    assert statuses["status"] == "incomplete"
    assert [(item["type"], item["status"]) for item in statuses["output"]] == items
