"""The grammar of an answer that may call functions: text is free, arguments are held to the function's schema."""

from __future__ import annotations

import json
from typing import Any

from routes.request.constraints import THINK_END
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
"""Of one answer."""
_COMBINATORS = ("$ref", "anyOf", "oneOf", "allOf", "not", "if")
_OPEN_ENDED = ("patternProperties", "unevaluatedProperties", "propertyNames")


def tool_call_constraint(
    tool_set: ToolSet, *, is_open: bool, thinks: bool, answer: Constraint | None = None
) -> Constraint:
    """What the text behind the prompt is held to.

    is_open: the prompt ended with FENCE. thinks: a thought comes first. answer: the JSON of an answer without calls.
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
    """A call behind its opening, and more of them; then the round may end, as it does in the texts of the training."""
    one = f'"\\n" call {_quoted(chr(10) + closing)}'
    more = f' ({_quoted(chr(10) + opening)} {one}){{0,{MAX_CALLS - 1}}} ("\\n\\n")?' if parallel_calls else ""
    return [f"{name}: {one}{more}"]


def _call_body_rule(at: int, function: Function) -> str:
    head = f'{{"name": {_quoted(function.name)}, "arguments": '
    return f'{_quoted(head)} arguments{at} "}}"'


def _arguments_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object that has what the function takes, and nothing else unless the schema speaks of it."""
    if any(key in schema for key in _COMBINATORS):
        return schema
    closed = {"type": "object", "properties": {}, **schema}
    if "additionalProperties" not in closed and not any(key in closed for key in _OPEN_ENDED):
        closed["additionalProperties"] = False
    return closed


def _quoted(text: str) -> str:
    return json.dumps(text)
