"""Tool calls constrained to their schemas: the grammar line by line, what it accepts, a model that must call."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import openai
import pytest
from openai import OpenAI

from routes.request.tools import Function, ToolSet, tool_call_constraint
from rwkv_batch.tokenizer import VOCAB_SIZE, Tokenizer
from sampling.grammar.compiler import GrammarCompiler
from sampling.grammar.constraint import Constraint, Form, GrammarError, SchemaRule
from test.serving import Service

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "days"],
}
SCHEMAS = {"get_weather": WEATHER, "now": {}}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "Tells the weather.", "parameters": WEATHER},
    },
    {"type": "function", "function": {"name": "now"}},
]
CALL = '\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n```'
NOW = '\n{"name": "now", "arguments": {}}\n'
TOKENIZER = Tokenizer()


def make_tools(
    schema: dict[str, Any] = WEATHER, *, must_call: bool = False, several: bool = True, strict: bool = False
) -> ToolSet:
    functions = (
        Function("get_weather", "", schema, strict, "tools[0].function.parameters"),
        Function("now", "", {}, False, "tools[1].function.parameters"),
    )
    return ToolSet(functions, functions, must_call, several)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER.byte_table, TOKENIZER.encode_bytes, VOCAB_SIZE)


def accepted_part(compiler: GrammarCompiler, text: str, offered: ToolSet, **fields: Any) -> str:
    """Return the part of a text that the grammar accepts. A "|" follows if the text may end there."""
    constraint = tool_call_constraint(offered, **{"is_open": False, "thinks": False, **fields})
    state = compiler.compile(constraint).templates[0].deep_copy()
    ids = [token for letter in text.encode() for token in TOKENIZER.encode_bytes(bytes([letter]))]
    accepted = TOKENIZER.decode_bytes(ids[: state.try_consume_tokens(ids)]).decode()
    return accepted + ("|" if state.is_accepting() else "")


SEVEN = Constraint(form=Form.JSON_SCHEMA, source='{"enum": [7]}')
AUTO, MUST, ONE = make_tools(), make_tools(must_call=True), make_tools(must_call=True, several=False)


@pytest.mark.parametrize(
    ("offered", "fields", "text", "accepted"),
    [
        (AUTO, {}, "Hello ``` there\n\n", "Hello ``` there\n\n|"),
        (AUTO, {}, f"Let me see.\n\n```json{CALL}", f"Let me see.\n\n```json{CALL}|"),
        (AUTO, {}, '```json\n{"x": 1}', '```json\n{"'),
        (AUTO, {}, f"<tool_call>{NOW}</tool_call>", f"<tool_call>{NOW}</tool_call>|"),
        (AUTO, {}, f"<tool_call>{NOW}```", f"<tool_call>{NOW}"),
        (AUTO, {}, f"```json{CALL}\n```json{NOW}```\n\nUser", f"```json{CALL}\n```json{NOW}```\n\n|"),
        (AUTO, {}, f"```json{CALL} and", f"```json{CALL}|"),
        (AUTO, {"thinks": True}, ">hm ```json</think>\nHi", ">hm ```json</think>\nHi|"),
        (MUST, {"is_open": True}, f"{CALL}\n```json{NOW}```", f"{CALL}\n```json{NOW}```|"),
        (MUST, {"is_open": True}, "\nHello", "\n"),
        (MUST, {"thinks": True}, f">hm ```json</think>\n```json{CALL}", f">hm ```json</think>\n```json{CALL}|"),
        (MUST, {"thinks": True}, ">hm</think>Hello", ">hm</think>"),
        (MUST, {}, f"\n```json{CALL}", f"\n```json{CALL}|"),
        (ONE, {"is_open": True}, f"{CALL}\n```json", f"{CALL}|"),
        (AUTO, {"answer": SEVEN}, "\n7 ", "\n7|"),
        (AUTO, {"answer": SEVEN}, f"```json{CALL}", f"```json{CALL}|"),
        (AUTO, {"answer": SEVEN}, "Hello", ""),
    ],
)
def test_answers_accepted_by_the_grammar(
    compiler: GrammarCompiler, offered: ToolSet, fields: dict[str, Any], text: str, accepted: str
) -> None:
    assert accepted_part(compiler, text, offered, **fields) == accepted


@pytest.mark.parametrize(
    ("schema", "arguments", "is_accepted"),
    [
        ({}, '{"a": 1}', False),
        ({"properties": {"a": {}}}, '{"a": 1}', True),
        ({"properties": {"a": {}}}, '{"b": 1}', False),
        ({"additionalProperties": True}, '{"b": 1}', True),
        ({"patternProperties": {"^b": {}}}, '{"b": 1}', True),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"type": "object", "required": ["b"]}}}, '{"b": 1}', True),
        (WEATHER, '{"city": "A", "days": 15}', False),
        (WEATHER, '{"days": 1}', False),
    ],
)
def test_arguments_match_the_schema(
    compiler: GrammarCompiler, schema: dict[str, Any], arguments: str, is_accepted: bool
) -> None:
    text = f'\n{{"name": "get_weather", "arguments": {arguments}}}\n```'
    assert (
        accepted_part(compiler, text, make_tools(schema, must_call=True), is_open=True) == f"{text}|"
    ) is is_accepted


def test_an_unsupported_strict_schema_is_refused_by_its_path(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"contains": {}}}}}}
    with pytest.raises(GrammarError) as refusal:
        compiler.compile(tool_call_constraint(make_tools(schema, strict=True), is_open=True, thinks=False))
    assert (refusal.value.field, refusal.value.place) == ("tools[0].function.parameters", ".properties.a.properties.b")
    compiler.compile(tool_call_constraint(make_tools(schema), is_open=True, thinks=False))


def call_chat(client: OpenAI, **fields: Any) -> Any:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    fields = {"model": "rwkv7", "messages": messages, "tools": TOOLS, "tool_choice": "required", **fields}
    return client.chat.completions.create(**{"max_tokens": 1500, "temperature": 1.0, "top_p": 0.95, **fields})


def checked(calls: Any) -> list[str]:
    """Return the names of the calls, after a check of their arguments."""
    for call in calls:
        arguments = json.loads(call.function.arguments)
        jsonschema_rs.validate(SCHEMAS[call.function.name], arguments)
        assert arguments == {} or call.function.name == "get_weather"
    return [call.function.name for call in calls]


def test_a_random_model_makes_valid_calls(client: OpenAI) -> None:
    choices = call_chat(client, n=8, seed=1).choices
    for choice in choices:
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        checked(choice.message.tool_calls)
    chunks = call_chat(client, n=8, seed=1, stream=True)
    streamed: dict[tuple[int, int], str] = {}
    ends = {}
    for chunk in chunks:
        (choice,) = chunk.choices
        ends[choice.index] = choice.finish_reason or ends.get(choice.index)
        for call in choice.delta.tool_calls or ():
            place = choice.index, call.index
            streamed[place] = streamed.get(place, "") + call.function.arguments
    assert ends == dict.fromkeys(range(8), "tool_calls")
    assert streamed == {
        (choice.index, i): call.function.arguments
        for choice in choices
        for i, call in enumerate(choice.message.tool_calls)
    }


def test_tool_choice_and_single_calls(client: OpenAI) -> None:
    for name in SCHEMAS:
        for choice in (
            {"type": "function", "function": {"name": name}},
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": name}}]},
            },
        ):
            made = call_chat(client, tool_choice=choice, parallel_tool_calls=False, n=4, seed=2).choices
            assert [checked(one.message.tool_calls) for one in made] == [[name]] * 4


def test_a_call_cut_by_max_tokens(client: OpenAI) -> None:
    choice = call_chat(
        client, max_tokens=14, tool_choice={"type": "function", "function": {"name": "get_weather"}}
    ).choices[0]
    assert choice.finish_reason == "length"
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    with pytest.raises(json.JSONDecodeError):
        json.loads(call.function.arguments)


def test_a_call_cut_before_its_name_is_not_content(client: OpenAI) -> None:
    for maximum in (1, 3):
        choice = call_chat(client, max_tokens=maximum).choices[0]
        assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("length", "", None)
        chunks = list(call_chat(client, max_tokens=maximum, stream=True))
        received = [chunk.choices[0].delta for chunk in chunks]
        assert not any(delta.content or delta.tool_calls for delta in received)
        assert chunks[-1].choices[0].finish_reason == "length"


def test_a_stop_inside_a_call_makes_it_incomplete(client: OpenAI) -> None:
    """Its finish reason shows that the arguments are cut: `arguments` comes before the name is certain."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    choice = call_chat(client, stop=["city"], tool_choice=named).choices[0]
    assert choice.finish_reason == "stop"
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"')
    choice = call_chat(client, stop=["name"], tool_choice=named).choices[0]
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", "", None)


