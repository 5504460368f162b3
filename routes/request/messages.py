"""Messages of a chat, in OpenAI's form."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from routes.request.fields import IgnoredValue, Repeated, Unsupported


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class TextPart(_Part):
    """One part of a message's content. Only text is supported."""

    type: Literal["text"]
    text: str


class MessageFunction(_Part):
    """The function of a tool call."""

    name: str = Field(max_length=128)
    arguments: str = Field(description="JSON as text.")


class MessageToolCall(_Part):
    """A tool call of an earlier answer."""

    id: str = Field("", max_length=256)
    type: Literal["function"] = "function"
    function: MessageFunction
    index: Repeated = Field(None, description="Accepted: a stream's deltas have it.")


class Message(_Part):
    """One message of a conversation, in OpenAI's format."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(max_length=128, fail_fast=True)] | None = Field(
        None, description="Assistant messages: the tool calls of this message."
    )
    tool_call_id: str | None = Field(
        None,
        max_length=256,
        description="Tool messages: id of the call that this message answers. Results follow their calls.",
    )
    name: IgnoredValue = Field(None, description="Accepted and ignored. `template` names the speakers.")
    reasoning_content: Repeated = Field(None, description="Accepted and not read: earlier answers have it.")
    annotations: Repeated = Field(None, description="Accepted and not read.")
    function_call: Unsupported = Field(None, description="Not supported; refused.")
    audio: Unsupported = Field(None, description="Not supported; refused.")
    refusal: Unsupported = Field(None, description="Not supported; refused.")

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""
