"""Request bodies: strict pydantic models, where null means the default and unknown fields are ignored.

Limits that a flag decides (number of contents, tokens) are judged in generate_requests.py; these here are fixed.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from routes.request.constraints import ConstraintFields
from routes.request.error_value import describe_value, error_field_name, error_value
from routes.request.fields import Fields, Number, Pattern, SessionId
from routes.request.unsupported_fields import ChatOnlyFields, FixedSamplingFields, Unsupported
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.request import Priority
from rwkv_batch.tokenizer import VOCAB_SIZE
from sampling.params import SamplingParams

StopToken = (
    Annotated[int, Field(ge=0, lt=VOCAB_SIZE, description="Token id.")]
    | Annotated[str, Field(min_length=1, max_length=256, description="Text.")]
)
StopTokens = Annotated[list[StopToken], Field(max_length=64, fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
"""Validation ends at the first wrong entry: a list of mistakes costs hundreds of times what the body did."""
DEFAULT_STOPS: tuple[int | str, ...] = (0, 261, 24281)
_PYDANTIC_PREFIX = re.compile(r"^(Input|List|String|Dictionary|Value) should")
_PYTHON_TYPES = re.compile(r"a valid dictionary( or instance of \w+)?")
_PYDANTIC_SUFFIX = re.compile(r" after validation, not .*")


class Body(Fields):
    """What every request body has."""

    password: str = Field(
        "", description="The service's password or an API key, where one is wanted and no Bearer token is sent."
    )


class TextPart(BaseModel):
    """One part of a message's content; only text is understood."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["text"]
    text: str


class MessageFunction(BaseModel):
    """What a call is of."""

    model_config = ConfigDict(strict=True, extra="ignore")

    name: str = Field(max_length=64)
    arguments: str = Field(description="JSON as text.")


class MessageToolCall(BaseModel):
    """A call that an answer has made."""

    model_config = ConfigDict(strict=True, extra="ignore")

    id: str = Field("", max_length=256)
    type: Literal["function"] = "function"
    function: MessageFunction


