"""Fields that an answer would have to take into account, and a route does not serve: refused by name, not dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from routes.request.fields import Fields


def reject_values(remedy: str, *allowed: Any) -> AfterValidator:
    """What refuses a value and says the remedy; none, and those that ask for nothing, are taken."""

    return _reject_if(remedy, lambda value: bool(value) and value not in allowed)


def _reject_if(remedy: str, is_rejected: Callable[[Any], bool]) -> AfterValidator:
    def reject(value: Any) -> Any:
        if is_rejected(value):
            raise PydanticCustomError("unserved", "{remedy}", {"remedy": remedy})
        return value

    return AfterValidator(reject)


_TOOLS_NOT_SUPPORTED = "functions are called on /openai/v1/chat/completions and /openai/v1/responses only; leave it out"
_N_NOT_SUPPORTED = "is not served on this route, but for 1; use /openai/v1/chat/completions"
_LOGPROBS_NOT_SUPPORTED = "is not served on this route; use /openai/v1/chat/completions"
Unsupported = Annotated[Any, reject_values("is not supported by this service yet; leave it out")]


_SEARCH_NOT_SUPPORTED = "is not served: nothing is looked up for an answer; leave it out"
UNSUPPORTED_VERBOSITY = reject_values(
    "is not served, but for medium; say in the prompt how long the answer is to be, or set max_tokens", "medium"
)
"""Of a wish for short or long answers: no model here is told."""


class ChatOnlyFields(Fields):
    """What routes that answer conversations serve in OpenAI's words, and others do not."""

    response_format: Annotated[Any, reject_values("is not served on this route; use json_schema", {"type": "text"})] = (
        Field(None, description="Refused, but for text; use `json_schema`.")
    )
    tools: Annotated[Any, reject_values(_TOOLS_NOT_SUPPORTED)] = Field(
        None, description="Refused: `/openai` has functions."
    )
    tool_choice: Annotated[Any, reject_values(_TOOLS_NOT_SUPPORTED, "none", "auto")] = Field(
        None, description="Refused, but for none and auto."
    )
    n: Annotated[Any, reject_values(_N_NOT_SUPPORTED, 1)] = Field(
        None, description="Refused, but for 1: `/openai` has it."
    )
    logprobs: Annotated[Any, reject_values(_LOGPROBS_NOT_SUPPORTED)] = Field(
        None, description="Refused, as the next two."
    )
    top_logprobs: Annotated[Any, reject_values(_LOGPROBS_NOT_SUPPORTED)] = Field(None, description="Refused.")
    logit_bias: Annotated[Any, reject_values(_LOGPROBS_NOT_SUPPORTED)] = Field(
        None, description="Refused: `/openai` has it."
    )


class UnsupportedOpenAIFields(Fields):
    """What OpenAI's service heeds in an answer, and this one does not."""

    functions: Annotated[Any, reject_values("is the old form of tools, and not served; use tools")] = Field(
        None, description="Refused; use `tools`."
    )
    function_call: Annotated[
        Any, reject_values("is the old form of tool_choice, and not served; use that", "none", "auto")
    ] = Field(None, description="Refused, but for none and auto; use `tool_choice`.")
    audio: Unsupported = Field(None, description="Not supported; refused.")
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] = Field(["text"], description="Only text.")
    web_search_options: Annotated[Any, _reject_if(_SEARCH_NOT_SUPPORTED, lambda value: value not in (None, False))] = (
        Field(None, description="Not supported; refused, also an empty object.")
    )
    verbosity: Annotated[Any, UNSUPPORTED_VERBOSITY] = Field(
        None, description="Refused, but for medium: no model here is told."
    )


_MIXTURES_NOT_SUPPORTED = "is not served on this route, which reads from one state; name it in state"
_CONSTRAINTS_NOT_SUPPORTED = "is not served on this route, whose text is held to no form; use /v1/chat/completions"
_NoMixture = Annotated[Any, reject_values(_MIXTURES_NOT_SUPPORTED)]
_NoConstraint = Annotated[Any, reject_values(_CONSTRAINTS_NOT_SUPPORTED)]


class FixedSamplingFields(Fields):
    """What routes serve that draw as their clients say, and those that draw greedily, or not at all, do not."""

    states: _NoMixture = Field(None, description="Refused: one state is read, `state`.")
    mrss_gatingweight: _NoMixture = Field(None, description="Refused, as `states`.")
    grammar: _NoConstraint = Field(None, description="Refused, as the next three: the text is held to no form.")
    regex: _NoConstraint = Field(None, description="Refused.")
    choice: _NoConstraint = Field(None, description="Refused.")
    json_schema: _NoConstraint = Field(None, description="Refused.")
