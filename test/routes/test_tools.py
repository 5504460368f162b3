"""Tool calls: their list in the prompt, parsing of answers, and OpenAI's own package."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import OpenAI
from pydantic_core import PydanticCustomError

from routes.openai.tools import build_tool_set
from routes.request import prompts
from routes.request.messages import Message
from routes.request.prompts import Think
from routes.request.tools import Function, ToolSet, call_text, signature
from routes.response.answer_parser import AnswerFormat, AnswerParser

NAMES = ("f", "g")
CALL = '```json\n{"name": "f", "arguments": {"city": "Paris"}}\n```'
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    for name in NAMES
]


def parse_answer(
    pieces: list[str], opens_with_call: bool = False, is_calls_or_constrained: bool = False
) -> tuple[str, list[tuple[str, str]]]:
    parser = AnswerParser(
        AnswerFormat(
            names=NAMES,
            opens_with_call=opens_with_call,
            is_calls_or_constrained=is_calls_or_constrained,
            continues=True,
        )
    )
    content, calls = "", dict[int, tuple[str, str]]()
    for i, piece in enumerate([*pieces, ""]):
        parts = parser.feed(piece, final=i == len(pieces))
        content += parts.content
        for call in parts.calls:
            name, arguments = calls.get(call.index, ("", ""))
            assert not (name and call.name), "a name comes once"
            calls[call.index] = name + call.name, arguments + call.arguments
    assert list(calls) == list(range(len(calls)))
    return content, list(calls.values())


ANSWERS = [
    ("Hello!", "Hello!", []),
    (f"Let me see.\n\n{CALL}", "Let me see.", [("f", '{"city": "Paris"}')]),
    (f"{CALL}\n{CALL}\n\nDone ", "Done", [("f", '{"city": "Paris"}')] * 2),
    (f"A\n{CALL}\n\nB", "A\n\nB", [("f", '{"city": "Paris"}')]),
    ('<tool_call>\n{"name":"g", "arguments" : {"a": "}\\"{"}}\n</tool_call>', "", [("g", '{"a": "}\\"{"}')]),
    ('```json\n{"arguments": {"a": 1}, "name": "f"}\n```', "", [("f", '{"a": 1}')]),
    ('```json\n[{"name": "f", "arguments": {}}, {"name": "g"}]\n```', "", [("f", "{}"), ("g", "{}")]),
    ('```json\n{"name": "f", "arguments": "{\\"a\\": 1}"}\n```', "", [("f", '{"a": 1}')]),
    ('```json\n{"name": "f", "arguments": {"a": 1}\n```\nMore', "More", [("f", '{"a": 1}')]),
    ('```json\n{"name": "f", "arguments": {"a": 1}, "id": 7}\n```', "", [("f", '{"a": 1}')]),
    ('```json\n{"name": "f", "arguments": {"a": "cut o', "", [("f", '{"a": "cut o')]),
    ('```json\n{"name": "h", "arguments": {}}\n```', '```json\n{"name": "h", "arguments": {}}\n```', []),
    ('Some ```json\n{"x": 1}\n``` here\n', 'Some ```json\n{"x": 1}\n``` here\n', []),
    ('```json\n{"name": "f", "argum', "", []),
    ('Let me see.\n```json\n{"na', "Let me see.", []),
    ("Let me see.\n```json", "Let me see.", []),
    (CALL + '\n```json\n{"name": "g"', "", [("f", '{"city": "Paris"}')]),
    (CALL + "\n```js", "", [("f", '{"city": "Paris"}')]),
    ("```json5 and <tool_ca", "```json5 and <tool_ca", []),
    ("```json```json\n" + CALL.removeprefix("```json"), "```json", [("f", '{"city": "Paris"}')]),
]


@pytest.mark.parametrize(("text", "content", "calls"), ANSWERS)
def test_calls_are_parsed_at_any_split_of_the_text(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parse_answer([text]) == (content, calls)
    assert parse_answer(list(text)) == (content, calls)
    for i in range(len(text)):
        assert parse_answer([text[:i], text[i:]]) == (content, calls)


def test_an_answer_opened_as_a_call_by_the_prompt() -> None:
    assert parse_answer([CALL.removeprefix("```json")], opens_with_call=True) == ("", [("f", '{"city": "Paris"}')])
    assert parse_answer(['\n{"na'], opens_with_call=True) == ("", [])


def test_an_incomplete_opening_is_text_unless_calls_are_required() -> None:
    for must_call, content in ((False, "```js"), (True, "")):
        parser = AnswerParser(AnswerFormat(thinks=True, names=NAMES, must_call=must_call))
        parts = parser.feed("Hm.</think>\n```js", final=True)
        assert (parts.reasoning, parts.content) == ("Hm.", content)


@pytest.mark.parametrize(
    "inside", ["```json{", "<tool_call>{", '```json\n{"name": "f", "arguments": {}}\n```', "```js "]
)
@pytest.mark.parametrize("before", ["", "\n "])
def test_strings_of_constrained_text_may_look_like_calls(inside: str, before: str) -> None:
    for value in (inside, {"a": inside}, [inside, CALL]):
        text = before + json.dumps(value)
        for pieces in ([text], list(text), [text[:9], text[9:]]):
            assert parse_answer(pieces, is_calls_or_constrained=True) == (text, [])


@pytest.mark.parametrize(
    ("text", "content", "calls"), [one for one in ANSWERS if one[0].startswith(("```", "<"))] + ANSWERS[:1]
)
def test_with_a_format_only_an_initial_call_is_a_call(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    if text.startswith("```json```json"):  # not a call, so no call can follow
        content, calls = text, []
    for before in ("", "\n "):
        before_content = before if content and not calls else ""  # white space stays before text, not before calls
        for pieces in ([before + text], list(before + text)):
            assert parse_answer(pieces, is_calls_or_constrained=True) == (before_content + content, calls)


FRAGMENTS = (
    "```json", "```", "<tool_call>", "</tool_call>", "\n", "\n\n", " ", '{"name": "f", "arguments": {"a": "b"}}',
    '{"name":"g","arguments":{', "}", "{", "[", "]", '"', "\\", '"name"', "Hi", "`", "<", "json", '"arguments": "{}"',
    ",", ":", '{"arguments": {"x": [1, "}"]}, "name": "f"}', '{"name": ["f"]}', "é",
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join), st.booleans(), st.booleans(), st.data())
def test_any_split_of_any_text_gives_the_same(
    text: str, opens_with_call: bool, is_calls_or_constrained: bool, data: st.DataObject
) -> None:
    whole = parse_answer([text], opens_with_call, is_calls_or_constrained)
    assert parse_answer(list(text), opens_with_call, is_calls_or_constrained) == whole
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse_answer(pieces, opens_with_call, is_calls_or_constrained) == whole
    if "```json" not in text and "<tool_call>" not in text and not opens_with_call:
        assert whole == (text, [])


def test_arguments_are_streamed() -> None:
    parser = AnswerParser(AnswerFormat(names=NAMES))
    reported = [
        parser.feed(piece, False).calls for piece in ("Hi ```js", 'on\n{"name": "f", "argu', 'ments": {"a', '": 1', "}")
    ]
    assert [[(call.name, call.arguments) for call in calls] for calls in reported] == [
        [], [], [("f", '{"a')], [("", '": 1')], [("", "}")],
    ]  # fmt: skip


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "string"},
        "b": {"enum": ["x", "y"]},
        "c": {"type": "array", "items": {"$ref": "#/$defs/Point"}, "description": "where\nto go"},
        "d": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "e": {"type": ["number", "string"]},
        "f": {},
        "g": {"const": 3},
        "h": {"type": "array", "items": {"enum": [1, 2]}},
    },
    "required": ["a"],
    "$defs": {"Point": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Point"}}}},
}


def test_the_signature_of_a_function() -> None:
    line = signature("f", "Does\n f.", SCHEMA)
    assert line.startswith('f(a: string, b?: "x" | "y", c?: {next?: {next?: ')
    assert line.endswith(
        "[] /* where to go */, d?: integer | null, e?: number | string, f?: any, g?: 3, h?: (1 | 2)[]) // Does f."
    )
    assert signature("g", "", {}) == "g()"


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string"}, "string"),
        ({}, "any"),
        (True, "any"),
        ({"properties": {"b": {"type": "string"}}}, "{b?: string}"),
        ({"type": "object"}, "object"),
        ({"type": "array"}, "any[]"),
        ({"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}, "integer[][]"),
        ({"type": ["string", "null", "string"]}, "string | null"),
        ({"enum": ["é", 1, None]}, '"é" | 1 | null'),
        ({"enum": []}, "any"),
        ({"const": "é"}, '"é"'),
        ({"oneOf": [{"type": "string"}, {"const": 1}]}, "string | 1"),
        ({"allOf": [{"type": "string"}]}, "string"),
        ({"anyOf": [{"enum": [1]}], "oneOf": [{"const": 2}]}, "1"),
        ({"$ref": "#/definitions/D"}, "boolean"),
        ({"$ref": "#/$defs/S"}, "string"),
        ({"$ref": "#/$defs/missing", "type": "number"}, "number"),
        ({"$ref": "elsewhere", "type": "number"}, "number"),
    ],
)
def test_the_type_of_a_parameter(schema: Any, expected: str) -> None:
    parameters = {
        "properties": {"a": schema},
        "required": ["a"],
        "$defs": {"S": {"type": "string"}},
        "definitions": {"D": {"type": "boolean"}},
    }
    assert signature("f", " ", parameters) == f"f(a: {expected})"
    assert signature("f", "x", {**parameters, "required": "a"}) == f"f(a?: {expected}) // x"


def test_a_deep_or_wide_schema_is_cut() -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(9):
        deep = {"type": "array", "items": deep}
    assert signature("f", "", {"properties": {"a": deep}}) == "f(a?: object[][][][][][][][])"
    wide = {"properties": {f"p{n}": {"type": "string", "description": " one\n two "} for n in range(2001)}}
    line = signature("f", "", wide)
    assert line.count(": string /* one two */") == 2000 and line.endswith("p2000?: object /* one two */)")


@pytest.mark.parametrize(
    "shared",
    [
        {"const": "x" * 100_000},
        {"enum": ["x" * 50_000, "y" * 50_000]},
        {"type": "x" * 100_000},
        {"properties": {"p": {"description": "x" * 100_000}}},
        {"properties": {"p" * 100_000: {}}},
        {"type": ["object"] * 100, "properties": {"p": {"description": "x" * 100_000}}},
    ],
)
def test_references_do_not_repeat_a_long_text_without_limit(shared: dict[str, Any]) -> None:
    parameters = {"$defs": {"A": shared}, "properties": {f"p{i}": {"$ref": "#/$defs/A"} for i in range(100)}}
    line = signature("f", "", parameters)
    assert 1_000_000 < len(line) < 1_200_000 and line.endswith("p99?: object)")


def test_many_required_names_are_not_compared_with_each_property() -> None:
    compared = 0

    class Name(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    required = [Name(f"q{i}") for i in range(1000)]
    line = signature("f", "", {"properties": {f"p{i}": {} for i in range(1000)}, "required": [*required, [], "p7"]})
    assert "p7: any" in line and "p8?: any" in line
    assert compared < 10_000, "of a million pairs"


def test_a_recursive_schema_has_a_bounded_signature() -> None:
    shared = {"A": {"type": "object", "properties": {str(n): {"$ref": "#/$defs/A"} for n in range(50)}}}
    assert len(signature("f", "", {"$ref": "#/$defs/A", "$defs": shared})) < 100_000
    for broken in (
        {"properties": 3},
        {"properties": {"a": 1}},
        {"$ref": "#/$defs/B"},
        {"properties": {"a": {"enum": []}}},
    ):
        assert signature("f", "", broken).startswith("f(")


def make_tools(must_call: bool = False) -> ToolSet:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    functions = tuple(Function(name, "", schema, strict=False, field="") for name in NAMES)
    return ToolSet(functions, functions, must_call, parallel_calls=True)


LISTING = "Tools:\n- f(city: string)\n- g(city: string)\nReturn only a JSON function call."


def test_a_conversation_with_calls() -> None:
    calls = [{"id": f"call_{name}", "function": {"name": name, "arguments": '{"city":"A\\n\\nB"}'}} for name in NAMES]
    turns = [
        {"role": "user", "content": "Both."},
        {"role": "assistant", "content": "Yes.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_g", "content": "second"},
        {"role": "tool", "tool_call_id": "call_f", "content": "first"},
    ]
    messages = [Message.model_validate(turn) for turn in turns]
    prompt_text = [call_text(name, '{"city": "A\\n\\nB"}') for name in NAMES]
    rounds = [
        "User: Both.", f"Assistant: Yes.\n{prompt_text[0]}\n{prompt_text[1]}", "User: Function output:\nfirst",
        "User: Function output:\nsecond", "Assistant: ```json",
    ]  # fmt: skip
    assert prompt_text[0] == '```json\n{"name": "f", "arguments": {"city": "A\\n\\nB"}}\n```'
    listing = make_tools().listing
    assert listing == LISTING
    chat = prompts.chat(messages, Think.OFF, listing=listing, opening="```json")
    assert chat == "\n\n".join([f"System: {LISTING}", *rounds])
    system = Message.model_validate({"role": "system", "content": "Be kind."})
    chat = prompts.chat([system, *messages], Think.OFF, listing=listing, opening="```json")
    assert chat == "\n\n".join([f"System: Be kind.\n{LISTING}", *rounds])


def test_arguments_that_are_not_json_stay_unchanged() -> None:
    assert call_text("f", "{broken") == '```json\n{"name": "f", "arguments": {broken}\n```'


def call_chat(client: OpenAI, text: str, **fields: Any) -> Any:
    messages: list[Any] = [{"role": "user", "content": f"say {text}"}]
    return client.chat.completions.create(**{"model": "rwkv7", "messages": messages, "tools": TOOLS, **fields})


ANSWER_WITH_TWO_CALLS = (
    f"Let me see. 🌍\n{CALL}\n" + '<tool_call>\n{"name": "g", "arguments": {"city": "東京"}}\n</tool_call>'
)
CALLED = [("f", {"city": "Paris"}), ("g", {"city": "東京"})]


def calls_of(message: Any) -> list[tuple[str, Any]]:
    assert all(call.type == "function" and call.id.startswith("call_") for call in message.tool_calls)
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]


def test_calls_of_a_complete_answer(echo_client: OpenAI) -> None:
    choice = call_chat(echo_client, ANSWER_WITH_TWO_CALLS).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see. 🌍")
    assert calls_of(choice.message) == CALLED
    assert len({call.id for call in choice.message.tool_calls}) == 2
    alone = call_chat(echo_client, CALL).choices[0].message
    assert alone.content is None and calls_of(alone) == CALLED[:1]


def test_calls_of_a_stream(echo_client: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": f"say {ANSWER_WITH_TWO_CALLS}"}]
    with echo_client.chat.completions.stream(model="rwkv7", messages=messages, tools=TOOLS) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert [(event.index, event.name) for event in done] == [(0, "f"), (1, "g")]
    assert (final.choices[0].finish_reason, final.choices[0].message.content) == ("tool_calls", "Let me see. 🌍")
    assert calls_of(final.choices[0].message) == CALLED
    pieces = [
        call
        for chunk in call_chat(echo_client, ANSWER_WITH_TWO_CALLS, stream=True)
        for choice in chunk.choices
        for call in choice.delta.tool_calls or ()
    ]
    assert [piece.index for piece in pieces if piece.id] == [0, 1]
    assert all(piece.function.name is None for piece in pieces if not piece.id)


def test_without_calls_an_answer_is_text(echo_client: OpenAI) -> None:
    for fields in ({}, {"tool_choice": "none"}, {"tools": [TOOLS[1]]}):
        text = CALL if fields else "Hello."
        choice = call_chat(echo_client, text, **fields).choices[0]
        assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", text, None)


def test_a_chosen_tool_needs_tools() -> None:
    with pytest.raises(PydanticCustomError, match="there are none; add them as `tools`"):
        build_tool_set([], "required", ["f"], parallel_calls=True)


def test_an_answer_that_must_be_a_call(echo_client: OpenAI) -> None:
    text = CALL.removeprefix("```json\n")
    for tool_choice in ("required", {"type": "function", "function": {"name": "f"}}):
        choice = call_chat(echo_client, text, tool_choice=tool_choice).choices[0]
        assert (choice.finish_reason, calls_of(choice.message)) == ("tool_calls", CALLED[:1])


def test_a_round_trip_of_calls_and_results(echo_client: OpenAI) -> None:
    first = call_chat(echo_client, ANSWER_WITH_TWO_CALLS).choices[0].message
    messages: list[Any] = [{"role": "user", "content": "Go."}, first]
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in first.tool_calls]
    answer = echo_client.chat.completions.create(model="rwkv7", messages=messages, tools=TOOLS, max_tokens=1)
    assert answer.choices[0].message.content == "Function output:\nsunny"