class Message(BaseModel):
    """One turn of a conversation, as OpenAI writes it."""

    model_config = ConfigDict(strict=True, extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(max_length=128, fail_fast=True)] | None = Field(
        None, description="Of the assistant: the functions that it has called."
    )
    tool_call_id: str | None = Field(
        None, max_length=256, description="Of a tool: the call that this is the result of; results follow their calls."
    )
    function_call: Unsupported = Field(None, description="Not supported; refused.")
    audio: Unsupported = Field(None, description="Not supported; refused.")
    refusal: Unsupported = Field(None, description="Not supported; refused.")

    @property
    def text(self) -> str:
        """The content's text; parts are joined by newlines."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


Messages = Annotated[list[Message], Field(fail_fast=True)]


class PriorityFields(Body):
    """How soon an answer is wanted."""

    timeout_s: float | None = Field(None, gt=0, le=86400, description="Unfinished rows then end with 'timeout'.")
    priority: Literal["interactive", "batch"] | None = Field(
        None,
        description="batch: gives way to interactive rows and takes what places they leave. "
        "Without it a request of more than eight rows is batch work.",
    )

    @property
    def requested_priority(self) -> Priority:
        """`priority` as the engine reads it."""
        return Priority.AUTO if self.priority is None else Priority(self.priority)


class StateFields(Body):
    """What the prompts are read from."""

    state: str | None = Field(
        None,
        max_length=64,
        description="A tuned state's name, as /v1/states lists them: prompts are read from it, and token 0 is put "
        "before them only where `pad_zero` is given. A session keeps the one that it began with.",
    )
    adapter: str | None = Field(
        None,
        max_length=64,
        description="An adapter's name, as /v1/adapters lists them, under which prompts are read and answered. A "
        "session keeps the one that it was begun with.",
    )


class ModelFields(StateFields):
    """Which model reads, and what it begins from."""

    model: str = Field(
        "rwkv7",
        max_length=256,
        description="Repeated in the answer; `<model>:<state>` names a tuned state, "
        "`<model>+<adapter>` an adapter, `<model>+<adapter>:<state>` both.",
    )


class MixedState(Fields):
    """A member of a mixture."""

    name: str = Field("", max_length=64, description="A tuned state's name; left out: the empty state.")
    weight: float = Field(1.0, ge=-1000, le=1000, description="Its part; below 0 what it says is avoided.")


Weights = Annotated[list[Annotated[Number, Field(ge=-1000, le=1000)]], Field(max_length=16, fail_fast=True)]


class MixtureFields(ModelFields):
    """What prompts that are drawn for are read from, where that may be several states."""

    states: Annotated[list[MixedState], Field(max_length=16)] = Field(
        [],
        description='Several states instead of `state`, [{"name": "poet", "weight": 2}, …]: prompts are read from each '
        "and every token is drawn from their logits, added up by weight and divided by the weights' sum, which must "
        "be above 0. Costs as much as so many rows.",
    )
    mrss_gatingweight: Weights = Field(
        [], description="Other weights for the members of the mixture that `model` or `state` names, as RWKV-Infer has."
    )

    @model_validator(mode="after")
    def _check_one_mixture(self) -> Self:
        if self.states and self.state:
            raise PydanticCustomError("states", "state and states cannot be given together", {"field": "states"})
        if self.states and self.mrss_gatingweight:
            message = "states have weights of their own: mrss_gatingweight is for a mixture that `state` names"
            raise PydanticCustomError("states", message, {"field": "mrss_gatingweight"})
        return self


StopText = Annotated[str, Field(min_length=1, max_length=256)]


class StreamOptions(Fields):
    """What a stream tells beside the text."""

    include_usage: bool = Field(False, description="End with a chunk that has the usage and no choices.")


class GenerationBody(ConstraintFields, ChatOnlyFields, PriorityFields, MixtureFields):
    """Fields of every route that generates, however it draws."""

    max_tokens: int = Field(8192, ge=1, description="Most tokens drawn per row.")
    stop_tokens: StopTokens = Field(
        list(DEFAULT_STOPS), description="Token ids and strings that end a row; they are not shown."
    )
    temperature: float = Field(1.0, ge=0, le=100, description="0 is greedy.")
    max_completion_tokens: int | None = Field(None, ge=1, description="OpenAI's new name of max_tokens; it wins.")
    stop: StopText | Annotated[list[StopText], Field(max_length=64, fail_fast=True)] = Field(
        [], description="OpenAI's: texts that end a row, beside `stop_tokens`."
    )
    stream: bool = Field(False, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = Field(None, description='{"include_usage": true}: end with the usage.')
    chunk_size: int = Field(4, ge=1, le=65536, description="Tokens gathered per row before a delta is sent.")
    pad_zero: bool = Field(False, description="Put token 0 before the prompt.")
    seed: int | None = Field(
        None, ge=0, lt=2**64, description="Answer i, as numbered in the reply, draws with seed + i."
    )
    ignore_eos: bool = Field(False, description="Go on after the end-of-text token.")
    use_prefix_cache: bool = Field(True, description="Start from the stored state of an earlier prompt's beginning.")

    def sampling(self, seed: int) -> SamplingParams:
        """How a row with this seed draws: by temperature alone, by the Gumbel-max rule."""
        return SamplingParams(temperature=self.temperature, seed=seed)

    @property
    def stop_texts(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @model_validator(mode="after")
    def _apply_max_completion_tokens(self) -> Self:
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        return self


class SamplingBody(GenerationBody):
    """The same with every decode parameter."""

    top_k: int = Field(50, ge=0, lt=2**31, description="0 switches it off.")
    top_p: float = Field(0.6, ge=0, le=1, description="1 switches it off, 0 is greedy.")
    alpha_presence: float = Field(2.0, ge=-100, le=100, description="Taken from the logit of every token drawn so far.")
    alpha_frequency: float = Field(0.2, ge=-100, le=100, description="The same, times how often it was drawn.")
    alpha_decay: float = Field(0.996, ge=0, le=1, description="By which that count shrinks with each token.")
    presence_penalty: float | None = Field(
        None, ge=-100, le=100, description="OpenAI's name of alpha_presence, which wins."
    )
    frequency_penalty: float | None = Field(
        None, ge=-100, le=100, description="OpenAI's name of alpha_frequency, which wins."
    )

    def sampling(self, seed: int) -> SamplingParams:
        """How a row with this seed draws. The family's own names win over OpenAI's where both are given."""
        presence, frequency = self.presence_penalty, self.frequency_penalty
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            presence_penalty=self.alpha_presence if presence is None or self._is_given("alpha_presence") else presence,
            frequency_penalty=self.alpha_frequency
            if frequency is None or self._is_given("alpha_frequency")
            else frequency,
            penalty_decay=self.alpha_decay,
            seed=seed,
        )

    def _is_given(self, name: str) -> bool:
        return name in self.model_fields_set


class SessionFields(Body):
    """A conversation whose state the service keeps."""

    session_id: SessionId | None = Field(None, description="The prompt continues this session, and is folded into it.")
    wait: bool = Field(True, description="Wait for a running turn of the session; false: 409 instead.")


Label = Annotated[
    str,
    Field(max_length=64),
    Pattern(r"^[^\s:](?:[^\n:]*[^\s:])?$", "a label of one line without ':' and without white space at its ends"),
]
"""Who speaks, before the colon."""


class Template(Fields):
    """How a conversation is written: `System: …\\n\\nUser: …\\n\\nAssistant:` with other words in these places."""

    system: Label = Field("System", description="Who gives instructions.")
    user: Label = Field("User", description="Who asks.")
    assistant: Label = Field("Assistant", description="Who answers.")
    opening: str = Field("", max_length=256, description="What an answer begins with that has no thought before it.")


class TemplateFields(Body):
    """How the conversation is written."""

    template: Template | None = Field(
        None,
        description="Other words than System, User and Assistant; without it what `state` or `model` brings.",
    )


class PromptFields(TemplateFields):
    """What the native batch routes continue: raw prompts, a conversation, or text to fill in."""

    contents: Texts = Field([], description="Raw prompts, one row each.")
    messages: Messages = Field(
        [], description='A conversation instead of contents: [{"role": "user", "content": "…"}].'
    )
    prefix: str | Texts = Field([], description="Fill in the middle: the text before, one per row.")
    suffix: str | Texts = Field([], description="Fill in the middle: the text after, one per row.")
    enable_think: bool = Field(False, description="Let the model think before it answers (messages only).")

    @property
    def thinks(self) -> bool:
        """See ConstraintFields."""
        return bool(self.messages) and self.enable_think

    @property
    def prefixes(self) -> list[str]:
        """`prefix` as a list."""
        return [self.prefix] if isinstance(self.prefix, str) else self.prefix

    @property
    def suffixes(self) -> list[str]:
        """`suffix` as a list."""
        return [self.suffix] if isinstance(self.suffix, str) else self.suffix

    @model_validator(mode="after")
    def _check_one_prompt_form(self) -> Self:
        forms = [bool(self.contents), bool(self.messages), bool(self.prefixes or self.suffixes)]
        if sum(forms) != 1:
            raise PydanticCustomError(
                "prompt_form", "exactly one of contents, messages and prefix/suffix must be given and not be empty"
            )
        if len(self.prefixes) != len(self.suffixes):
            raise PydanticCustomError(
                "fim_lengths",
                "prefix and suffix must be of equal length, got {prefixes} and {suffixes}",
                {"prefixes": len(self.prefixes), "suffixes": len(self.suffixes)},
            )
        return self


class BatchBody(PromptFields, GenerationBody):
    """Prompts to continue, however they are drawn."""


class PromptBody(BatchBody, SessionFields, SamplingBody):
    """The native batch routes."""


def _one_line(name: str) -> str:
    if not name.strip() or name.splitlines() != [name]:
        raise PydanticCustomError("language", "must be one line with a language's code or name, like zh-TW or Klingon")
    return name


def _not_auto(name: str) -> str:
    if name.lower() == AUTO:
        raise PydanticCustomError("language", "must be the language to translate into; only source_lang may be auto")
    return name


AUTO = "auto"
"""The source language that is found out from each text."""
Language = Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_one_line)]
"""The label of a text in the prompt: by name if the code is known, else as it is."""


class TranslateBody(FixedSamplingFields, PriorityFields, StateFields):
    """immersive-translate's custom API."""

    source_lang: Language = Field(
        AUTO,
        description="ISO code, or auto: each text's language is found out, from all of them where a short one might be "
        "of several, and what has no letters is kept as it is. What is no known code is used as it is.",
    )
    target_lang: Annotated[Language, AfterValidator(_not_auto)] = Field(
        description="ISO code; what is no known code is used as it is, like Klingon."
    )
    text_list: Texts = Field(description="The texts; order and length are kept.")
    placeholders: list[Any] | dict[str, Any] | str | None = Field(
        None, description="Accepted; kept as they are in texts."
    )
    timeout_s: float | None = Field(None, gt=0, le=86400, description="Seconds; then 504.")