def test_auto_does_not_change_text(client: OpenAI) -> None:
    plain = {
        "seed": 3,
        "max_tokens": 40,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "extra_body": {"stop_tokens": []},
    }
    choice = call_chat(client, tool_choice="auto", **plain).choices[0]
    assert choice.finish_reason in ("stop", "length") and choice.message.content and not choice.message.tool_calls


def test_response_format_or_a_call(client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    for choice in call_chat(client, tool_choice="auto", response_format=form, n=8, seed=5).choices:
        if choice.message.tool_calls:
            checked(choice.message.tool_calls)
        else:
            jsonschema_rs.validate(schema, json.loads(choice.message.content))
    with pytest.raises(openai.BadRequestError, match="regex and tools exclude each other"):
        call_chat(client, extra_body={"regex": "a"})


@pytest.mark.parametrize("const", ["```json{", "<tool_call>{", f"```json{NOW.strip()}```"])
def test_a_schema_whose_strings_look_like_calls(client: OpenAI, const: str) -> None:
    """The bias favours an answer in the format over a call."""
    schema = {"name": "n", "schema": {"const": {"a": const}}, "strict": True}
    fields = {"tool_choice": "auto", "logit_bias": {str(TOKENIZER.encode_bytes(b"{")[0]): 100}}
    form = {"response_format": {"type": "json_schema", "json_schema": schema}}
    choice = call_chat(client, **fields, **form).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("stop", json.dumps({"a": const}))
    chunks = call_chat(client, **fields, **form, stream=True, extra_body={"chunk_size": 1})
    received = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert received == json.dumps({"a": const})
    response = client.responses.create(
        model="rwkv7",
        input="Go.",
        tools=[{"type": "function", **TOOLS[1]["function"]}],
        text={"format": {"type": "json_schema", **schema}},  # type: ignore[misc]
        extra_body={"logit_bias": fields["logit_bias"]},
    )
    assert (response.status, response.output_text) == ("completed", json.dumps({"a": const}))


def test_an_unsupported_strict_schema_is_a_bad_request(client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"contains": {}}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    with pytest.raises(openai.BadRequestError) as refusal:
        call_chat(client, tools=[*TOOLS, tool], tool_choice="auto")
    assert refusal.value.param == "tools[2].function.parameters.properties.a"


def test_a_session_continues_after_a_call(client: OpenAI) -> None:
    extra = {"session_id": "tools"}
    message = call_chat(client, extra_body=extra, seed=4).choices[0].message
    messages = [{"role": "user", "content": "What is the weather in Paris?"}, message]
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls]
    second = call_chat(client, messages=messages, extra_body=extra, tool_choice="none", max_tokens=4)
    assert second.usage.prompt_tokens_details.cached_tokens > 60
    assert second.usage.prompt_tokens - second.usage.prompt_tokens_details.cached_tokens < 25 * len(message.tool_calls)


