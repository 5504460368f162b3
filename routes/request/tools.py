"""The functions that an answer may call: signatures, format in prompts, and grammar of calls."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import Any

from sampling.grammar.constraint import THINK_END, Constraint, Form, SchemaRule

_MAX_PARTS = 2000
"""Per signature. References can expand a small schema into a large text."""
_MAX_CHARACTERS = 1_000_000
"""Per signature. Further parts become `object`: references can repeat a long text."""
_MAX_DEPTH = 8
_REFERENCES = ("#/$defs/", "#/definitions/")


def signature(name: str, description: str, parameters: dict[str, Any]) -> str:
    """Return one line of the tool list, with descriptions as comments."""
    line = f"{name}({_Signature(parameters).parameters()})"
    return f"{line} // {_one_line(description)}" if description.strip() else line


class _Signature:
    """Writes one schema. Parts that are too deep or too long become `object`."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._parts_left = _MAX_PARTS
        self._characters_left = _MAX_CHARACTERS

    def parameters(self) -> str:
        """Return the text between the parentheses."""
        return self._properties(self._resolved(self._root), 0)

    def _properties(self, schema: dict[str, Any], depth: int) -> str:
        properties = schema.get("properties")
        given = schema.get("required")
        required = {one for one in given if isinstance(one, str)} if isinstance(given, list) else set()
        parts = []
        for name, part in properties.items() if isinstance(properties, dict) else ():
            mark = "" if name in required else "?"
            about = part.get("description") if isinstance(part, dict) else None
            comment = f" /* {_one_line(about)} */" if isinstance(about, str) and about.strip() else ""
            parts.append(f"{name}{mark}: {self._type(part, depth + 1)}{comment}")
        return ", ".join(parts)

    def _type(self, schema: Any, depth: int) -> str:
        self._parts_left -= 1
        if not isinstance(schema, dict):
            return "any"
        if depth > _MAX_DEPTH or self._parts_left < 0 or self._characters_left < 0:
            return "object"
        text = self._dict_type(self._resolved(schema), depth)
        self._characters_left -= len(text)
        return text

    def _dict_type(self, schema: dict[str, Any], depth: int) -> str:
        if "const" in schema:
            return _literal(schema["const"])
        if isinstance(schema.get("enum"), list):
            return self._union([_literal(value) for value in schema["enum"]])
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(schema.get(key), list):
                return self._union([self._type(part, depth + 1) for part in schema[key]])
        kind = schema.get("type", "object" if "properties" in schema else "any")
        kinds = kind if isinstance(kind, list) else [kind]
        return self._union([self._single_type(str(one), schema, depth) for one in kinds])

    def _single_type(self, kind: str, schema: dict[str, Any], depth: int) -> str:
        if kind == "array":
            item = self._type(schema.get("items"), depth + 1)
            return f"({item})[]" if " | " in item else f"{item}[]"
        if kind == "object" and isinstance(schema.get("properties"), dict):
            return f"{{{self._properties(schema, depth)}}}"
        return kind

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return the target of a schema's $ref. Returns the schema itself without a valid one."""
        reference = schema.get("$ref")
        for start in _REFERENCES:
            if isinstance(reference, str) and reference.startswith(start):
                shared = self._root.get(start.split("/")[1])
                found = shared.get(reference.removeprefix(start)) if isinstance(shared, dict) else None
                return found if isinstance(found, dict) else schema
        return schema

    @staticmethod
    def _union(types: list[str]) -> str:
        return " | ".join(dict.fromkeys(types)) or "any"


def _literal(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _one_line(text: str) -> str:
    return " ".join(text.split())


FENCE = "```json"
"""Start of a tool call. At the end of a prompt, it forces a call."""
FENCE_END = "```"
TAG, TAG_END = "<tool_call>", "</tool_call>"
"""The tool call format of other models, which the training data contains too."""
_LISTING_TEMPLATE = "Tools:\n{}\nReturn only a JSON function call."


@dataclass(frozen=True, slots=True)
class Function:
    name: str
    description: str
    parameters: dict[str, Any]
    """JSON Schema of the arguments, an object."""
    strict: bool
    """Whether an unsupported schema is refused. If not, it is enforced as far as possible."""
    field: str
    """Request field of the schema, for errors."""


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The functions of a request, and whether the answer must call one."""

    prompt_functions: tuple[Function, ...]
    """The functions listed in the prompt."""
    allowed_functions: tuple[Function, ...]
    """The functions that may be called: all, or those of `tool_choice`."""
    must_call: bool
    parallel_calls: bool
    """Whether one answer may have several calls."""

    @property
    def listing(self) -> str:
        """The tool list at the end of the system message."""
        lines = (f"- {signature(one.name, one.description, one.parameters)}" for one in self.prompt_functions)
        return _LISTING_TEMPLATE.format("\n".join(lines))


def begins_with_call(tool_set: ToolSet | None, *, thinks: bool, continues: bool) -> bool:
    """Return whether the prompt ends with FENCE: the answer must be a call, with nothing before it."""
    return tool_set is not None and tool_set.must_call and not thinks and not continues


def call_text(name: str, arguments: str) -> str:
    """Return a call in the prompt's format. Arguments that are not JSON are kept unchanged."""
    with contextlib.suppress(ValueError, RecursionError):
        arguments = json.dumps(json.loads(arguments), ensure_ascii=False)
    return f'{FENCE}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}\n{FENCE_END}'


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
            name=f"arguments{i}",
            source=json.dumps(_arguments_schema(function.parameters), ensure_ascii=False),
            field=function.field,
            strict=function.strict,
        )
        for i, function in enumerate(tool_set.allowed_functions)
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
    """Return the rule of one or more calls. A blank line may follow, as in the training data."""
    one = f'"\\n" call {_quoted(chr(10) + closing)}'
    more = f' ({_quoted(chr(10) + opening)} {one}){{0,{MAX_CALLS - 1}}} ("\\n\\n")?' if parallel_calls else ""
    return [f"{name}: {one}{more}"]


def _call_body_rule(i: int, function: Function) -> str:
    head = f'{{"name": {_quoted(function.name)}, "arguments": '
    return f'{_quoted(head)} arguments{i} "}}"'


def _arguments_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return `schema` as an object schema allowing only the declared properties.

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
