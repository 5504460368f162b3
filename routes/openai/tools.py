"""OpenAI's `tools` and `tool_choice`, and the tool set that they select."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import PydanticCustomError

from routes.request.bodies import Fields
from routes.request.fields import Pattern, body_error
from routes.request.messages import Message
from routes.request.tools import Function, ToolSet

MAX_TOOLS = 128
Name = Annotated[str, Pattern(r"^[a-zA-Z0-9_.-]{1,128}$", "1 to 128 letters, digits, '_', '.' and '-'")]
Mode = Literal["none", "auto", "required"]


class FunctionFields(Fields):
    """A function that the answer may call."""

    name: Name
    description: str = Field("", max_length=65536)
    parameters: dict[str, Any] = Field({}, description="JSON Schema of the arguments.")
    strict: bool = False

    def function(self, field: str) -> Function:
        """Return the function. `field`: request field of its schema."""
        return Function(self.name, self.description, self.parameters, self.strict, field)


class ChatTool(Fields):
    """An entry of `tools`."""

    type: Literal["function"]
    function: FunctionFields


class FunctionName(Fields):
    """The name of a function."""

    name: str = Field(max_length=128)


class NamedTool(Fields):
    """The one tool to call."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Fields):
    """The tools that may or must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedChoice(Fields):
    """A choice of several tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ChatTools = Annotated[list[ChatTool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ChatToolChoice = Mode | NamedTool | AllowedChoice


PARAMETERS_FIELD = "tools[{}].function.parameters"


def chat_tool_set(
    tools: list[ChatTool], choice: ChatToolChoice | None, parallel_calls: bool, field: str = PARAMETERS_FIELD
) -> ToolSet | None:
    """Return the tools of an answer, or None. Raises PydanticCustomError if the choice does not match the tools.

    field: the request's field of the tool with number {}, for errors
    """
    functions = [tool.function.function(field.format(i)) for i, tool in enumerate(tools)]
    if isinstance(choice, NamedTool):
        return build_tool_set(functions, "required", [choice.function.name], parallel_calls)
    if isinstance(choice, AllowedChoice):
        allowed = choice.allowed_tools
        return build_tool_set(functions, allowed.mode, [tool.function.name for tool in allowed.tools], parallel_calls)
    return build_tool_set(functions, choice, None, parallel_calls)


def wrong_calls(message: Message, tools: list[ChatTool]) -> Iterator[tuple[str, str]]:
    """Yield a field and a reason for each call of a tool that is not listed, or with arguments that are not JSON."""
    names = [tool.function.name for tool in tools]
    for i, call in enumerate(message.tool_calls or ()):
        field = f"tool_calls[{i}].function"
        if names and call.function.name not in names:
            listed = ", ".join(names)[:200]
            yield f"{field}.name", f"names {call.function.name!r}, which is not among the tools ({listed})"
        try:
            json.loads(call.function.arguments)
        except (ValueError, RecursionError) as error:
            yield f"{field}.arguments", f"must be JSON as text ({error})"


def build_tool_set(
    functions: Sequence[Function], mode: Mode | None, allowed_names: Sequence[str] | None, parallel_calls: bool
) -> ToolSet | None:
    """Like `chat_tool_set`, for plain values. `allowed_names`: the chosen names, None for all."""
    names = [function.name for function in functions]
    for i, function in enumerate(functions):
        if function.name in names[:i]:
            raise _tool_error(f"two functions are named {function.name!r}; rename one", "tools")
        if function.parameters.get("type", "object") != "object":
            raise _tool_error(
                f'must be "object", got {json.dumps(function.parameters["type"])[:80]}', f"{function.field}.type"
            )
    for name in allowed_names or ():
        if name not in names:
            listed = ", ".join(names)[:200] or "there are none; add them as `tools`"
            raise _tool_error(f"names {name!r}, which is not among the tools ({listed})", "tool_choice")
    if not functions and mode == "required":
        raise _tool_error("'required' needs at least one tool; add tools or use 'auto'", "tool_choice")
    if not functions or mode == "none":
        return None
    chosen = tuple(function for function in functions if allowed_names is None or function.name in allowed_names)
    return ToolSet(tuple(functions), chosen, must_call=mode == "required", parallel_calls=parallel_calls)


def _tool_error(reason: str, field: str) -> PydanticCustomError:
    return body_error(f"{field}: {reason}", field)
