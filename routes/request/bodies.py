"""Request bodies as strict pydantic models.

Also applies defaults and mixture weights to them. null means the default. Unknown fields become warnings
(`validation.py`). Fixed limits are checked here; limits of flags (number of contents, tokens) are checked in jobs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field, model_validator

from routes.request.fields import (
    ChatOnlyFields,
    ConstraintFields,
    Fields,
    IgnoredOpenAIFields,
    IgnoredValue,
    Number,
    Pattern,
    SessionId,
    body_error,
    list_default,
)
from routes.request.messages import Message
from routes.request.sampler_fields import SamplerFields, with_texts
from routes.request.speculation import SpeculationFields
from rwkv_batch.errors import invalid
from rwkv_batch.request import Priority
from rwkv_batch.tokenizer import VOCAB_SIZE
from sampling.grammar.constraint import Constraint
from sampling.params import SamplingParams

StopToken = (
    Annotated[int, Field(ge=0, lt=VOCAB_SIZE, description="Token id.")]
    | Annotated[str, Field(min_length=1, max_length=256, description="Text.")]
)
StopTokens = Annotated[list[StopToken], Field(max_length=64, fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
"""`fail_fast` ends validation at the first wrong entry. A list of errors could be hundreds of times larger than the
body.
"""
DEFAULT_STOPS: tuple[int | str, ...] = (0, 261, 24281)


class Body(Fields):
    """Fields of every request body."""

    password: str = Field(
        "", description="The service's password or an API key, if the service requires one and no Bearer token is sent."
    )


Messages = Annotated[list[Message], Field(fail_fast=True)]


class PriorityFields(Body):
    """Timeout and scheduling priority."""

    timeout_s: float | None = Field(
        None, gt=0, le=86400, description="Time limit in seconds. Unfinished rows then end with 'timeout'."
    )
    priority: Literal["interactive", "batch"] | None = Field(
        None,
        description="interactive or batch. Batch rows run in the slots that interactive rows leave free. "
        "Default: batch for requests of more than eight rows, else interactive.",
    )

    @property
    def requested_priority(self) -> Priority:
        return Priority.AUTO if self.priority is None else Priority(self.priority)


class StateFields(Body):
    """Initial state and adapter."""

    state: str | None = Field(
        None,
        max_length=64,
        description="Name of a tuned state, as listed by /v1/states. Prompts start from it, and token 0 comes first "
        "only if `pad_zero` is given. A session keeps the state that it started with.",
    )
    adapter: str | None = Field(
        None,
        max_length=64,
        description="Name of an adapter, as listed by /v1/adapters. It applies to prompt and answer. A session keeps "
        "the adapter that it started with.",
    )


class ModelFields(StateFields):
    """Model, initial state and adapter."""

    model: str = Field(
        "rwkv7",
        max_length=256,
        description="Repeated in the answer. `<model>:<state>` names a tuned state, `<model>+<adapter>` an adapter, "
        "`<model>+<adapter>:<state>` both.",
    )


class MixedState(Fields):
    """One member of a mixture of states."""

    name: str = Field("", max_length=64, description="Name of a tuned state. Empty: the empty state.")
    weight: float = Field(
        1.0, ge=-1000, le=1000, description="Weight of this member. A negative weight steers away from its text."
    )


Weights = Annotated[list[Annotated[Number, Field(ge=-1000, le=1000)]], Field(max_length=16, fail_fast=True)]


class MixtureFields(ModelFields):
    """Initial states of routes that sample, where a mixture is possible."""

    states: Annotated[list[MixedState], Field(max_length=16)] = Field(
        [],
        description='Several states instead of `state`: [{"name": "poet", "weight": 2}, …]. Each prompt runs once per '
        "state. Every token is sampled from the weighted mean of the states' logits. The weights must sum to "
        "more than 0. Costs one row per state.",
    )
    mrss_gatingweight: Weights = Field(
        [],
        description="Weights for the members of the mixture that `model` or `state` names, in their order. "
        "RWKV-Infer's field.",
    )

    @model_validator(mode="after")
    def _check_one_mixture(self) -> Self:
        if self.states and self.state:
            raise body_error("state and states cannot be given together; leave one of them out", "states")
        if self.states and self.mrss_gatingweight:
            message = (
                "mrss_gatingweight cannot be given with states, which have weights of their own; leave one of them out"
            )
            raise body_error(message, "mrss_gatingweight")
        return self


StopText = Annotated[str, Field(min_length=1, max_length=256)]


class StreamOptions(Fields):
    """Options of a stream."""

    include_usage: bool = Field(False, description="End with a chunk that has the usage and no choices.")
    include_obfuscation: IgnoredValue = Field(None, description="Accepted and ignored.")


class PrefixCacheFields(Body):
    """Use of cached prefixes."""

    use_prefix_cache: bool = Field(
        True, description="Start from the cached state of the longest known beginning of the prompt."
    )
    cache_salt: str = Field(
        "",
        max_length=256,
        description="Share cached prefixes only with requests of the same key that have the same salt.",
    )


class GenerationBody(
    SpeculationFields,
    ConstraintFields,
    ChatOnlyFields,
    IgnoredOpenAIFields,
    PriorityFields,
    PrefixCacheFields,
    MixtureFields,
):
    """Fields of every route that generates text."""

    max_tokens: int = Field(8192, ge=1, description="Maximum number of generated tokens per row.")
    stop_tokens: StopTokens = Field(
        list_default(DEFAULT_STOPS),
        description="Token ids and strings that end a row. The answer does not include them.",
    )
    temperature: float = Field(1.0, ge=0, le=100, description="Sampling temperature. 0 is greedy.")
    max_completion_tokens: int | None = Field(
        None, ge=1, description="OpenAI's newer name of max_tokens. It takes precedence."
    )
    stop: StopText | Annotated[list[StopText], Field(max_length=64, fail_fast=True)] = Field(
        [], description="OpenAI's field: texts that end a row, in addition to `stop_tokens`."
    )
    stop_token_ids: Annotated[
        list[Annotated[int, Field(ge=0, lt=VOCAB_SIZE)]], Field(max_length=64, fail_fast=True)
    ] = Field([], description="vLLM's field: token ids that end a row, in addition to `stop_tokens`.")
    stream: bool = Field(False, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = Field(
        None, description='{"include_usage": true}: end the stream with the usage.'
    )
    chunk_size: int = Field(4, ge=1, le=65536, description="Tokens collected per row before a delta is sent.")
    pad_zero: bool = Field(False, description="Put token 0 before the prompt.")
    seed: int | None = Field(
        None, ge=0, lt=2**64, description="Answer i, as numbered in the reply, is sampled with seed + i."
    )
    ignore_eos: bool = Field(False, description="Continue after the end-of-text token.")
    include_stop_str_in_output: bool = Field(False, description="End the answer with the stop that ended it.")
    truncate_prompt_tokens: Annotated[int, Field(ge=1)] | Literal[-1] | None = Field(
        None, description="Use only the last tokens of each prompt. -1: as many as --max-prompt-tokens."
    )

    def sampling(self, seed: int) -> SamplingParams:
        """Return the row's sampling parameters: temperature only, by the Gumbel-max method."""
        return SamplingParams(temperature=self.temperature, seed=seed)

    def row_sampling(self, encode: Callable[[str], list[int]]) -> SamplingParams:
        """Return the parameters with seed 0 and all texts as tokens. Raises ServiceError."""
        return self.sampling(0)

    @property
    def row_constraint(self) -> Constraint | None:
        """The rows' constraint, and limits that are independent of it."""
        return self.constraint

    @property
    def more_stops(self) -> list[int | str]:
        """Stops in addition to `stop_tokens`."""
        return [*self.stop_token_ids, *([self.stop] if isinstance(self.stop, str) else self.stop)]

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @model_validator(mode="after")
    def _apply_max_completion_tokens(self) -> Self:
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        return self