@pytest.mark.parametrize("choice", ["auto", "required", "none"])
def test_tokens_are_counted_with_the_tools(client: OpenAI, service: Service, choice: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the weather in Paris?"},
    ]
    body = {"messages": messages, "tools": TOOLS, "tool_choice": choice}
    counted = service.post("/v1/tokens/count", body).json()["tokens"]
    answered: Any = client.chat.completions.create(model="rwkv7", max_tokens=1, extra_body=body, messages=messages)
    assert counted == answered.usage.prompt_tokens
    refused = service.post("/v1/tokens/count", {**body, "tool_choice": {"type": "function", "function": {"name": "x"}}})
    assert refused.status_code == 422 and "'x'" in refused.text


CITY = {"type": "object", "properties": {"city": {"type": "string", "title": "É"}}}
ANSWER = Constraint(form=Form.JSON_SCHEMA, source="true", field="response_format", strict=True)


def constraint_of(*functions: Function, must_call: bool = False, parallel: bool = False, **options: Any) -> Constraint:
    options = {"is_open": False, "thinks": False, **options}
    return tool_call_constraint(ToolSet(functions, functions, must_call, parallel), **options)


def function(name: str, schema: dict[str, Any], *, strict: bool = False) -> Function:
    return Function(name, "", schema, strict=strict, field=f"tools.{name}")


