"""Request bodies of /openai, with this project's extra fields. Unsupported fields are refused."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from routes.openai.response_format import SCHEMA_FIELD, ResponseFormat
from routes.openai.tools import PARAMETERS_FIELD, ChatToolChoice, ChatTools, chat_tool_set
from routes.request import prompts
from routes.request.bodies import Messages, SamplingBody, SessionFields, StopTokens, TemplateFields, Texts
from routes.request.fields import Fields, UnsupportedOpenAIFields, at_most_one, body_error
from routes.request.jobs import row_stops
from routes.request.messages import Message
from routes.request.tools import ToolSet, begins_with_call, tool_call_constraint
from routes.response.answer_parser import AnswerFormat
from rwkv_batch.tokenizer import VOCAB_SIZE
from sampling.grammar.constraint import THINK_END, Constraint, Form
from sampling.params import SamplingParams

MAX_N = 128
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1024
_FORMAT = "Text (the default), a JSON object, or JSON that is valid under a schema."
_BAN_BIAS = -100.0
"""In OpenAI's API a bias of -100 bans a token."""


def _check_num_biases(value: Any) -> Any:
    """Check the number of entries first. pydantic would validate all of them and keep each error."""
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise PydanticCustomError("too_long", "must have at most {limit} entries", {"limit": MAX_BIASES})
    return value


def _is_token_id(key: str) -> bool:
    return key.isascii() and key.isdigit()


def _check_token_id(value: str) -> str:
    if _is_token_id(value) and (len(value) > 5 or int(value) >= VOCAB_SIZE):
        raise PydanticCustomError("token_id", "must be a token id of at most {highest}", {"highest": VOCAB_SIZE - 1})
    return value


TokenKey = Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_check_token_id)]
TokenId = Annotated[int, Field(ge=0, lt=VOCAB_SIZE)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]


