"""Grammar of an answer with tool calls. Text is free; arguments must match the function's schema."""

from __future__ import annotations

import json
from typing import Any

from routes.request.fields import THINK_END
from routes.request.tool_set import (
    FENCE,
    FENCE_END,
    TAG,
    TAG_END,
    Function,
    ToolSet,
)
from sampling.grammar.constraint import Constraint, Form, SchemaRule

MAX_CALLS = 16
"""Per answer."""
_COMBINATORS = ("$ref", "anyOf", "oneOf", "allOf", "not", "if")
_OPEN_ENDED = ("patternProperties", "unevaluatedProperties", "propertyNames")


def tool_call_constraint(
    tool_set: ToolSet, *, is_open: bool, thinks: bool, answer: Constraint | None = None
) -> Constraint:
    """Return the constraint of an answer that may have tool calls.

    is_open: the prompt ends with FENCE
    thinks: a thought comes first
    answer: JSON constraint of an answer without calls
    """
    rules = [
        SchemaRule(
            name=f"arguments{at}",
            source=json.dumps(_arguments_schema(function.parameters), ensure_ascii=False),
            field=function.field,
            strict=function.strict,
        )
        for at, function in enumerate(tool_set.allowed_functions)
    ]
    lines = [
        f"start: {'thought ' if thinks else ''}{_answer_rule(tool_set.must_call, is_open, answer)}",
        *_call_rule("fenced", FENCE, FENCE_END, tool_set.parallel_calls),
        *_call_rule("tagged", TAG, TAG_END, tool_set.parallel_calls),
        f"call: {' | '.join(map(_call_body_rule, range(len(rules)), tool_set.allowed_functions))}",
        f"thought[suffix={_quoted(THINK_END)}]: /(?s:.*)/",
        f"to_fence[suffix={_quoted(FENCE)}]: /(?s:.*)/",
        f"to_tag[suffix={_quoted(TAG)}]: /(?s:.*)/",
        f"FREE: /(?s:.*)/ & ~/(?s:.*)({FENCE}|{TAG})(?s:.*)/",
        r"GAP: /[ \n]{0,3}/",
    ]
    if answer is not None:
        rules.append(SchemaRule(name="answer", source=answer.source, field=answer.field, strict=answer.strict))
    return Constraint(form=Form.LARK, source="\n".join(lines) + "\n", rules=tuple(rules), field="tools")


def _answer_rule(must_call: bool, is_open: bool, answer: Constraint | None) -> str:
    if is_open:
        return "fenced"
    if must_call:
        return f"GAP {_quoted(FENCE)} fenced"
    if answer is not None:
        return f"GAP ({_quoted(FENCE)} fenced | answer)"
    return "(FREE | to_fence fenced | to_tag tagged)"


def _call_rule(name: str, opening: str, closing: str, parallel_calls: bool) -> list[str]:
    """Return the rule of one or more calls, up to the blank line that may end the turn in training data."""
    one = f'"\\n" call {_quoted(chr(10) + closing)}'
    more = f' ({_quoted(chr(10) + opening)} {one}){{0,{MAX_CALLS - 1}}} ("\\n\\n")?' if parallel_calls else ""
    return [f"{name}: {one}{more}"]


def _call_body_rule(at: int, function: Function) -> str:
    head = f'{{"name": {_quoted(function.name)}, "arguments": '
    return f'{_quoted(head)} arguments{at} "}}"'


def _arguments_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema as an object schema that allows only the declared properties.

    A schema with combinators is returned unchanged.
    """
    if any(key in schema for key in _COMBINATORS):
        return schema
    closed = {"type": "object", "properties": {}, **schema}
    if "additionalProperties" not in closed and not any(key in closed for key in _OPEN_ENDED):
        closed["additionalProperties"] = False
    return closed


def _quoted(text: str) -> str:
    return json.dumps(text)
