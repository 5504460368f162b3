"""Fields that a route refuses by name. To ignore them would give a wrong answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from routes.request.fields import Fields


def reject_values(remedy: str, *allowed: Any) -> AfterValidator:
    """Return a validator that refuses any value except empty ones and those in `allowed`."""

    return _reject_if(remedy, lambda value: bool(value) and value not in allowed)


def _reject_if(remedy: str, is_rejected: Callable[[Any], bool]) -> AfterValidator:
    def reject(value: Any) -> Any:
        if is_rejected(value):
            raise PydanticCustomError("unserved", "{remedy}", {"remedy": remedy})
        return value

    return AfterValidator(reject)


_TOOLS_NOT_SUPPORTED = (
    "functions are supported on /openai/v1/chat/completions and /openai/v1/responses only; leave it out"
)
_N_NOT_SUPPORTED = "is not supported on this route, except for 1; use /openai/v1/chat/completions"
_LOGPROBS_NOT_SUPPORTED = "is not supported on this route; use /openai/v1/chat/completions"
Unsupported = Annotated[Any, reject_values("is not supported by this service yet; leave it out")]


_SEARCH_NOT_SUPPORTED = "is not supported: the service has no web search; leave it out"
UNSUPPORTED_VERBOSITY = reject_values(
    "is not supported, except for medium; say in the prompt how long the answer is to be, or set max_tokens", "medium"
)
"""Models here have no setting for the length of answers."""


class ChatOnlyFields(Fields):
    """OpenAI's fields that only the conversation routes support."""

    response_format: Annotated[
        Any, reject_values("is not supported on this route; use json_schema", {"type": "text"})
    ] = Field(None, description="Refused, except for text. Use `json_schema`.")
    tools: Annotated[Any, reject_values(_TOOLS_NOT_SUPPORTED)] = Field(
        None, description="Refused. Supported under `/openai`."
    )
    tool_choice: Annotated[Any, reject_values(_TOOLS_NOT_SUPPORTED, "none", "auto")] = Field(
        None, description="Refused, except for none and auto."
    )
    n: Annotated[Any, reject_values(_N_NOT_SUPPORTED, 1)] = Field(
        None, description="Refused, except for 1. Supported under `/openai`."
    )
    logprobs: Annotated[Any, reject_values(_LOGPROBS_NOT_SUPPORTED)] = Field(
        None, description="Refused. Supported under `/openai`."
    )
    top_logprobs: Annotated[Any, reject_values(_LOGPROBS_NOT_SUPPORTED)] = Field(None, description="Refused.")
    logit_bias: Annotated[Any, reject_values(_LOGPROBS_NOT_SUPPORTED)] = Field(
        None, description="Refused. Supported under `/openai`."
    )


class UnsupportedOpenAIFields(Fields):
    """OpenAI's fields that this service does not support."""

    functions: Annotated[Any, reject_values("is the old form of tools, which is not supported; use tools")] = Field(
        None, description="Refused. Use `tools`."
    )
    function_call: Annotated[
        Any, reject_values("is the old form of tool_choice, which is not supported; use tool_choice", "none", "auto")
    ] = Field(None, description="Refused, except for none and auto. Use `tool_choice`.")
    audio: Unsupported = Field(None, description="Not supported; refused.")
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] = Field(["text"], description="Only text.")
    web_search_options: Annotated[Any, _reject_if(_SEARCH_NOT_SUPPORTED, lambda value: value not in (None, False))] = (
        Field(None, description="Refused, including an empty object.")
    )
    verbosity: Annotated[Any, UNSUPPORTED_VERBOSITY] = Field(None, description="Refused, except for medium.")


_MIXTURES_NOT_SUPPORTED = "is not supported on this route, which uses one state; name it in state"
_CONSTRAINTS_NOT_SUPPORTED = "is not supported on this route, whose text is not constrained; use /v1/chat/completions"
_NoMixture = Annotated[Any, reject_values(_MIXTURES_NOT_SUPPORTED)]
_NoConstraint = Annotated[Any, reject_values(_CONSTRAINTS_NOT_SUPPORTED)]


class FixedSamplingFields(Fields):
    """Sampling fields that routes with fixed sampling refuse."""

    states: _NoMixture = Field(None, description="Refused. Use `state` for one state.")
    mrss_gatingweight: _NoMixture = Field(None, description="Refused. Use `state` for one state.")
    grammar: _NoConstraint = Field(None, description="Refused. The text cannot be constrained.")
    regex: _NoConstraint = Field(None, description="Refused.")
    choice: _NoConstraint = Field(None, description="Refused.")
    json_schema: _NoConstraint = Field(None, description="Refused.")