class SamplingBody(SamplerFields, GenerationBody):
    """A generation request with all sampling parameters."""

    top_k: int = Field(50, ge=-1, lt=2**31, description="Sample from the k most probable tokens. 0 or -1: off.")
    top_p: float = Field(
        0.6,
        ge=0,
        le=1,
        description="Sample from the most probable tokens whose probabilities sum to p. 1 turns it off, 0 is greedy.",
    )
    alpha_presence: float = Field(
        2.0, ge=-100, le=100, description="Presence penalty: subtracted from the logit of every generated token."
    )
    alpha_frequency: float = Field(
        0.2, ge=-100, le=100, description="Frequency penalty: subtracted once per occurrence of the token."
    )
    alpha_decay: float = Field(0.996, ge=0, le=1, description="Decay of the occurrence count per generated token.")
    presence_penalty: float | None = Field(
        None, ge=-100, le=100, description="OpenAI's name of alpha_presence, which takes precedence."
    )
    frequency_penalty: float | None = Field(
        None, ge=-100, le=100, description="OpenAI's name of alpha_frequency, which takes precedence."
    )

    def sampling(self, seed: int) -> SamplingParams:
        """Return the row's sampling parameters. alpha_* take precedence over OpenAI's names."""
        presence, frequency = self.presence_penalty, self.frequency_penalty
        return SamplingParams(
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            presence_penalty=self.alpha_presence if presence is None or self._is_given("alpha_presence") else presence,
            frequency_penalty=self.alpha_frequency
            if frequency is None or self._is_given("alpha_frequency")
            else frequency,
            penalty_decay=self.alpha_decay,
            seed=seed,
            filters=self.filters,
        )

    def row_sampling(self, encode: Callable[[str], list[int]]) -> SamplingParams:
        if self.min_tokens and self.constraint is not None:
            message = "cannot be combined with a constraint, which defines where the text ends; leave one of them out"
            raise invalid("min_tokens", message, self.min_tokens)
        return with_texts(self.sampling(0), encode, self.bad_words, self.text_bias)

    def _is_given(self, name: str) -> bool:
        return name in self.model_fields_set


