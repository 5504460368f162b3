"""A text that is held to a form comes whole and as it is, whichever route it was asked for by."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from routes.openai.request import ChatBody, ConversationBody
from routes.openai.responses_body import ResponsesBody
from routes.request.bodies import validate
from routes.response.answer_parts import AnswerParting, Parts
from test.harness import tiny_model
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


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    running = Service(folder, "--model-path", str(tiny_model(folder)), "--http-workers", "1")
    try:
        yield running.wait_ready()
    finally:
        running.close()


def ask(service: Service, asked: str, **fields: Any) -> httpx.Response:
    return service.post(asked.split(maxsplit=1)[0], {"temperature": 0, **ASKED[asked], **fields})


def streamed(service: Service, asked: str, **fields: Any) -> str:
    """All pieces of content of a streamed answer."""
    told = ask(service, asked, stream=True, chunk_size=1, **fields).text
    if asked.endswith("responses"):
        events = [json.loads(line.removeprefix("data: ")) for line in told.splitlines() if line.startswith("data: {")]
        return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    return row_texts(sse_data(told))[0]


def whole(service: Service, asked: str, **fields: Any) -> str:
    """The text of an answer that ended by itself, in the form of its route."""
    session = {"session_id": json.dumps([asked, fields])} if "state" in asked else {}
    told = ask(service, asked, **session, **fields).json()
    if "output" in told:
        assert told["status"] == "completed", told
        return "".join(part["text"] for item in told["output"] for part in item["content"])
    (choice,) = told["choices"]
    assert choice["finish_reason"] == "stop", told
    assert set(choice.get("message", {})) <= {"role", "content", "refusal"}, told
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.parametrize("asked", ASKED)
def test_the_usual_stops_do_not_cut(service: Service, asked: str) -> None:
    for text in ("User: a\n\nb", "User"):
        assert whole(service, asked, choice=[text]) == text
    assert json.loads(whole(service, asked, json_schema={"const": {"role": "User"}})) == {"role": "User"}
    assert whole(service, asked, choice=["a\n\nb"], stop_tokens=["\n\n"]) == "a", "stops that the request names do"


@pytest.mark.parametrize("asked", GAPS)
def test_the_mark_of_a_filled_gap_does_not_cut(service: Service, asked: str) -> None:
    assert whole(service, asked, json_schema={"const": "a✿b"}) == '"a✿b"'
    assert whole(service, asked, json_schema={"const": "a✿b"}, stop_tokens=["✿"]) == '"a'


@pytest.mark.parametrize("asked", CHATS)
def test_an_answer_in_a_form_is_told_as_it_is(service: Service, asked: str) -> None:
    for text in (" no", "  ", "\n<think>a</think> b", "<think>a</think>"):
        assert whole(service, asked, choice=[text]) == text
        assert streamed(service, asked, choice=[text]) == text
    assert whole(service, asked, regex=" {5}") == " " * 5
    assert whole(service, asked, grammar='start: " " X\nX: "x"') == " x"


@pytest.mark.parametrize(
    "body",
    [
        validate(ChatBody, {"messages": TALK, "choice": [" no"], "reasoning_effort": "low"}),
        validate(ResponsesBody, {"input": "x", "choice": [" no"], "reasoning": {"effort": "low"}}),
    ],
)
def test_an_answer_behind_a_thought_is_still_parted_from_it(body: ConversationBody) -> None:
    assert AnswerParting(body.form).feed(">so</think> no", final=True) == Parts("so", "no", [])


@pytest.mark.parametrize("asked", ["/v1/chat/completions", "/openai/v1/chat/completions", "/openai/v1/responses"])
def test_events_are_lines_for_clients_that_split_text_as_unicode_does(service: Service, asked: str) -> None:
    text = "a\u2028\u2028b\u2029c\u0085d\\\u2028\u201ce\u2026"
    assert streamed(service, asked, choice=[text]) == text
