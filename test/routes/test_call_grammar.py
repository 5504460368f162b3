"""The grammar of an answer with tool calls, line by line. Also the schemas of the calls' arguments."""

from __future__ import annotations

import json
from typing import Any

import pytest

from routes.request.tools import Function, ToolSet, tool_call_constraint
from sampling.grammar.constraint import Constraint, Form, SchemaRule

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
