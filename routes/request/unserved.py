"""Fields that an answer would have to take into account, and a route does not serve: refused by name, not dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from routes.request.fields import Fields


def refusing(remedy: str, *harmless: Any) -> AfterValidator:
    """What refuses a value and says the remedy; none, and those that ask for nothing, are taken."""

    return _refusing(remedy, lambda value: bool(value) and value not in harmless)


def _refusing(remedy: str, asks: Callable[[Any], bool]) -> AfterValidator:
    def refuse(value: Any) -> Any:
        if asks(value):
            raise PydanticCustomError("unserved", "{remedy}", {"remedy": remedy})
        return value

    return AfterValidator(refuse)


_CALLS = "functions are called on /openai/v1/chat/completions and /openai/v1/responses only; leave it out"
_SEVERAL = "is not served on this route, but for 1; use /openai/v1/chat/completions"
_LIKELIHOODS = "is not served on this route; use /openai/v1/chat/completions"
Unserved = Annotated[Any, refusing("is not supported by this service yet; leave it out")]


_NO_SEARCH = "is not served: nothing is looked up for an answer; leave it out"
UNHEARD_LENGTH = refusing(
    "is not served, but for medium; say in the prompt how long the answer is to be, or set max_tokens", "medium"
)
"""Of a wish for short or long answers: no model here is told."""


class ConversationOnlyFields(Fields):
    """What routes that answer conversations serve in OpenAI's words, and others do not."""

    response_format: Annotated[Any, refusing("is not served on this route; use json_schema", {"type": "text"})] = Field(
        None, description="Refused, but for text; use `json_schema`."
    )
    tools: Annotated[Any, refusing(_CALLS)] = Field(None, description="Refused: `/openai` has functions.")
    tool_choice: Annotated[Any, refusing(_CALLS, "none", "auto")] = Field(
        None, description="Refused, but for none and auto."
    )
    n: Annotated[Any, refusing(_SEVERAL, 1)] = Field(None, description="Refused, but for 1: `/openai` has it.")
    logprobs: Annotated[Any, refusing(_LIKELIHOODS)] = Field(None, description="Refused, as the next two.")
    top_logprobs: Annotated[Any, refusing(_LIKELIHOODS)] = Field(None, description="Refused.")
    logit_bias: Annotated[Any, refusing(_LIKELIHOODS)] = Field(None, description="Refused: `/openai` has it.")


class OpenAIOnlyFields(Fields):
    """What OpenAI's service heeds in an answer, and this one does not."""

    functions: Annotated[Any, refusing("is the old form of tools, and not served; use tools")] = Field(
        None, description="Refused; use `tools`."
    )
    function_call: Annotated[
        Any, refusing("is the old form of tool_choice, and not served; use that", "none", "auto")
    ] = Field(None, description="Refused, but for none and auto; use `tool_choice`.")
    audio: Unserved = Field(None, description="Not supported; refused.")
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] = Field(["text"], description="Only text.")
    web_search_options: Annotated[Any, _refusing(_NO_SEARCH, lambda value: value not in (None, False))] = Field(
        None, description="Not supported; refused, also an empty object."
    )
    verbosity: Annotated[Any, UNHEARD_LENGTH] = Field(
        None, description="Refused, but for medium: no model here is told."
    )


_ONE_STATE = "is not served on this route, which reads from one state; name it in state"
_NO_FORM = "is not served on this route, whose text is held to no form; use /v1/chat/completions"
_NotMixed = Annotated[Any, refusing(_ONE_STATE)]
_NotHeld = Annotated[Any, refusing(_NO_FORM)]


class FixedDrawFields(Fields):
    """What routes serve that draw as their clients say, and those that draw greedily, or not at all, do not."""

    states: _NotMixed = Field(None, description="Refused: one state is read, `state`.")
    mrss_gatingweight: _NotMixed = Field(None, description="Refused, as `states`.")
    grammar: _NotHeld = Field(None, description="Refused, as the next three: the text is held to no form.")
    regex: _NotHeld = Field(None, description="Refused.")
    choice: _NotHeld = Field(None, description="Refused.")
    json_schema: _NotHeld = Field(None, description="Refused.")
