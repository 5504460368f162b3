"""Models of the answers of `/openai/v1/responses`.

They are for the OpenAPI document and the reference only.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from routes.openai.completion_models import ChosenToken

Status = Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]


class OutputPart(BaseModel):
    """The text of an item."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[Any] = Field([], description="Always empty.")
    logprobs: list[ChosenToken] = Field(
        [], description="Log-probabilities of the text's tokens, if `include` requests them."
    )


class OutputItem(BaseModel):
    """Reasoning, a message, or a function call."""

    id: str
    type: Literal["reasoning", "message", "function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] = Field("assistant", description="Only in a message.")
    summary: list[Any] = Field([], description="Only in reasoning. Always empty.")
    content: list[OutputPart] = Field([], description="Only in a message or reasoning. One part.")
    call_id: str = Field("", description="Only in a call. The item with the result repeats it.")
    name: str = Field("", description="Only in a call.")
    arguments: str = Field("", description="Only in a call: JSON as text.")


class ResponseFailure(BaseModel):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(BaseModel):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens", "timeout", "stop"] = Field(
        description="stop: a stop string ended the answer inside a function call."
    )


class InputTokensDetails(BaseModel):
    """Details of the input's tokens."""

    cached_tokens: int = Field(description="Tokens from a session or a cached prefix. They were not computed.")
    cache_write_tokens: int = Field(description="Always 0.")


class OutputTokensDetails(BaseModel):
    """Details of the output's tokens."""

    reasoning_tokens: int = Field(description="Tokens of the reasoning.")


class ResponseUsage(BaseModel):
    """Number of tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int = Field(description="Generated tokens, including the stop token.")
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(BaseModel):
    """OpenAI's response. It repeats fields of the request."""

    id: str
    object: Literal["response"]
    created_at: int = Field(description="Unix time in seconds.")
    status: Status
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str = Field(description="As in the request.")
    output: list[OutputItem]
    usage: ResponseUsage | None = Field(description="null until the response has ended.")
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    store: Literal[False] = Field(description="Nothing is stored.")
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]


class ResponseEvent(BaseModel):
    """An event of a stream. Its fields depend on its type, as in OpenAI's API."""

    type: str = Field(description="Like `response.output_text.delta`. Also the name of the SSE event.")
    sequence_number: int
    response: ResponseObject | None = Field(None, description="In created, in_progress and the last event.")
    item: OutputItem | None = Field(None, description="In output_item.added and .done.")
    part: OutputPart | None = Field(None, description="In content_part.added and .done.")
    item_id: str = ""
    output_index: int = 0
    content_index: int = 0
    delta: str = Field("", description="New text, or new arguments.")
    text: str = Field("", description="The whole text, in its last event.")
    name: str = Field("", description="Only in a call's last event, like the next field.")
    arguments: str = ""
    logprobs: list[ChosenToken] = []
