"""The functions that an answer may call: how a prompt lists them, and what a conversation's calls look like in it."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import Any

from routes.request.signatures import signature

FENCE = "```json"
"""What a call begins with; as the end of a prompt it makes the answer a call."""
FENCE_END = "```"
TAG, TAG_END = "<tool_call>", "</tool_call>"
"""The same in the form of other models, which this one has seen too."""
_LISTING_TEMPLATE = "Tools:\n{}\nReturn only a JSON function call."


@dataclass(frozen=True, slots=True)
class Function:
    """A function as a request describes it."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON Schema of the arguments, an object"""
    strict: bool
    """Whether a schema that cannot be held to is refused, rather than held to as far as possible"""
    field: str
    """where the request has the schema, for refusals"""


@dataclass(frozen=True, slots=True)
class ToolSet:
    """What an answer may call, and whether it has to."""

    prompt_functions: tuple[Function, ...]
    """in the prompt"""
    allowed_functions: tuple[Function, ...]
    """may be called: all of them, or those that the request chose"""
    must_call: bool
    parallel_calls: bool
    """whether one answer may have several calls"""

    @property
    def listing(self) -> str:
        """What the prompt says of the functions, at the end of its instructions."""
        lines = (f"- {signature(one.name, one.description, one.parameters)}" for one in self.prompt_functions)
        return _LISTING_TEMPLATE.format("\n".join(lines))


def begins_with_call(tool_set: ToolSet | None, *, thinks: bool, continues: bool) -> bool:
    """Whether the prompt ends with FENCE: the answer has to be a call, and nothing stands before it."""
    return tool_set is not None and tool_set.must_call and not thinks and not continues


def call_text(name: str, arguments: str) -> str:
    """A call as a prompt repeats it; arguments that are no JSON stay as they are."""
    with contextlib.suppress(ValueError, RecursionError):
        arguments = json.dumps(json.loads(arguments), ensure_ascii=False)
    return f'{FENCE}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}\n{FENCE_END}'
