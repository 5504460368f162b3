"""Models of chat and text completions. They are for the OpenAPI document and the reference only."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from routes.response.response_models import END, OpenAIErrorBody, Usage, WithWarnings


class OpenAIFrame(WithWarnings):
    """Fields of every OpenAI answer and chunk."""

    id: str
    created: int = Field(description="Unix time in seconds.")
    model: str = Field(description="As in the request.")
    system_fingerprint: str = Field(description="Digest of the weights.")


class UnusualEnd(BaseModel):
    """Reasons to end that OpenAI does not have."""

    end_reason: Literal["timeout", "cancelled", "error"] | None = Field(
        None, description="Why the answer was cut. `finish_reason` is `length` then, for OpenAI's clients."
    )


class TopLogprob(BaseModel):
    """One of the likeliest tokens at a position."""

    token: str
    logprob: float = Field(description="Before top_k and top_p. The minimum is -9999.")
    bytes: list[int]


class ChosenToken(TopLogprob):
    """The sampled token, with alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of the answer's tokens."""

    content: list[ChosenToken]
    refusal: None


class CalledFunction(BaseModel):
    """The function of a call. In a stream: its new part."""

    name: str = Field("", description="In a stream, the whole name is in the call's first delta.")
    arguments: str = Field(description="JSON as text.")


class ToolCall(BaseModel):
    """A call of a function."""

    id: str = Field(description="`call_` and 32 hexadecimal digits. The message with the result repeats it.")
    type: Literal["function"]
    function: CalledFunction


class ToolCallDelta(BaseModel):
    """New output of a call."""

    index: int = Field(description="Index of the call in the answer.")
    id: str = Field("", description="Only in the call's first delta, like the next field.")
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    """The message of an answer."""

    role: Literal["assistant"]
    content: str | None = Field(description="null if there are calls and no text before them.")
    tool_calls: list[ToolCall] = Field([], description="The tool calls of the answer.")
    refusal: None
    reasoning_content: str = Field("", description="The reasoning before the answer.")


class ChatChoice(UnusualEnd):
    """One of `n` answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] = Field(
        description=f"{END} `tool_calls`: the answer ends with tool calls."
    )
    error: OpenAIErrorBody | None = Field(None, description="Only if `end_reason` is `error`.")


class CompletionTokensDetails(BaseModel):
    """Details of the generated tokens."""

    reasoning_tokens: int = Field(description="Tokens of the reasoning.")
    accepted_prediction_tokens: int = Field(description="Tokens of the answer that were taken from `prediction`.")
    rejected_prediction_tokens: int = Field(
        description="Tokens of `prediction` that were tried and not generated. They are in no other count."
    )


class CompletionUsage(Usage):
    """Tokens of all answers. The prompt counts once, for any `n`."""

    completion_tokens_details: CompletionTokensDetails


class PromptLogprob(BaseModel):
    """vLLM's log-probability of a token of the prompt, or of an alternative."""

    logprob: float
    rank: int | None = Field(description="From 1 on. null for a token that is not among the alternatives.")
    decoded_token: str


PromptTokens = list[dict[str, PromptLogprob] | None]
"""For each token of the prompt: token id -> log-probability."""


class ChatAnswer(OpenAIFrame):
    """OpenAI's chat.completion."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: CompletionUsage
    prompt_logprobs: PromptTokens | None = Field(
        None, description="Only with `prompt_logprobs`. One entry per token of the prompt; null for the first one."
    )


class ChatDelta(BaseModel):
    """New output."""

    role: Literal["assistant"] = Field("assistant", description="Only in the first delta.")
    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[ToolCallDelta] = []


class ChatChunkChoice(UnusualEnd):
    """An update of one answer."""

    index: int
    delta: ChatDelta
    finish_reason: Literal["stop", "length", "tool_calls"] | None = Field(description=END)
    logprobs: ChatLogprobs | None = None


class ChatChunk(OpenAIFrame):
    """OpenAI's chat.completion.chunk."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice] = Field(description="One choice. Empty in the chunk with the usage.")
    usage: CompletionUsage | None = Field(None, description="In the last chunk, with stream_options.include_usage.")


class CompletionLogprobs(BaseModel):
    """Log-probabilities of the answer's tokens. With `echo`, the prompt's come first."""

    tokens: list[str]
    token_logprobs: list[float | None] = Field(description="null for a prompt's first token, like the next field.")
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int] = Field(description="Number of characters before each token.")


class CompletionChoice(UnusualEnd):
    """One answer, or part of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None = Field(description=f"{END} null before the end.")
    error: OpenAIErrorBody | None = Field(None, description="Only if `end_reason` is `error`, and not in a stream.")


class ScoredChoice(CompletionChoice):
    """One answer."""

    prompt_logprobs: PromptTokens | None = Field(
        None, description="Only with `prompt_logprobs`. One entry per token of the prompt; null for the first one."
    )


class CompletionAnswer(OpenAIFrame):
    """OpenAI's text_completion."""

    object: Literal["text_completion"]
    choices: list[ScoredChoice]
    usage: CompletionUsage


class CompletionChunk(OpenAIFrame):
    """OpenAI's text_completion in a stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice] = Field(description="One choice. Empty in the chunk with the usage.")
    usage: CompletionUsage | None = Field(None, description="In the last chunk, with stream_options.include_usage.")
