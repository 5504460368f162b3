"""The functions that an answer may call, and their format in prompts."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import Any

from routes.request.signatures import signature

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
