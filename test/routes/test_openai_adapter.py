"""OpenAI's format without a service: reasoning, bodies, chunks, errors."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from routes.openai.chat import ChatFormatter
from routes.openai.completions import CompletionFormatter
from routes.openai.request import ChatBody, CompletionBody
from routes.request.json_body import validate
from routes.request.prompts import Think
from routes.response.answer_parser import ReasoningParser
from routes.response.event_stream import DecodedRow
from routes.response.http_response import OPENAI_ERRORS
from rwkv_batch.errors import ErrorInfo, ErrorKind, ServiceError
from rwkv_batch.request import Finish, FinishReason, TokenLogprob

TAGGED = [
    (True, ">\nLet me see.\n\nYes.\n</think>\n\nHello <b>you</b>", "Let me see.\n\nYes.", "Hello <b>you</b>"),
    (True, "></think>Hi", "", "Hi"),
    (True, " no closing tag, 1 < 2 </thin", "no closing tag, 1 < 2 </thin", ""),
    (True, ">a </think x </think> b", "a </think x", "b"),
    (False, "\n Hello </think> there", "", "Hello </think> there"),
    (False, " <think>\nhm\n</think>\nHi ", "hm", "Hi "),
    (False, "<thin air", "", "<thin air"),
    (False, "<thi", "", "<thi"),
    (False, " \n", "", ""),
    (True, "", "", ""),
]


def part(thinks: bool, pieces: list[str]) -> tuple[str, str]:
    parser = ReasoningParser(thinks)
    update = [parser.feed(piece, final=False) for piece in pieces] + [parser.feed("", final=True)]
    return "".join(one.reasoning for one in update), "".join(one.content for one in update)


@pytest.mark.parametrize(("thinks", "text", "reasoning", "content"), TAGGED)
def test_reasoning_is_split_at_any_cut(thinks: bool, text: str, reasoning: str, content: str) -> None:
    assert part(thinks, [text]) == (reasoning, content)
    assert part(thinks, list(text)) == (reasoning, content)
    for i in range(len(text)):
        assert part(thinks, [text[:i], text[i:]]) == (reasoning, content)
    dice = random.Random(7)
    for _ in range(50):
        cuts = sorted(dice.randrange(len(text) + 1) for _ in range(4))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert part(thinks, pieces) == (reasoning, content)


def test_an_answer_is_not_delayed() -> None:
    parser = ReasoningParser(thinks=False)
    assert [parser.feed(piece, False).content for piece in ("Hel", "lo <", "b>")] == ["Hel", "lo <", "b>"]


def chat_body(**fields: Any) -> Any:
    return validate(ChatBody, {"messages": [{"role": "user", "content": "a"}], **fields})


def test_parameters_reach_the_sampler() -> None:
    body = chat_body(
        temperature=0.3, top_p=0.9, presence_penalty=0.5, frequency_penalty=-0.25, top_k=7, alpha_decay=0.9,
        logit_bias={"11": 5, "0": -100}, logprobs=True, top_logprobs=3,
    )  # fmt: skip
    params = body.sampling(41)
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.3, 0.9, 7, 41)
    assert (params.presence_penalty, params.frequency_penalty, params.penalty_decay) == (0.5, -0.25, 0.9)
    assert params.logit_bias == {11: 5.0, 0: -math.inf}
    assert params.top_logprobs == 3


def test_native_names_and_defaults_take_precedence() -> None:
    assert chat_body(presence_penalty=0.5, alpha_presence=1.5).sampling(0).presence_penalty == 1.5
    plain = chat_body().sampling(0)
    assert (plain.temperature, plain.top_k, plain.top_p) == (1.0, 50, 0.6)
    assert (plain.presence_penalty, plain.frequency_penalty, plain.penalty_decay) == (2.0, 0.2, 0.996)
    assert plain.top_logprobs is None
    assert chat_body(logprobs=True).sampling(0).top_logprobs == 0


def test_with_tools_penalties_default_to_0() -> None:
    with_tools = {"tools": [tool("f")]}
    params = chat_body(**with_tools).sampling(0)
    assert (params.presence_penalty, params.frequency_penalty, params.penalty_decay) == (0.0, 0.0, 0.996)
    params = chat_body(**with_tools, alpha_presence=1, frequency_penalty=0.5).sampling(0)
    assert (params.presence_penalty, params.frequency_penalty) == (1.0, 0.5)
    assert chat_body(**with_tools, tool_choice="none").sampling(0).presence_penalty == 2.0


def test_alternative_names_of_fields() -> None:
    assert chat_body(max_completion_tokens=5, max_tokens=9).max_tokens == 5
    assert chat_body(stop="x").more_stops == ["x"]
    assert chat_body(stop=["x", "y"]).more_stops == ["x", "y"]
    assert chat_body(enable_think=True).think is Think.ON
    assert chat_body(enable_think=True, reasoning_effort="none").think is Think.OFF
    assert chat_body(reasoning_effort="high").think is Think.LONG
    num_calls: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
    assert chat_body(**num_calls).think is Think.ON
    assert chat_body(**num_calls, enable_think=False).think is Think.OFF
    assert chat_body(**num_calls, reasoning_effort="low").think is Think.SHORT
    assert chat_body(enable_think=True, chat_template_kwargs={"custom": 1}).think is Think.ON


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("f"), tool("f")]}, "tools"),
        ({"tools": [tool("f", type="string")]}, "tools[0].function.parameters.type"),
        ({"tools": [tool("f")] * 129}, "tools"),
        ({"tools": [tool("f")], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [tool("f")], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"functions": [{}]}, "functions"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"65536": 1}}, "logit_bias.65536"),
        ({"logit_bias": {"cat": "x"}}, "logit_bias.cat"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"stop": [""]}, "stop[0]"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ],
)
def test_unsupported_values_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ServiceError) as refusal:
        chat_body(**fields)
    error = OPENAI_ERRORS.body(refusal.value.info)["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert param.split("[", maxsplit=1)[0].split(".", maxsplit=1)[0] in error["message"]


def test_harmless_values_are_accepted() -> None:
    body = chat_body(
        tools=[], tool_choice="auto", response_format={"type": "text"}, user="me", stream_options=None, n=None,
        store=True, metadata={"a": "b"}, parallel_tool_calls=False, service_tier="auto",
    )  # fmt: skip
    assert body.n == 1


@pytest.mark.parametrize(
    ("prompt", "prompts"), [("a", ["a"]), (["a", "b"], ["a", "b"]), ([5, 6], [[5, 6]]), ([[5], [6, 7]], [[5], [6, 7]])]
)
def test_the_forms_of_a_raw_prompt(prompt: Any, prompts: Any) -> None:
    assert validate(CompletionBody, {"prompt": prompt}).prompts == prompts


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": "a", "echo": True, "logprobs": 1, "session_id": "s"}, "echo"),
        ({"prompt": "a", "echo": True, "logprobs": 1, "suffix": "b"}, "echo"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "n": 3, "best_of": 2}, "best_of"),
        ({"prompt": "a", "best_of": 2, "stream": True}, "best_of"),
    ],
)
def test_raw_prompts_that_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ServiceError) as refusal:
        validate(CompletionBody, fields)
    assert refusal.value.info.field == param


def read_chunks(stream: bytes) -> list[dict[str, Any]]:
    return [json.loads(event.removeprefix("data: ")) for event in stream.decode().split("\n\n") if event]


def test_a_stream_has_one_choice_per_chunk_and_usage_last() -> None:
    body = chat_body(n=2, logprobs=True, stream=True, stream_options={"include_usage": True}, enable_think=True)
    formatter = ChatFormatter(body, "fp_x", 2, len)
    ends = [
        Finish(reason=FinishReason.STOP, prompt_tokens=5, completion_tokens=row + 1, cached_tokens=4) for row in (0, 1)
    ]
    tokens = [TokenLogprob(text, -math.inf, [(b"a", -0.5)]) for text in (b">x</", b"think", b"> ", b"\xc3", b"\xa4 ")]
    stream = formatter.stream_start()
    stream += formatter.chunk([DecodedRow(0, ">hm</thi"), DecodedRow(1, ">x</think> ä ", logprobs=tokens)])
    stream += formatter.chunk([DecodedRow(0, "nk> Hi", finish=ends[0]), DecodedRow(1, "z", finish=ends[1])])
    chunks = read_chunks(stream + formatter.stream_end())
    *parts, last = chunks
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["object"] == "chat.completion.chunk" and chunk["system_fingerprint"] == "fp_x" for chunk in chunks)
    assert all(len(chunk["choices"]) == 1 and chunk["usage"] is None for chunk in parts)
    choices = [chunk["choices"][0] for chunk in parts]
    assert [choice["delta"].get("role") for choice in choices[:2]] == ["assistant", "assistant"]
    texts: dict[tuple[int, str], str] = {}
    for choice in choices:
        for kind in ("content", "reasoning_content"):
            key = choice["index"], kind
            texts[key] = texts.get(key, "") + choice["delta"].get(kind, "")
    assert texts == {
        (0, "content"): "Hi", (0, "reasoning_content"): "hm", (1, "content"): "ä z", (1, "reasoning_content"): "x",
    }  # fmt: skip
    logprobs = [entry for choice in choices for entry in choice.get("logprobs", {}).get("content", [])]
    assert [entry["token"] for entry in logprobs] == ["bytes:\\xc3", "bytes:\\xa4\\x20"]
    assert [byte for entry in logprobs for byte in entry["bytes"]] == list("ä ".encode())
    assert logprobs[0]["logprob"] == -9999.0
    assert logprobs[0]["top_logprobs"] == [{"token": "a", "logprob": -0.5, "bytes": [97]}]
    assert [choice["index"] for choice in choices if choice["finish_reason"] == "stop"] == [0, 1]
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8, "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {
            "reasoning_tokens": len("hm") + len("x"),
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }  # fmt: skip


def test_finish_reasons_are_openais_with_end_reason() -> None:
    """OpenAI's clients know four finish reasons and fail at others. Only `length` means a cut answer."""
    failed = ErrorInfo(kind=ErrorKind.OVERLOADED, message="too little memory")
    reasons = [FinishReason.STOP, FinishReason.LENGTH, FinishReason.TIMEOUT, FinishReason.CANCELLED, FinishReason.ERROR]
    finishes = [
        Finish(reason=reason, prompt_tokens=1, completion_tokens=1, error=failed if reason == "error" else None)
        for reason in reasons
    ]
    rows = [DecodedRow(row, "a", finish=finish) for row, finish in enumerate(finishes)]
    chat = ChatFormatter(chat_body(n=5), "fp_x", 5, len)
    text = CompletionFormatter(CompletionBody(prompt="a", n=5), "fp_x", 5)
    error_text = [("stop", None), ("length", None), *[("length", word) for word in ("timeout", "cancelled", "error")]]
    for formatter in (chat, text):
        choices = formatter.full_body(rows)["choices"]
        assert [(choice["finish_reason"], choice.get("end_reason")) for choice in choices] == error_text
        assert [choice.get("error", {}).get("message") for choice in choices] == [None] * 4 + ["too little memory"]
        ends = [formatter.last_choice(row, reason) for row, reason in enumerate(reasons)]
        assert [(choice["finish_reason"], choice.get("end_reason")) for choice in ends] == error_text


def test_every_error_kind_has_an_openai_form() -> None:
    types = {kind: OPENAI_ERRORS.body(ErrorInfo(kind=kind, message="m"))["error"] for kind in ErrorKind}
    assert all(set(error) == {"message", "type", "param", "code"} for error in types.values())
    assert types[ErrorKind.UNAUTHORIZED]["code"] == "invalid_api_key"
    assert types[ErrorKind.OVERLOADED]["type"] == "rate_limit_error"
    assert types[ErrorKind.ENGINE_LOST]["type"] == "server_error"