def validate(model: type[Fields], data: Any) -> Any:
    """An instance of `model`. Raises ServiceError naming the field, the limit and the value."""
    if not isinstance(data, dict):
        raise ServiceError(
            ErrorKind.INVALID_FIELD, f"the body must be a JSON object, got {type(data).__name__}", field="body"
        )
    try:
        return model.model_validate(data)
    except pydantic.ValidationError as error:
        first = _most_specific_error(data, error.errors(include_url=False, include_input=False))
    location, given = _locate(data, first)
    if location:
        wording = _PYDANTIC_SUFFIX.sub("", _PYDANTIC_PREFIX.sub("must", first["msg"])).replace(
            "Field required", "must be given"
        )
        wording = _PYTHON_TYPES.sub("a JSON object", wording)
        message = f"{location}: {wording}" + ("" if first["type"] == "missing" else f", got {describe_value(given)}")
        raise ServiceError(ErrorKind.INVALID_FIELD, message, field=location, given=error_value(given))
    field = first.get("ctx", {}).get("field") or _blamed_field(data)
    raise ServiceError(ErrorKind.INVALID_FIELD, first["msg"], field=field, given=error_value(data.get(field)))


def _most_specific_error(data: dict[str, Any], errors: list[Any]) -> Any:
    """The first field's mistake; of the branches of a union that failed, the one that went deepest, if it can be one
    whose type fits."""
    candidates = [error for error in errors if error["loc"][:1] == errors[0]["loc"][:1]]
    return max(
        candidates,
        key=lambda error: (sum(map(_locate(data, error)[0].count, ".[")), not error["type"].endswith("_type")),
    )


def _blamed_field(data: dict[str, Any]) -> str:
    """The field that a mistake in the whole body is put down to."""
    return next((name for name in ("contents", "messages", "prefix") if data.get(name) is not None), "contents")


def _locate(data: Any, error: Any) -> tuple[str, Any]:
    """The field as a client writes it, and its value. pydantic's tags of union members are left out."""
    location, given = "", data
    path = error["loc"]
    for at, step in enumerate(path):
        is_missing = error["type"] == "missing" and at == len(path) - 1
        if isinstance(given, list) and isinstance(step, int) and step < len(given):
            location, given = f"{location}[{step}]", given[step]
        elif isinstance(given, dict) and isinstance(step, str) and (step in given or is_missing):
            location, given = f"{location}.{error_field_name(step)}".lstrip("."), given.get(step)
            if path[at + 1 :] == ("[key]",):  # it is the name that is wrong, and not what stands under it
                given = step
    return location, given
