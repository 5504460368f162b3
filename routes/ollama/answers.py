"""Answers of Ollama's API, for the OpenAPI document and the reference."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from routes.openai.completion_models import ChosenToken
from routes.response.response_models import WithWarnings


class OllamaLine(WithWarnings):
    """Fields of every line, and of a whole answer."""

    model: str = Field(description="As in the request.")
    created_at: str = Field(description="Time of the line (RFC 3339).")
    done: bool = Field(description="Whether the answer is complete. The next fields are in the last line only.")
    done_reason: str = Field("", description="stop, length, timeout, cancelled, load or unload.")
    total_duration: int = Field(0, description="Nanoseconds, like the other durations.")
    load_duration: int = Field(0, description="Always 0.")
    prompt_eval_count: int = Field(0, description="Tokens of the prompt.")
    prompt_eval_duration: int = Field(0, description="Computing the prompt, without the time that it waited.")
    eval_count: int = Field(0, description="Generated tokens, including the stop token.")
    eval_duration: int = 0
    logprobs: list[ChosenToken] = Field([], description="Log-probabilities of the new tokens.")


class OllamaCalledFunction(BaseModel):
    """The function of a call."""

    name: str
    arguments: dict[str, Any]


class OllamaToolCall(BaseModel):
    """A call of a function. Calls are never split over lines."""

    function: OllamaCalledFunction


class OllamaAnswerMessage(BaseModel):
    """New output."""

    role: Literal["assistant"]
    content: str
    thinking: str = Field("", description="Reasoning.")
    tool_calls: list[OllamaToolCall] = []


class OllamaChatAnswer(OllamaLine):
    """A line of /api/chat, or the whole answer."""

    message: OllamaAnswerMessage


class OllamaGenerateAnswer(OllamaLine):
    """A line of /api/generate, or the whole answer."""

    response: str = Field(description="New text.")
    thinking: str = Field("", description="Reasoning.")
    context: list[int] = Field([], description="Tokens of the conversation. Send them with the next prompt.")


class OllamaDetails(BaseModel):
    """About a model's file."""

    parent_model: str = Field(description="Always empty.")
    format: str = Field(description="Suffix of the file.")
    family: str = Field(description="Architecture, like rwkv7.")
    families: list[str]
    parameter_size: str = Field(description="Like 1.5B.")
    quantization_level: str = Field(description="Type of the weights, like BF16.")


class OllamaModel(BaseModel):
    """A served model, or a model with a state or an adapter."""

    name: str = Field(description="Ends with :latest if it names no state.")
    model: str = Field(description="Same as name.")
    modified_at: str = Field(description="Time of loading (RFC 3339).")
    size: int = Field(description="Bytes of the weights in memory.")
    digest: str = Field(description="64 hexadecimal digits.")
    details: OllamaDetails
    expires_at: str = Field("", description="/api/ps only: the model stays loaded.")
    size_vram: int = Field(0, description="/api/ps only: same as size, 0 on a CPU.")
    context_length: int = Field(0, description="/api/ps only: --max-prompt-tokens.")


class OllamaModelList(BaseModel):
    """The served models."""

    models: list[OllamaModel]


class OllamaShown(WithWarnings):
    """One model."""

    model_config = ConfigDict(protected_namespaces=())

    modified_at: str = Field(description="Time of loading (RFC 3339).")
    details: OllamaDetails
    model_info: dict[str, str | int] = Field(description="Keys of GGUF files, like rwkv7.context_length.")
    capabilities: list[str] = Field(description="completion, tools, thinking, insert.")
    template: str = Field(description="The prompt format.")
    parameters: str = Field(description="Default decode parameters, one per line.")
    modelfile: str = Field(description="Always empty.")


class OllamaVersion(BaseModel):
    """The version of Ollama's API that these routes have."""

    version: str


class OllamaStatus(WithWarnings):
    """The end of a pull."""

    status: Literal["success"]