RULES = r"""fenced: "\n" call "\n```"
tagged: "\n" call "\n</tool_call>"
call: "{\"name\": \"f\", \"arguments\": " arguments0 "}" | "{\"name\": \"g\", \"arguments\": " arguments1 "}"
thought[suffix="</think>"]: /(?s:.*)/
to_fence[suffix="```json"]: /(?s:.*)/
to_tag[suffix="<tool_call>"]: /(?s:.*)/
FREE: /(?s:.*)/ & ~/(?s:.*)(```json|<tool_call>)(?s:.*)/
GAP: /[ \n]{0,3}/
"""


@pytest.mark.parametrize(
    ("options", "start"),
    [
        ({}, "(FREE | to_fence fenced | to_tag tagged)"),
        ({"thinks": True}, "thought (FREE | to_fence fenced | to_tag tagged)"),
        ({"must_call": True}, 'GAP "```json" fenced'),
        ({"must_call": True, "thinks": True, "answer": ANSWER}, 'thought GAP "```json" fenced'),
        ({"is_open": True, "must_call": True}, "fenced"),
        ({"answer": ANSWER}, 'GAP ("```json" fenced | answer)'),
    ],
)
def test_the_grammar_of_an_answer(options: dict[str, Any], start: str) -> None:
    made = constraint_of(function("f", CITY, strict=True), function("g", {"$ref": "#"}), **options)
    assert (made.form, made.field, made.source) == (Form.LARK, "tools", f"start: {start}\n{RULES}")
    closed = {"type": "object", "properties": CITY["properties"], "additionalProperties": False}
    expected = [
        SchemaRule(name="arguments0", source=json.dumps(closed, ensure_ascii=False), field="tools.f", strict=True),
        SchemaRule(name="arguments1", source='{"$ref": "#"}', field="tools.g", strict=False),
    ]
    if "answer" in options:
        expected.append(SchemaRule(name="answer", source="true", field="response_format", strict=True))
    assert list(made.rules) == expected


def test_several_calls_follow_each_other() -> None:
    source = constraint_of(function("f", {}), parallel=True).source
    fenced, tagged = source.splitlines()[1:3]
    assert fenced == r'fenced: "\n" call "\n```" ("\n```json" "\n" call "\n```"){0,15} ("\n\n")?'
    assert tagged == r'tagged: "\n" call "\n</tool_call>" ("\n<tool_call>" "\n" call "\n</tool_call>"){0,15} ("\n\n")?'


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({}, {"type": "object", "properties": {}, "additionalProperties": False}),
        ({"additionalProperties": True}, {"type": "object", "properties": {}, "additionalProperties": True}),
        *(({name: {}}, {"type": "object", "properties": {}, name: {}})
          for name in ("patternProperties", "unevaluatedProperties", "propertyNames")),
        *(({name: [{}], "a": 1}, {name: [{}], "a": 1}) for name in ("$ref", "anyOf", "oneOf", "allOf", "not", "if")),
    ],
)  # fmt: skip
def test_arguments_are_the_declared_ones(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    (rule,) = constraint_of(function("f", schema)).rules
    assert json.loads(rule.source) == expected