class SessionFields(Body):
    """Fields of a conversation whose state the service stores."""

    session_id: SessionId | None = Field(
        None, description="Continue this session with the prompt, and store the turn in it."
    )
    wait: bool = Field(True, description="Wait for a running turn of the session. false: answer 409 instead.")


Label = Annotated[
    str,
    Field(max_length=64),
    Pattern(r"^[^\s:](?:[^\n:]*[^\s:])?$", "a label of one line without ':' and without white space at its ends"),
]
"""Name of a speaker, before the colon."""


class Template(Fields):
    """Labels of a conversation's prompt. Default: `System: …\\n\\nUser: …\\n\\nAssistant:`."""

    system: Label = Field("System", description="Label of the instructions.")
    user: Label = Field("User", description="Label of the user.")
    assistant: Label = Field("Assistant", description="Label of the assistant.")
    opening: str = Field("", max_length=256, description="Start of an answer without thought.")


def check_gaps(prefixes: list[str], suffixes: list[str]) -> None:
    """Check that every gap has both sides. Raises PydanticCustomError."""
    if (before := len(prefixes)) != (after := len(suffixes)):
        raise body_error(f"prefix and suffix must be of equal length, got {before} and {after}")


class TemplateFields(Body):
    """The prompt format of a conversation."""

    template: Template | None = Field(
        None,
        description="Labels to use instead of System, User and Assistant. Default: those of the state or the model.",
    )


class PromptFields(TemplateFields):
    """Prompts of the native batch routes: raw text, a conversation, or text to fill in."""

    contents: Texts = Field([], description="Raw prompts, one per row.")
    messages: Messages = Field(
        [], description='A conversation instead of contents: [{"role": "user", "content": "…"}].'
    )
    prefix: str | Texts = Field([], description="Fill in the middle: the text before the gap, one per row.")
    suffix: str | Texts = Field([], description="Fill in the middle: the text after the gap, one per row.")
    enable_think: bool = Field(False, description="Let the model think before it answers (with messages only).")

    @property
    def thinks(self) -> bool:
        return bool(self.messages) and self.enable_think

    @property
    def prefixes(self) -> list[str]:
        return [self.prefix] if isinstance(self.prefix, str) else self.prefix

    @property
    def suffixes(self) -> list[str]:
        return [self.suffix] if isinstance(self.suffix, str) else self.suffix

    @model_validator(mode="after")
    def _check_one_prompt_form(self) -> Self:
        forms = [bool(self.contents), bool(self.messages), bool(self.prefixes or self.suffixes)]
        if sum(forms) != 1:
            raise body_error("exactly one of contents, messages and prefix/suffix must be given and not be empty")
        check_gaps(self.prefixes, self.suffixes)
        return self


class BatchBody(PromptFields, GenerationBody):
    """Body of the batch routes, for any sampling method."""


class PromptBody(BatchBody, SessionFields, SamplingBody):
    """Body of the native batch routes."""


Mixing = TypeVar("Mixing", bound=MixtureFields)


def with_mixture_weights(body: Mixing, mixture: Sequence[tuple[str, float]]) -> Mixing:
    """Return the body with its weights applied to `mixture`.

    `mixture` is a list of (name, weight). Raises ServiceError.
    """
    weights = body.mrss_gatingweight
    if len(weights) != len(mixture):
        what = f"the mixture's {len(mixture)} states" if mixture else "a mixture that `model` or `state` names"
        raise invalid("mrss_gatingweight", f"must be a weight for each of {what}, got {len(weights)}", weights)
    members = [MixedState(name=name, weight=weight) for (name, _), weight in zip(mixture, weights, strict=True)]
    return body.model_copy(update={"states": members, "state": None})
