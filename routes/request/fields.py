"""Types and base classes of all request models.

Also values in errors, unsupported fields, and constraints.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, PydanticSerializationError, core_schema, to_json

from rwkv_batch.errors import ServiceError, invalid
from sampling.grammar.constraint import MAX_CHOICES, MAX_SOURCE_CHARACTERS, THINK_END, Constraint, Form

_CHARACTERS = 200
_NAME_CHARACTERS = 64
_ESCAPE = re.compile(r"\\(?:[nrt0\\]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4})")


class _JsonRepr(reprlib.Repr):
    """A short repr in JSON's notation."""

    def repr_str(self, x: str, level: int) -> str:
        return json.dumps(x if len(x) <= self.maxstring else f"{x[: self.maxstring]}...", ensure_ascii=False)

    def repr_bool(self, x: bool, level: int) -> str:
        return json.dumps(x)

    def repr_NoneType(self, x: None, level: int) -> str:  # noqa: N802 - reprlib's own form
        return json.dumps(x)


_short = _JsonRepr()
_short.maxstring = _short.maxother = _CHARACTERS


def error_value(value: Any) -> Any:
    """Return the value as an error may repeat it: at most 200 characters."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) < 2**53:
        return value
    if isinstance(value, float) and abs(value) < float("inf"):
        return value
    if not isinstance(value, str):
        return _encodable(_short.repr(value))[:_CHARACTERS]
    text = _encodable(value[:_CHARACTERS])
    return text if len(value) <= _CHARACTERS else f"{text}... ({len(value)} characters)"


_READS_AS_ANOTHER_TYPE = re.compile(r"(true|false|null|[-+]?[\d.]+(e[-+]?\d+)?|[\[{].*)\s*", re.IGNORECASE | re.DOTALL)


def describe_value(value: Any) -> str:
    """Return the value for use within a sentence. A text that reads as a value of another type has quotes."""
    if value == "":
        return "an empty text"
    if isinstance(value, str) and _READS_AS_ANOTHER_TYPE.fullmatch(value):
        return json.dumps(error_value(value), ensure_ascii=False)
    return json.dumps(value) if value is None or isinstance(value, bool) else str(error_value(value))


def error_field_name(name: str) -> str:
    """Return a field name that the client chose, shortened to 64 characters."""
    text = _encodable(name[:_NAME_CHARACTERS]) or '""'
    return text if len(name) <= _NAME_CHARACTERS else f"{text}..."


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


_MAX_NUMBER_LENGTH = 32


def _number(value: Any) -> Any:
    if isinstance(value, str) and len(value) <= _MAX_NUMBER_LENGTH:
        with contextlib.suppress(ValueError):  # other text is refused by the field's own check
            return float(value)
    return value


Number = Annotated[float, BeforeValidator(_number)]
"""A number, or text with a number."""


def body_error(message: str, field: str | None = None) -> PydanticCustomError:
    """Return the error of a validator that sees several fields. `field`: the one to report."""
    context = {"message": message} | ({} if field is None else {"field": field})
    return PydanticCustomError("body", "{message}", context)


@dataclass(frozen=True)
class Pattern:
    """Restricts a text to a regular expression. Errors show `description`."""

    pattern: str
    description: str
    names: tuple[str, ...] = ()
    """The allowed texts, which the schema then has instead of the expression."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), **({"enum": [*self.names]} if self.names else {"pattern": self.pattern})}

    def _check(self, text: str) -> str:
        if not re.fullmatch(self.pattern, text):
            raise PydanticCustomError("shape", "must be {description}", {"description": self.description})
        return text


def one_of(names: tuple[str, ...]) -> Pattern:
    """Return what restricts a text to these names. "" is allowed too and means the default."""
    return Pattern("|".join(map(re.escape, ("", *names))), f"one of {', '.join(names)}", ("", *names))


Device = Annotated[
    str, Pattern(r"^(auto|cpu|cuda(:[0-9]{1,4})?|[0-9]{1,4})$", "a device like cuda:0, a GPU's number, cpu or auto")
]
"""A device, in the format of --pp-devices."""
NO_NUL = Pattern(r"^[^\x00]*$", "a name without the character U+0000")
"""For session ids: PostgreSQL's text type does not allow U+0000."""
SessionId = Annotated[str, Field(min_length=1, max_length=256), NO_NUL]


def list_default(values: tuple[Any, ...]) -> Any:
    """Return a list field's default. A list would be copied deeply for each request."""
    return values


class Fields(BaseModel):
    """Base of all request models: strict, but treats null as missing. `validation.py` finds unknown fields.

    A model's validator is built when it is first used. Many models are only bases of others.
    """

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, value: Any) -> Any:
        return {name: given for name, given in value.items() if given is not None} if isinstance(value, dict) else value


class TextFields(Fields):
    """Fields of a query or a form: all values may be texts."""

    model_config = ConfigDict(strict=False)


@dataclass(frozen=True)
class Ignored:
    """Marks a field that is accepted and ignored. A value other than empty ones and `defaults` becomes a warning."""

    defaults: tuple[Any, ...] = ()

    def is_request(self, value: Any) -> bool:
        """Return whether the value requests something the service does not do."""
        return bool(value) and value not in self.defaults


