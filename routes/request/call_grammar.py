"""The grammar of an answer that may call functions: text is free, arguments are held to the function's schema."""

from __future__ import annotations

import json
from typing import Any

from routes.request.constraints import CLOSED_THOUGHT
from routes.request.toolbox import FENCE, FENCE_END, TAG, TAG_END, Function, Toolbox
from sampling.grammar.constraint import Constraint, Form, SchemaRule

MOST_CALLS = 16
"""Of one answer."""
_COMBINED = ("$ref", "anyOf", "oneOf", "allOf", "not", "if")
_OPEN_ENDED = ("patternProperties", "unevaluatedProperties", "propertyNames")


def call_constraint(toolbox: Toolbox, *, is_open: bool, thinks: bool, answer: Constraint | None = None) -> Constraint:
    """What the text behind the prompt is held to.

    is_open: the prompt ended with FENCE. thinks: a thought comes first. answer: the JSON of an answer without calls.
    """
    rules = [
        SchemaRule(
            name=f"arguments{at}",
            source=json.dumps(_of_arguments(function.parameters), ensure_ascii=False),
            field=function.field,
            strict=function.strict,
        )
        for at, function in enumerate(toolbox.callable)
    ]
    lines = [
        f"start: {'thought ' if thinks else ''}{_answers(toolbox.must_call, is_open, answer)}",
        *_marked("fenced", FENCE, FENCE_END, toolbox.several),
        *_marked("tagged", TAG, TAG_END, toolbox.several),
        f"call: {' | '.join(map(_call, range(len(rules)), toolbox.callable))}",
        f"thought[suffix={_quoted(CLOSED_THOUGHT)}]: /(?s:.*)/",
        f"to_fence[suffix={_quoted(FENCE)}]: /(?s:.*)/",
        f"to_tag[suffix={_quoted(TAG)}]: /(?s:.*)/",
        f"FREE: /(?s:.*)/ & ~/(?s:.*)({FENCE}|{TAG})(?s:.*)/",
        r"GAP: /[ \n]{0,3}/",
    ]
    if answer is not None:
        rules.append(SchemaRule(name="answer", source=answer.source, field=answer.field, strict=answer.strict))
    return Constraint(form=Form.LARK, source="\n".join(lines) + "\n", rules=tuple(rules), field="tools")


def _answers(must_call: bool, is_open: bool, answer: Constraint | None) -> str:
    if is_open:
        return "fenced"
    if must_call:
        return f"GAP {_quoted(FENCE)} fenced"
    if answer is not None:
        return f"GAP ({_quoted(FENCE)} fenced | answer)"
    return "(FREE | to_fence fenced | to_tag tagged)"


def _marked(name: str, opening: str, closing: str, several: bool) -> list[str]:
    """A call behind its opening, and more of them; then the round may end, as it does in the texts of the training."""
    one = f'"\\n" call {_quoted(chr(10) + closing)}'
    more = f' ({_quoted(chr(10) + opening)} {one}){{0,{MOST_CALLS - 1}}} ("\\n\\n")?' if several else ""
    return [f"{name}: {one}{more}"]


def _call(at: int, function: Function) -> str:
    head = f'{{"name": {_quoted(function.name)}, "arguments": '
    return f'{_quoted(head)} arguments{at} "}}"'


def _of_arguments(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object that has what the function takes, and nothing else unless the schema speaks of it."""
    if any(key in schema for key in _COMBINED):
        return schema
    made = {"type": "object", "properties": {}, **schema}
    if "additionalProperties" not in made and not any(key in made for key in _OPEN_ENDED):
        made["additionalProperties"] = False
    return made


def _quoted(text: str) -> str:
    return json.dumps(text)