class OpenAIBody(UnsupportedOpenAIFields, SessionFields, SamplingBody):
    """Fields of all OpenAI generation routes. Other formats are converted to them."""

    schema_field: ClassVar[str] = SCHEMA_FIELD
    """The request's field with the answer's schema, for errors."""
    seed: int | None = Field(
        None,
        ge=-(2**63),
        lt=2**64,
        description="Answer i is sampled with seed + i. A negative seed counts down from 2^64.",
    )
    n: int = Field(1, ge=1, le=MAX_N, description="Number of answers per prompt. They share the prefill.")
    logit_bias: Annotated[
        dict[TokenKey, Annotated[float, Field(ge=-100, le=100)]],
        Field(max_length=MAX_BIASES),
        BeforeValidator(_check_num_biases),
    ] = Field({}, description="Token id, or a text -> value added to its logit, or to those of its tokens. -100 bans.")

    @property
    def samples_per_prompt(self) -> int:
        return self.n

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives with log-probabilities per token. None: no log-probabilities at all."""
        return None

    @property
    def text_bias(self) -> dict[str, float]:
        return {key: _bias(value) for key, value in self.logit_bias.items() if not _is_token_id(key)}

    def sampling(self, seed: int) -> SamplingParams:
        bias = {int(key): _bias(value) for key, value in self.logit_bias.items() if _is_token_id(key)}
        return msgspec.structs.replace(super().sampling(seed), logit_bias=bias, top_logprobs=self.num_logprobs)


def _bias(value: float) -> float:
    return -math.inf if value <= _BAN_BIAS else value


class TemplateArguments(Fields):
    """Arguments of vLLM's and SGLang's chat templates."""

    enable_thinking: bool | None = Field(None, description="Another name of enable_think, which takes precedence.")


class ConversationBody(OpenAIBody, TemplateFields):
    """A conversation to answer, in any format."""

    thinking_token_budget: int | None = Field(
        None, ge=1, description="vLLM's field: maximum tokens of the reasoning. Then its end is forced."
    )

    @property
    def row_constraint(self) -> Constraint | None:
        budget, constraint = self.thinking_token_budget, self.constraint
        if budget is None or not self.thinks or budget >= self.max_tokens:
            return constraint
        free = Constraint(form=Form.REGEX, source="(?s:.*)", field="thinking_token_budget", after=THINK_END)
        return msgspec.structs.replace(constraint or free, thought_tokens=budget)

    @property
    def conversation(self) -> list[Message]:
        raise NotImplementedError

    @property
    def effort(self) -> prompts.Think:
        """The requested length of the reasoning."""
        raise NotImplementedError

    @property
    def tool_set(self) -> ToolSet | None:
        """The functions that the answer may call."""
        raise NotImplementedError

    @property
    def format_constraint(self) -> Constraint | None:
        """Constraint of an answer without calls, after its reasoning."""
        raise NotImplementedError

    @property
    def continues(self) -> bool:
        """Whether the answer continues the last message."""
        return False

    @property
    def think(self) -> prompts.Think:
        return prompts.Think.OFF if self.continues else self.effort

    @property
    def thinks(self) -> bool:
        return self.think is not prompts.Think.OFF

    @property
    def answer_format(self) -> AnswerFormat:
        """The end of the prompt, and the allowed contents of the answer."""
        tool_set = self.tool_set
        return AnswerFormat(
            thinks=self.thinks,
            continues=self.continues,
            names=() if tool_set is None else tuple(function.name for function in tool_set.allowed_functions),
            opens_with_call=begins_with_call(tool_set, thinks=self.thinks, continues=self.continues),
            must_call=tool_set is not None and tool_set.must_call,
            is_constrained=tool_set is None and not self.thinks and self.constraint is not None,
            is_calls_or_constrained=self.format_constraint is not None,
        )

    @property
    def constraint(self) -> Constraint | None:
        tool_set = self.tool_set
        if tool_set is None:
            return self.format_constraint or super().constraint
        return tool_call_constraint(
            tool_set, is_open=self.answer_format.opens_with_call, thinks=self.thinks, answer=self.format_constraint
        )

    @property
    def stops(self) -> list[int | str]:
        """The stops of the answer. With tools, blank lines may separate text and calls."""
        if self.tool_set is not None and "stop_tokens" not in self.model_fields_set:
            return [*prompts.answer_stops(self.think, True, self.template), *self.more_stops]
        return row_stops(self, prompts.answer_stops(self.think, False, self.template))

    def sampling(self, seed: int) -> SamplingParams:
        """See SamplingBody. With tools, penalties default to 0, because JSON repeats its punctuation."""
        base_params = super().sampling(seed)
        if self.tool_set is None:
            return base_params
        given = self.model_fields_set
        presence = base_params.presence_penalty if given & {"alpha_presence", "presence_penalty"} else 0.0
        frequency = base_params.frequency_penalty if given & {"alpha_frequency", "frequency_penalty"} else 0.0
        return msgspec.structs.replace(base_params, presence_penalty=presence, frequency_penalty=frequency)

    @model_validator(mode="after")
    def _check_one_format(self) -> Self:
        tool_set = self.tool_set
        if (field_constraint := super().constraint) is not None:
            others = {"response_format": self.format_constraint, "tools": tool_set}
            at_most_one([field_constraint.form, *(name for name, other in others.items() if other is not None)])
        return self


class PromptLogprobsField(BaseModel):
    """vLLM's field for the log-probabilities of a prompt."""

    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="Return the log-probability of each token of the prompt, and of n alternatives. Not for streams "
        "and sessions.",
    )

    @model_validator(mode="after")
    def _check_prompt_logprobs(self) -> Self:
        for other in ("stream", "session_id", "suffix", "echo") if self.prompt_logprobs is not None else ():
            if getattr(self, other, None) not in (None, False):
                message = f"prompt_logprobs cannot be combined with {other}; leave one of them out"
                raise body_error(message, "prompt_logprobs")
        return self


