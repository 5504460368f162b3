"""What `/openai/v1/responses` answers, as models for the OpenAPI document and the reference."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from routes.openai.response_models import ChosenToken

Status = Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]


class OutputPart(BaseModel):
    """The text of an item."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[Any] = Field([], description="Always empty.")
    logprobs: list[ChosenToken] = Field([], description="Of the text's tokens, where `include` asks for them.")


class OutputItem(BaseModel):
    """A thought, a message, or a call of a function."""

    id: str
    type: Literal["reasoning", "message", "function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] = Field("assistant", description="Of a message.")
    summary: list[Any] = Field([], description="Of a thought; always empty.")
    content: list[OutputPart] = Field([], description="Of a message or a thought; one part.")
    call_id: str = Field("", description="Of a call, for the item with its result.")
    name: str = Field("", description="Of a call.")
    arguments: str = Field("", description="Of a call: JSON as text.")


class ResponseFailure(BaseModel):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(BaseModel):
    """Why a response is not whole."""

    reason: Literal["max_output_tokens", "timeout", "stop"] = Field(description="stop: of a call that a stop has cut.")


class InputTokensDetails(BaseModel):
    """How the input was read."""

    cached_tokens: int = Field(description="Of a session or a cached prefix: not computed.")
    cache_write_tokens: int = Field(description="Always 0: writing is not charged for.")


class OutputTokensDetails(BaseModel):
    """What the output was."""

    reasoning_tokens: int = Field(description="Of its thought.")


class ResponseUsage(BaseModel):
    """Tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int = Field(description="Drawn, the stop token among them.")
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(BaseModel):
    """OpenAI's response. What its request said is repeated."""

    id: str
    object: Literal["response"]
    created_at: int = Field(description="Unix time in seconds.")
    status: Status
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str = Field(description="As asked for.")
    output: list[OutputItem]
    usage: ResponseUsage | None = Field(description="Null until it has ended.")
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    store: Literal[False] = Field(description="Nothing is kept.")
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]


class ResponseEvent(BaseModel):
    """An event of a stream; which fields it has is up to its type, as OpenAI's SDKs expect."""

    type: str = Field(description="Like `response.output_text.delta`; also the SSE event's name.")
    sequence_number: int
    response: ResponseObject | None = Field(None, description="Of created, in_progress and the last.")
    item: OutputItem | None = Field(None, description="Of output_item.added and .done.")
    part: OutputPart | None = Field(None, description="Of content_part.added and .done.")
    item_id: str = ""
    output_index: int = 0
    content_index: int = 0
    delta: str = Field("", description="New text, or new arguments.")
    text: str = Field("", description="The whole text, at its end.")
    name: str = Field("", description="Of a call, at its end, with the next.")
    arguments: str = ""
    logprobs: list[ChosenToken] = []
