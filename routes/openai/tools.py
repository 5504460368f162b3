"""`tools` and `tool_choice` as OpenAI's bodies write them, and the toolbox that they mean."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import PydanticCustomError

from routes.request.bodies import Fields
from routes.request.fields import Shape
from routes.request.toolbox import Function, Toolbox

MAX_TOOLS = 128
Name = Annotated[str, Shape(r"^[a-zA-Z0-9_.-]{1,64}$", "1..64 letters, digits, '_', '.' and '-'")]
Mode = Literal["none", "auto", "required"]


class FunctionFields(Fields):
    """A function that may be called."""

    name: Name
    description: str = Field("", max_length=16384)
    parameters: dict[str, Any] = Field({}, description="JSON Schema of the arguments.")
    strict: bool = False

    def function(self, field: str) -> Function:
        """The function, whose schema stands at `field` of the request."""
        return Function(self.name, self.description, self.parameters, self.strict, field)


class ChatTool(Fields):
    """An entry of `tools`."""

    type: Literal["function"]
    function: FunctionFields


class Named(Fields):
    """A function by its name."""

    name: str = Field(max_length=64)


class NamedTool(Fields):
    """The one tool to call."""

    type: Literal["function"]
    function: Named


class AllowedTools(Fields):
    """Which tools may be called, or have to."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedChoice(Fields):
    """A choice of several tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ChatTools = Annotated[list[ChatTool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ChatToolChoice = Mode | NamedTool | AllowedChoice


def chat_toolbox(tools: list[ChatTool], choice: ChatToolChoice | None, several: bool) -> Toolbox | None:
    """What an answer may call; None: nothing. Raises PydanticCustomError where the choice does not fit the tools."""
    functions = [tool.function.function(f"tools[{at}].function.parameters") for at, tool in enumerate(tools)]
    if isinstance(choice, NamedTool):
        return toolbox(functions, "required", [choice.function.name], several)
    if isinstance(choice, AllowedChoice):
        allowed = choice.allowed_tools
        return toolbox(functions, allowed.mode, [tool.function.name for tool in allowed.tools], several)
    return toolbox(functions, choice, None, several)


def toolbox(
    functions: Sequence[Function], mode: Mode | None, only: Sequence[str] | None, several: bool
) -> Toolbox | None:
    """The same of plain values; `only`: the names chosen, None for all."""
    names = [function.name for function in functions]
    for at, function in enumerate(functions):
        if function.name in names[:at]:
            raise _refusal(f"has two functions of the name {function.name}", "tools")
        if function.parameters.get("type", "object") != "object":
            raise _refusal(
                f'must be "object", got {json.dumps(function.parameters["type"])[:80]}', f"{function.field}.type"
            )
    for name in only or ():
        if name not in names:
            raise _refusal(f"names {name!r}, which is not among the tools", "tool_choice")
    if not functions and mode == "required":
        raise _refusal("is required, but there are no tools", "tool_choice")
    if not functions or mode == "none":
        return None
    chosen = tuple(function for function in functions if only is None or function.name in only)
    return Toolbox(tuple(functions), chosen, must_call=mode == "required", several=several)


def _refusal(why: str, field: str) -> PydanticCustomError:
    return PydanticCustomError("tools", "{field} {why}", {"field": field, "why": why})