IgnoredValue = Annotated[Any, Ignored()]
Repeated = Any
"""Type of a field that only earlier answers have. Clients send these answers back, and the field is not read."""


def reject_values(remedy: str, *allowed: Any) -> AfterValidator:
    """Return a validator that accepts only empty values and those in `allowed`."""

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
Unsupported = Annotated[Any, reject_values("is not supported by this service; leave it out")]


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


def has_chat_only_fields(data: dict[str, Any]) -> bool:
    """Return whether a body has a field that only conversation routes support."""
    if any(data.get(name) for name in ("reasoning_effort", "chat_template_kwargs", "continue_final_message")):
        return True
    try:
        ChatOnlyFields.model_validate(data)
    except ValidationError:
        return True
    return False


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


class IgnoredOpenAIFields(Fields):
    """OpenAI's fields that are accepted and ignored. The answer's `warnings` name them."""

    user: Annotated[str, Ignored()] = Field("", max_length=1024, description="Accepted and ignored.")
    metadata: IgnoredValue = Field(None, description="Accepted and ignored.")
    store: Annotated[bool, Ignored()] = Field(False, description="Accepted and ignored: answers are not stored.")
    service_tier: Annotated[Any, Ignored(("auto", "default"))] = Field(
        None, description="Accepted and ignored. See `priority`."
    )
    safety_identifier: IgnoredValue = Field(None, description="Accepted and ignored.")
    prompt_cache_key: IgnoredValue = Field(None, description="Accepted and ignored. See `cache_salt`.")
    prompt_cache_retention: IgnoredValue = Field(None, description="Accepted and ignored.")
    prompt_cache_options: IgnoredValue = Field(None, description="Accepted and ignored.")
    moderation: IgnoredValue = Field(None, description="Accepted and ignored.")


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


Choice = Annotated[str, Field(min_length=1, max_length=MAX_SOURCE_CHARACTERS)]


class ConstraintFields(Fields):
    """Constraints on the text of every row. At most one may be given."""

    grammar: str | None = Field(
        None, min_length=1, max_length=MAX_SOURCE_CHARACTERS, description="The text matches this Lark grammar."
    )
    regex: str | None = Field(
        None,
        min_length=1,
        max_length=MAX_SOURCE_CHARACTERS,
        description="The whole text matches this regular expression, in Rust's syntax.",
    )
    choice: Annotated[list[Choice], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)] | None = Field(
        None, description="The text is one of these."
    )
    json_schema: dict[str, Any] | bool | None = Field(
        None, description="The text is JSON that is valid under this schema."
    )

    @property
    def thinks(self) -> bool:
        """Whether a thought comes before the constrained text."""
        return False

    @property
    def constraint(self) -> Constraint | None:
        """The constraint of the rows. Raises ServiceError for a schema that is nested too deeply."""
        after = THINK_END if self.thinks else ""
        if self.grammar is not None:
            return Constraint(form=Form.LARK, source=self.grammar, field="grammar", after=after)
        if self.regex is not None:
            return Constraint(form=Form.REGEX, source=self.regex, field="regex", after=after)
        if self.choice is not None:
            return Constraint(form=Form.CHOICE, source=to_json(self.choice).decode(), field="choice", after=after)
        if self.json_schema is not None:
            source = _as_source(self.json_schema)
            return Constraint(form=Form.JSON_SCHEMA, source=source, field="json_schema", after=after)
        return None

    @model_validator(mode="after")
    def _one_constraint(self) -> Self:
        named = ("grammar", "regex", "choice", "json_schema")
        at_most_one(name for name in named if getattr(self, name) is not None)
        return self


def _as_source(schema: dict[str, Any] | bool) -> str:
    try:
        return to_json(schema).decode()
    except PydanticSerializationError:
        raise invalid("json_schema", "is nested too deeply; nest fewer schemas or use $ref", None) from None


def at_most_one(given: Iterable[str]) -> None:
    """Check that at most one constraint is given. Raises PydanticCustomError for more."""
    names = list(given)
    if len(names) > 1:
        raise body_error(f"{' and '.join(names)} exclude each other", names[-1])


@contextlib.contextmanager
def rename_fields(**request_names: str) -> Iterator[None]:
    """Rename the fields in errors to those of the request. In a message's text, only names with `_` are fields."""
    try:
        yield
    except ServiceError as error:
        field, message = error.info.field or "", error.info.message
        name = request_names.get(re.split(r"[.\[]", field)[0])
        if name is not None:
            message = f"{name}: {message.removeprefix(f'{field}: ')}"
        words = "|".join(word for word in request_names if "_" in word) or "$."  # matches nothing
        message = re.sub(rf"(?<![\w.])(?:{words})\b", lambda found: request_names[found[0]], message)
        renamed = msgspec.structs.replace(error.info, field=name or error.info.field, message=message)
        raise ServiceError.from_info(renamed) from None


def unescaped(field: str, text: str) -> str:
    """Return the field's text with its escapes replaced, like \\n and \\u00e9.

    Raises ServiceError for a lone surrogate. A surrogate pair is one character.
    """
    found = _ESCAPE.sub(lambda escape: codecs.decode(escape[0], "unicode_escape"), text)
    try:
        return found.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError:
        raise invalid(field, "must be text with a UTF-8 form, but has a lone surrogate", text) from None