class ChatBody(PromptLogprobsField, ConversationBody):
    """Body of `/chat/completions`."""

    parameters_field: ClassVar[str] = PARAMETERS_FIELD
    """The request's field with a tool's schema, for errors."""
    messages: Messages = Field(min_length=1, description='[{"role": "user", "content": "…"}]')
    logprobs: bool = Field(False, description="Return the log-probability of each token, before truncation.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="Number of most probable tokens to return per token."
    )
    enable_think: bool = Field(
        False, description="Let the model think. Its reasoning is returned as reasoning_content."
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="How long the model thinks. Overrides enable_think."
    )
    chat_template_kwargs: TemplateArguments | None = Field(
        None, description='{"enable_thinking": true}: another name of enable_think.'
    )
    continue_final_message: bool | None = Field(
        None,
        description="Continue the last message, which must be the assistant's. Default: true if the last "
        "message is the assistant's and there is no session.",
    )
    tools: ChatTools = Field([], description="Functions that the answer may call. With them, penalties default to 0.")
    tool_choice: ChatToolChoice | None = Field(
        None, description="none, auto (the default), required, one function by name, or `allowed_tools`."
    )
    parallel_tool_calls: bool = Field(True, description="Whether one answer may have several calls.")
    response_format: ResponseFormat | None = Field(None, description=_FORMAT)

    @property
    def continues(self) -> bool:
        if self.continue_final_message is None:
            return self.session_id is None and self._ends_with_text_of_assistant
        return self.continue_final_message

    @property
    def _ends_with_text_of_assistant(self) -> bool:
        return self.messages[-1].role == "assistant" and not self.messages[-1].tool_calls

    @property
    def conversation(self) -> list[Message]:
        return self.messages

    @property
    def effort(self) -> prompts.Think:
        if self.reasoning_effort is not None:
            return prompts.EFFORTS[self.reasoning_effort]
        thinking = self.chat_template_kwargs.enable_thinking if self.chat_template_kwargs is not None else None
        is_used = thinking is not None and "enable_think" not in self.model_fields_set
        return prompts.think_mode(bool(thinking) if is_used else self.enable_think)

    @property
    def tool_set(self) -> ToolSet | None:
        return chat_tool_set(self.tools, self.tool_choice, self.parallel_tool_calls, self.parameters_field)

    @property
    def format_constraint(self) -> Constraint | None:
        if self.response_format is None:
            return None
        return self.response_format.constraint(THINK_END if self.thinks else "", self.schema_field)

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise body_error("top_logprobs needs logprobs: true", "top_logprobs")
        if self.continue_final_message and not self._ends_with_text_of_assistant:
            message = "continue_final_message needs a last message of the assistant, without tool_calls"
            raise body_error(message, "messages")
        if self.continue_final_message and self.session_id is not None:
            message = "cannot be combined with session_id: the session already contains its last answer"
            raise body_error(f"continue_final_message {message}", "continue_final_message")
        return self


class CompletionBody(PromptLogprobsField, OpenAIBody):
    """Body of `/completions`: raw prompts."""

    prompt: str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)] = Field(
        description="A text, a list of texts, token ids, or a list of token id lists."
    )
    suffix: str | None = Field(None, description="Fill in the text between each prompt and this text.")
    max_tokens: int = Field(
        16, ge=0, description="Maximum number of generated tokens per row. 0: only compute the prompt."
    )
    stop_tokens: StopTokens = Field([], description="Token ids and strings that end a row.")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="Return log-probabilities of each token and of n alternatives."
    )
    echo: bool = Field(
        False, description="Begin each answer with its prompt. With `logprobs`, include those of the prompt's tokens."
    )
    best_of: int | None = Field(
        None,
        ge=1,
        le=MAX_N,
        description="Sample this many answers and return the `n` with the highest mean log-probability. Not "
        "for streams.",
    )
    response_format: ResponseFormat | None = Field(None, description=_FORMAT)

    @property
    def format_constraint(self) -> Constraint | None:
        """The constraint of `response_format`."""
        return None if self.response_format is None else self.response_format.constraint(field=self.schema_field)

    @property
    def constraint(self) -> Constraint | None:
        return self.format_constraint or super().constraint

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [token for token in self.prompt if isinstance(token, int)]
        return [ids] if ids else self.prompt  # type: ignore[return-value]  # a list of integers is one prompt

    @property
    def samples_per_prompt(self) -> int:
        return self.best_of or self.n

    @property
    def num_logprobs(self) -> int | None:
        """See OpenAIBody. best_of needs log-probabilities to choose the best."""
        return 0 if self.logprobs is None and self.samples_per_prompt > self.n else self.logprobs

    @property
    def scores_prompts(self) -> bool:
        """Whether log-probabilities of the prompts' tokens are requested."""
        return self.echo and self.logprobs is not None

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        if (field_constraint := super().constraint) is not None and self.format_constraint is not None:
            at_most_one([field_constraint.form, "response_format"])
        if not self.prompt:
            raise body_error("prompt must not be empty", "prompt")
        for other, reason in (
            ("session_id", "log-probabilities of a session's text are not supported"),
            ("suffix", "the prompt is in the fill-in-the-middle format"),
        ):
            if self.scores_prompts and getattr(self, other) is not None:
                message = f"echo with logprobs cannot be combined with {other}: {reason}"
                raise body_error(message, "echo")
        if self.samples_per_prompt < self.n:
            raise body_error("best_of must be at least n", "best_of")
        if self.stream and self.samples_per_prompt > self.n:
            message = "best_of above n cannot be streamed: the best answers are known at the end"
            raise body_error(message, "best_of")
        return self


class RawBody(CompletionBody):
    """A raw prompt in another format than OpenAI's. OpenAI's default of `max_tokens` is too small there."""

    max_tokens: int = Field(8192, ge=0, description="Maximum number of generated tokens.")
