"""Request bodies of Anthropic's Messages API, and their conversion to OpenAI's format."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from routes.openai.request import ChatBody
from routes.openai.tools import MAX_TOOLS, Name
from routes.request.bodies import Body, StopText
from routes.request.fields import Fields, Ignored, IgnoredValue, Pattern, Repeated, Unsupported, rename_fields
from routes.request.json_body import validate
from routes.request.sampler_fields import SamplerFields
from sampling.params import Filters

_CACHE = Field(None, description="Accepted and not read: every prefix may be cached.")
_RENAMED = {"max_tokens": "max_tokens", "stop": "stop_sequences", "response_format": "output_config.format"}
"""Fields of the OpenAI routes in errors -> the request's."""


class AnthropicChat(ChatBody):
    """A conversation from Anthropic's API."""

    schema_field: ClassVar[str] = "output_config.format.schema"
    parameters_field: ClassVar[str] = "tools[{}].input_schema"


class Block(Fields):
    """A part of a message."""

    cache_control: Repeated = _CACHE


class TextBlock(Block):
    """Text."""

    type: Literal["text"]
    text: str
    citations: Repeated = None


class ThinkingBlock(Block):
    """Reasoning of an earlier answer. It is accepted and not read."""

    type: Literal["thinking"]
    thinking: Repeated = None
    signature: Repeated = None


class RedactedThinkingBlock(Block):
    """Hidden reasoning of another service. It is accepted and not read."""

    type: Literal["redacted_thinking"]
    data: Repeated = None


class ToolUseBlock(Block):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: str = Field(max_length=256)
    name: str = Field(max_length=128)
    input: dict[str, Any]
    caller: Repeated = None


class ToolResultBlock(Block):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(max_length=256)
    content: str | Annotated[list[TextBlock], Field(fail_fast=True)] = ""
    is_error: bool = False


def _block_type(block: Any) -> str | None:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return kind if isinstance(kind, str) else None


ContentBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    Discriminator(
        _block_type,
        custom_error_type="block",
        custom_error_message="must be of type text, thinking, redacted_thinking, tool_use or tool_result; images, "
        "documents and server tools are not supported",
    ),
]


class AnthropicMessage(Fields):
    """One message of a conversation."""

    role: Literal["user", "assistant"]
    content: str | Annotated[list[ContentBlock], Field(fail_fast=True)]


class AnthropicTool(Fields):
    """A function that the answer may call."""

    type: Annotated[str, Pattern("^custom$", '"custom": server tools are not supported')] = "custom"
    name: Name
    description: str = Field("", max_length=65536)
    input_schema: dict[str, Any] = Field(description="JSON Schema of the arguments.")
    strict: bool = False
    cache_control: Repeated = _CACHE
    eager_input_streaming: Repeated = None
    input_examples: IgnoredValue = None
    defer_loading: IgnoredValue = None
    allowed_callers: IgnoredValue = None

    @property
    def openai(self) -> dict[str, Any]:
        """The tool in OpenAI's format."""
        function = {"name": self.name, "description": self.description, "strict": self.strict}
        return {"type": "function", "function": {**function, "parameters": self.input_schema}}


class AnthropicToolChoice(Fields):
    """Which tools may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str = Field("", max_length=128)
    disable_parallel_tool_use: bool = False

    @property
    def openai(self) -> str | dict[str, Any]:
        """The choice in OpenAI's format."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class Thinking(Fields):
    """`thinking` of a request."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, ge=1, description="Maximum tokens of the reasoning.")
    display: Repeated = None


class OutputFormat(Fields):
    """The format of the answer's text."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(
        alias="schema", description="A JSON Schema. Keywords that cannot be enforced are left out."
    )


class OutputConfig(Fields):
    """`output_config` of a request."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


_EFFORTS = {"max": "xhigh"}
"""Efforts of another name in OpenAI's API."""


