"""What chat and text completions answer, as models: for the OpenAPI document and the reference, as the others'."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from routes.response.response_models import END, OpenAIErrorBody, Usage


class OpenAIFrame(BaseModel):
    """What every OpenAI answer and chunk has."""

    id: str
    created: int = Field(description="Unix time in seconds.")
    model: str = Field(description="As asked for.")
    system_fingerprint: str = Field(description="Of the weights.")


class UnusualEnd(BaseModel):
    """Why an answer ended, where OpenAI has no word for it."""

    end_reason: Literal["timeout", "cancelled", "error"] | None = Field(
        None,
        description="Only where the answer was cut for this; `finish_reason` is `length` then, as clients know it.",
    )


class Rival(BaseModel):
    """A token that might have been drawn."""

    token: str
    logprob: float = Field(description="Before truncation; at least -9999.")
    bytes: list[int]


class ChosenToken(Rival):
    """A token that was drawn."""

    top_logprobs: list[Rival]


class ChatLogprobs(BaseModel):
    """Log-probabilities of the shown tokens."""

    content: list[ChosenToken]
    refusal: None


class CalledFunction(BaseModel):
    """What a call is of; in a stream, what is new of it."""

    name: str = Field("", description="In a stream it comes once, whole, before the arguments.")
    arguments: str = Field(description="JSON as text.")


class ToolCall(BaseModel):
    """A function that the answer calls."""

    id: str = Field(description="`call_` and 32 hexadecimal digits, for the message with its result.")
    type: Literal["function"]
    function: CalledFunction


class ToolCallDelta(BaseModel):
    """What is new of a call."""

    index: int = Field(description="Its place among the answer's calls.")
    id: str = Field("", description="Only there at its beginning, as the next.")
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    """An answer."""

    role: Literal["assistant"]
    content: str | None = Field(description="Null where there are calls and no text before them.")
    tool_calls: list[ToolCall] = Field([], description="The functions that it calls, if any.")
    refusal: None
    reasoning_content: str = Field("", description="The thought before it, if there was one.")


class ChatChoice(UnusualEnd):
    """One of `n` answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] = Field(
        description=f"{END} `tool_calls`: it has made calls."
    )
    error: OpenAIErrorBody | None = Field(None, description="Only where `end_reason` is `error`.")


class DrawnTokens(BaseModel):
    """What was drawn."""

    reasoning_tokens: int = Field(description="Of the thoughts.")


class ChatUsage(Usage):
    """Tokens of all answers; the conversation was read once."""

    completion_tokens_details: DrawnTokens


class ChatAnswer(OpenAIFrame):
    """OpenAI's chat.completion."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: ChatUsage


class ChatDelta(BaseModel):
    """New text."""

    role: Literal["assistant"] = Field("assistant", description="Only there at the beginning.")
    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[ToolCallDelta] = []


class ChatChunkChoice(UnusualEnd):
    """Update of one answer."""

    index: int
    delta: ChatDelta
    finish_reason: Literal["stop", "length", "tool_calls"] | None = Field(description=END)
    logprobs: ChatLogprobs | None = None


class ChatChunk(OpenAIFrame):
    """OpenAI's chat.completion.chunk."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice] = Field(description="One; none beside the usage.")
    usage: ChatUsage | None = Field(None, description="In the last chunk, with stream_options.include_usage.")


class CompletionLogprobs(BaseModel):
    """Log-probabilities of the shown tokens, with `echo` of the prompt's before them."""

    tokens: list[str]
    token_logprobs: list[float | None] = Field(description="Null of a prompt's first token, as the next.")
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int] = Field(description="Characters of the text before each token.")


class CompletionChoice(UnusualEnd):
    """One answer, or a part of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None = Field(description=f"{END} Null while more comes.")
    error: OpenAIErrorBody | None = Field(
        None, description="Only where `end_reason` is `error`, of an answer that is not streamed."
    )


class CompletionAnswer(OpenAIFrame):
    """OpenAI's text_completion."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(OpenAIFrame):
    """OpenAI's text_completion in a stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice] = Field(description="One; none beside the usage.")
    usage: Usage | None = Field(None, description="In the last chunk, with stream_options.include_usage.")
