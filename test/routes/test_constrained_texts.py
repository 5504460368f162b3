"""Constrained texts are complete and unchanged on every route."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from routes.openai.request import ChatBody, ConversationBody
from routes.openai.responses_body import ResponsesBody
from routes.request.json_body import validate
from routes.response.answer_parser import AnswerDelta, AnswerParser
from test.serving import Service, row_texts, sse_data

TALK = [{"role": "user", "content": "x"}]
RAW: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"contents": ["x"]},
    "/v2/chat/completions": {"contents": ["x"]},
    "/big_batch/completions": {"contents": ["x"], "stream": False},
    "/state/chat/completions": {"contents": ["x"]},
    "/multi_state/chat/completions": {"contents": ["x"]},
    "/openai/v1/completions": {"prompt": "x", "max_tokens": 64},
}
CHATS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions messages": {"messages": TALK},
    "/big_batch/completions messages": {"messages": TALK, "stream": False},
    "/openai/v1/chat/completions": {"messages": TALK},
    "/openai/v1/responses": {"input": "x"},
}
GAPS: dict[str, dict[str, Any]] = {
    "/FIM/v1/batch-FIM": {"prefix": ["x"], "suffix": ["y"]},
    "/v1/chat/completions prefix": {"prefix": "x", "suffix": "y"},
    "/openai/v1/completions suffix": {"prompt": "x", "suffix": "y", "max_tokens": 64},
}
ASKED = RAW | CHATS | GAPS


def ask(service: Service, request_name: str, **fields: Any) -> httpx.Response:
    return service.post(request_name.split(maxsplit=1)[0], {"temperature": 0, **ASKED[request_name], **fields})


def streamed(service: Service, request_name: str, **fields: Any) -> str:
    """Return all deltas of content of a streamed answer."""
    body_text = ask(service, request_name, stream=True, chunk_size=1, **fields).text
    if request_name.endswith("responses"):
        events = [
            json.loads(line.removeprefix("data: ")) for line in body_text.splitlines() if line.startswith("data: {")
        ]
        return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    return row_texts(sse_data(body_text))[0]


def whole(service: Service, request_name: str, **fields: Any) -> str:
    """Return the text of an answer that ended by itself. The answer has the format of its route."""
    session = {"session_id": json.dumps([request_name, fields])} if "state" in request_name else {}
    body_text = ask(service, request_name, **session, **fields).json()
    if "output" in body_text:
        assert body_text["status"] == "completed", body_text
        return "".join(part["text"] for item in body_text["output"] for part in item["content"])
    (choice,) = body_text["choices"]
    assert choice["finish_reason"] == "stop", body_text
    assert set(choice.get("message", {})) <= {"role", "content", "refusal"}, body_text
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.parametrize("request_name", ASKED)
def test_default_stops_do_not_cut_constrained_text(service: Service, request_name: str) -> None:
    for text in ("User: a\n\nb", "User"):
        assert whole(service, request_name, choice=[text]) == text
    assert json.loads(whole(service, request_name, json_schema={"const": {"role": "User"}})) == {"role": "User"}
    assert whole(service, request_name, choice=["a\n\nb"], stop_tokens=["\n\n"]) == "a", (
        "stops that the request names do"
    )


@pytest.mark.parametrize("request_name", GAPS)
def test_the_fim_stop_does_not_cut_constrained_text(service: Service, request_name: str) -> None:
    assert whole(service, request_name, json_schema={"const": "a✿b"}) == '"a✿b"'
    assert whole(service, request_name, json_schema={"const": "a✿b"}, stop_tokens=["✿"]) == '"a'


@pytest.mark.parametrize("request_name", CHATS)
def test_constrained_text_is_returned_unchanged(service: Service, request_name: str) -> None:
    for text in (" no", "  ", "\n<think>a</think> b", "<think>a</think>"):
        assert whole(service, request_name, choice=[text]) == text
        assert streamed(service, request_name, choice=[text]) == text
    assert whole(service, request_name, regex=" {5}") == " " * 5
    assert whole(service, request_name, grammar='start: " " X\nX: "x"') == " x"


@pytest.mark.parametrize(
    "body",
    [
        validate(ChatBody, {"messages": TALK, "choice": [" no"], "reasoning_effort": "low"}),
        validate(ResponsesBody, {"input": "x", "choice": [" no"], "reasoning": {"effort": "low"}}),
    ],
)
def test_reasoning_is_split_from_constrained_text(body: ConversationBody) -> None:
    delta = AnswerParser(body.answer_format).feed(">so</think> no", final=True)
    assert delta == AnswerDelta("so", "no", [], content_spans=[(12, 14)], num_parsed=14)


@pytest.mark.parametrize(
    "request_name", ["/v1/chat/completions", "/openai/v1/chat/completions", "/openai/v1/responses"]
)
def test_events_contain_no_unicode_line_breaks(service: Service, request_name: str) -> None:
    text = "a\u2028\u2028b\u2029c\u0085d\\\u2028\u201ce\u2026"
    assert streamed(service, request_name, choice=[text]) == text