class MessagesPrompt(Body):
    """Fields of both routes: the contents of the prompt."""

    model: str = Field("rwkv7", max_length=256, description="As on the other routes. Repeated in the answer.")
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, fail_fast=True)] = Field(
        description='[{"role": "user", "content": "…"}], or blocks as content. Successive messages of one role are one '
        "turn. A last message of the assistant is continued."
    )
    system: str | Annotated[list[TextBlock], Field(fail_fast=True)] = Field("", description="System message.")
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(
        [], description="Functions that the answer may call. With them, penalties default to 0."
    )
    tool_choice: AnthropicToolChoice | None = Field(
        None, description="auto, any, tool with `name`, or none, as `type`."
    )
    thinking: Thinking | None = Field(None, description='{"type": "enabled"}: let the model think first.')
    output_config: OutputConfig = Field(
        OutputConfig.model_validate({}), description="`format`: JSON with a schema; `effort`: length of the reasoning."
    )
    cache_control: Repeated = _CACHE

    @property
    def size(self) -> int:
        """Approximate number of characters in the messages."""
        contents = (one.content for one in self.messages)
        return sum(len(one) if isinstance(one, str) else sum(map(_length, one)) for one in contents)

    def chat(self) -> AnthropicChat:
        """Return the request in OpenAI's format. Raises ServiceError."""
        with rename_fields(**_RENAMED):
            return validate(AnthropicChat, self._fields)

    @property
    def _fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"model": self.model, "messages": list(self._openai_messages())}
        if self.tools:
            fields["tools"] = [tool.openai for tool in self.tools]
        if (choice := self.tool_choice) is not None:
            fields |= {"tool_choice": choice.openai, "parallel_tool_calls": not choice.disable_parallel_tool_use}
        if self.thinking is not None and self.thinking.type != "disabled":
            effort = self.output_config.effort
            fields |= {"enable_think": True} if effort is None else {"reasoning_effort": _EFFORTS.get(effort, effort)}
            fields["thinking_token_budget"] = self.thinking.budget_tokens
        if self.output_config.format is not None:
            schema = {"name": "answer", "schema": self.output_config.format.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields

    def _openai_messages(self) -> Iterable[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if system := _text(self.system):
            messages.append({"role": "system", "content": [system]})
        for message in self.messages:
            given = message.content
            for block in [TextBlock(type="text", text=given)] if isinstance(given, str) else given:
                _append_block(messages, message.role, block)
        return [{**message, "content": "\n".join(message["content"])} for message in messages]


class MessagesBody(SamplerFields, MessagesPrompt):
    """Body of `/v1/messages`. Anthropic's API has none of the further samplers."""

    max_tokens: int = Field(ge=1, description="Maximum number of generated tokens.")
    stop_sequences: Annotated[list[StopText], Field(max_length=64, fail_fast=True)] = Field(
        [], description="Texts that end the answer."
    )
    stream: bool = Field(False, description="Answer with server-sent events.")
    temperature: float | None = Field(None, ge=0, le=100, description="Sampling temperature. 0 is greedy.")
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="0 or -1: off.")
    top_p: float | None = Field(None, ge=0, le=1, description="1 turns it off.")
    metadata: IgnoredValue = Field(None, description="Accepted and ignored.")
    service_tier: Annotated[Any, Ignored(("auto", "standard_only"))] = Field(None, description="Accepted and ignored.")
    mcp_servers: Unsupported = Field(None, description="Not supported; refused.")
    container: Unsupported = Field(None, description="Not supported; refused.")

    @property
    def _fields(self) -> dict[str, Any]:
        shared = {"max_tokens": self.max_tokens, "stream": self.stream, "stop": self.stop_sequences}
        given = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p")}
        given |= self.given_samplers(repeat_last_n=Filters().repeat_last_n)
        return {**super()._fields, **shared, **{name: one for name, one in given.items() if one is not None}}


def _append_block(messages: list[dict[str, Any]], role: str, block: Any) -> None:
    """Append a block. Text and calls join the preceding message of the same role.

    A message's content is a list of lines here: a text that grows by each block would be copied for each block.
    """
    last = messages[-1] if messages and messages[-1]["role"] == role else None
    match block:
        case TextBlock() if last is not None and "tool_calls" not in last:
            last["content"].append(block.text)
        case TextBlock():
            messages.append({"role": role, "content": [block.text]})
        case ToolUseBlock():
            if last is None:
                messages.append(last := {"role": role, "content": []})
            function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            last.setdefault("tool_calls", []).append({"id": block.id, "function": function})
        case ToolResultBlock():
            text = _text(block.content)
            content = f"Error: {text}" if block.is_error else text
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": [content]})


def _length(block: Any) -> int:
    if isinstance(block, TextBlock):
        return len(block.text)
    content: str | list[TextBlock] = getattr(block, "content", "")
    return len(content) if isinstance(content, str) else sum(map(_length, content))


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
