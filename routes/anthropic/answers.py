"""Answers of Anthropic's Messages API, for the OpenAPI document and the reference."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from routes.response.response_models import WithWarnings


class AnswerBlock(BaseModel):
    """A part of the answer."""

    type: Literal["text", "thinking", "tool_use"]
    text: str = ""
    thinking: str = Field("", description="Reasoning.")
    signature: str = Field("", description="Always empty.")
    id: str = Field("", description="`toolu_` and 32 hexadecimal digits. The block with the result repeats it.")
    name: str = Field("", description="The tool to call.")
    input: dict[str, Any] = Field({}, description="The arguments. Empty if the call was cut off.")


class AnthropicUsage(BaseModel):
    """Tokens of the request and the answer."""

    input_tokens: int = Field(description="Tokens of the prompt that were computed.")
    cache_read_input_tokens: int = Field(0, description="Tokens of the prompt from a cached prefix.")
    cache_creation_input_tokens: int = Field(0, description="Always 0.")
    output_tokens: int = Field(description="Generated tokens, including the stop token.")


class AnthropicAnswer(WithWarnings):
    """Anthropic's message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str = Field(description="As in the request.")
    content: list[AnswerBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None = Field(description="The entry of `stop_sequences` that ended the answer.")
    end_reason: Literal["timeout", "cancelled", "error"] | None = Field(
        None, description="Why the answer was cut. `stop_reason` is `max_tokens` then."
    )
    usage: AnthropicUsage


class AnthropicEvent(BaseModel):
    """An event of a stream. Its name is its type."""

    type: Literal[
        "message_start", "ping", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    message: AnthropicAnswer | None = Field(None, description="Of message_start: the message without content.")
    index: int = Field(0, description="The block's number, from 0.")
    content_block: AnswerBlock | None = Field(None, description="Of content_block_start: an empty block.")
    delta: dict[str, Any] = Field(
        {}, description="New output of a block by its type: text_delta, thinking_delta, input_json_delta. Of "
        "message_delta: `stop_reason` and `stop_sequence`."
    )  # fmt: skip
    usage: AnthropicUsage | None = Field(None, description="Of message_delta: the sums.")


class CountedTokens(WithWarnings):
    """Number of tokens."""

    input_tokens: int
