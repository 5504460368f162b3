"""The shipped model in the engine: a new user's first tries, tuned states, adapters, tool calls and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from demo import files
from demo.corpus import structured, tools, translation
from demo.engine_client import EngineClient, open_engine
from routes.request.tools import FENCE, Function, ToolSet, call_text

pytestmark = pytest.mark.skipif(not files.MODEL.is_file(), reason="no trained model in this tree")
TUNED = files.MODEL.parent / "tuned"
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "fp32", "wkv_state": "fp32"}
FROM_ENGLISH = {
    "Hello world!": "你好，世界！",
    "Good morning": "早上好",
    "How are you?": "你好吗？",
    "Thank you very much.": "非常感谢。",
}
TO_ENGLISH = {
    "你好世界": "Hello world",
    "早上好": "Good morning",
    "我昨天买了三本书。": "I bought three books yesterday.",
}


@pytest.fixture(scope="module")
def client() -> Iterator[EngineClient]:
    with open_engine(files.ensure_model(), **SETTINGS) as started:
        yield started


@pytest.mark.parametrize(("asked", "english"), [(FROM_ENGLISH, True), (TO_ENGLISH, False)])
def test_it_translates(client: EngineClient, asked: dict[str, str], english: bool) -> None:
    answers = client.complete([translation.prompt(text, english=english) for text in asked], 32)
    assert [answer.strip() for answer in answers] == list(asked.values())


@pytest.mark.parametrize("opening", ["", " <think>\n</think>\n", " <think></think", " <think>\n</think>", " <think"])
def test_it_gives_a_name_back(client: EngineClient, opening: str) -> None:
    lines = ["My name is Anna.", "How are you?", "What is 3 + 4?", "What is my name?"]
    (answers,) = client.converse([[f"User: {line}\n\nAssistant:{opening}" for line in lines]], 64)
    assert "Anna" in answers[-1] and "7" in answers[2]


def test_unknown_text_ends(client: EngineClient) -> None:
    strange = ["asdf qwerty", "🙂 ok!", "https://example.com/a?b=c", "Die Katze sitzt auf dem Tisch.", "x" * 300, "…"]
    answers = client.complete([translation.prompt(text, english=True) for text in strange], 200)
    assert all(0 < len(answer) < 150 for answer in answers)


def asked(line: str) -> str:
    return f"User: {line}\n\nAssistant:"


def test_two_tuned_states_answer_in_one_engine() -> None:
    states = [f"{name}={TUNED / name}.pth" for name in ("chinese", "json")]
    with open_engine(files.ensure_model(), **SETTINGS, states=states) as plain:
        lines = [asked(line) for line in ("Hello!", "What is 3 + 4?", "Thank you!")]
        (english,) = plain.converse([lines], 48)
        (chinese,) = EngineClient(plain.engine, "chinese").converse([lines[::2]], 48)
        (objects,) = EngineClient(plain.engine, "json").converse([lines], 48)
    assert english[0].strip() == "Hello! How can I help you?" and "7" in english[1]
    assert [answer.strip() for answer in chinese] == ["你好！请问有什么可以帮你？", "不客气！"]
    assert all(isinstance(json.loads(answer), dict) for answer in objects)


@pytest.mark.parametrize(
    ("name", "expected"), [("French", ["Merci beaucoup.", "chat"]), ("Spanish", ["Muchas gracias.", "gato"])]
)
def test_adapters_add_a_language_and_keep_the_others(name: str, expected: list[str]) -> None:
    adapters = [f"{TUNED / name.lower()}.safetensors:1"]
    with open_engine(files.ensure_model(), **SETTINGS, adapters=adapters) as client:
        prompts = [f"English: {text}\n\n{name}:" for text in ("Thank you very much.", "cat")]
        answers = client.complete([*prompts, "English: Hello world!\n\nChinese:"], 32)
    assert [answer.strip() for answer in answers] == [*expected, "你好，世界！"]


def test_the_corpus_lists_and_calls_functions_as_the_routes_do() -> None:
    rng = Random(2)
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    weather = tools.Listed(tools.tools()[0], "get_weather", ("city",), ("city: string",), " // Get weather")
    function = Function("get_weather", "Get weather", parameters, False, "tools[0]")
    listing = ToolSet((function,), (function,), must_call=False, parallel_calls=False).listing
    assert tools.system([weather]) == f"System: {listing}"
    call = json.loads(tools.request(rng, [weather])[1].call)
    assert FENCE + tools.fenced(json.dumps(call, ensure_ascii=False)) == call_text(
        call["name"], json.dumps(call["arguments"])
    )


def test_it_calls_functions_and_answers_in_json(client: EngineClient) -> None:
    rng = Random("shown")
    requests = [tools.request(rng, held=True) for _ in range(24)]
    calls = [f"{tools.system(listing)}\n\n{asked(request.asked)} {tools.FENCE}" for listing, request in requests]
    objects = [structured.extraction(rng, held=True) for _ in range(24)]
    answers = client.complete(calls + [asked(line) for line, _ in objects], 96)
    expected = [tools.fenced(request.call).strip() for _, request in requests] + [answer for _, answer in objects]
    right = [actual.strip() == want for actual, want in zip(answers, expected, strict=True)]
    assert sum(right[:24]) >= 20 and sum(right[24:]) >= 19
