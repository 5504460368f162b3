"""Defaults of decode fields: of a model or a tuned state, and of a request that gives none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from pydantic import BeforeValidator, Field, create_model
from pydantic_core import from_json

from routes.config import HttpConfig
from routes.request.bodies import GenerationBody, StopTokens, Template
from routes.request.fields import Fields
from routes.request.sampler_fields import number_fields
from rwkv_batch.calls import DecodeDefaults
from rwkv_batch.errors import invalid
from sampling.params import Filters

_ALIASES = {
    "alpha_presence": "presence_penalty",
    "alpha_frequency": "frequency_penalty",
    "repetition_penalty": "repeat_penalty",
}
"""Fields of two names: if a request gives either, the default does not apply."""


if TYPE_CHECKING:
    _Numbers = Fields
else:
    _Numbers = create_model("_Numbers", __base__=Fields, **number_fields(is_optional=True))


_ENDS = ("stop_tokens", "stop_token_ids", "min_tokens")


class DefaultsFields(_Numbers):
    """Default decode parameters, with the same limits as the requests' fields."""

    temperature: float | None = Field(None, ge=0, le=100, description="Sampling temperature. 0 is greedy.")
    top_p: float | None = Field(None, ge=0, le=1, description="1 turns it off.")
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="0 or -1: off.")
    alpha_presence: float | None = Field(None, ge=-100, le=100, description="Presence penalty.")
    alpha_frequency: float | None = Field(None, ge=-100, le=100, description="Frequency penalty.")
    alpha_decay: float | None = Field(
        None, ge=0, le=1, description="Decay of the occurrence count per generated token."
    )
    max_tokens: int | None = Field(None, ge=1, description="Maximum number of generated tokens per row.")
    template: Template | None = Field(None, description="Labels of a conversation's prompt.")
    stop_tokens: StopTokens | None = Field(
        None, description="Token ids and strings that end a row. Not used for constrained text."
    )


def _parsed(value: Any) -> Any:
    """Decode a form's text as JSON."""
    return from_json(value) if isinstance(value, str) else value


Defaults = Annotated[DefaultsFields, BeforeValidator(_parsed)]


def as_defaults(fields: DefaultsFields | None, config: HttpConfig) -> DecodeDefaults:
    """Convert to the engine's type. Raises ServiceError for values that no request may have."""
    if fields is None:
        return DecodeDefaults()
    limit = config.max_tokens_limit
    if fields.max_tokens is not None and fields.max_tokens > limit:
        raise invalid("defaults.max_tokens", f"must be at most {limit} (--max-tokens-limit)", fields.max_tokens)
    given = fields.model_dump(exclude_none=True)
    given["filters"] = {name: given.pop(name) for name in Filters.__struct_fields__ if name in given}
    return msgspec.convert(given, DecodeDefaults)


def with_defaults(body: GenerationBody, defaults: DecodeDefaults, model_defaults: DecodeDefaults) -> GenerationBody:
    """Return the body with its missing fields filled in. The state's values take precedence over the model's."""
    filled = {
        name: value
        for name, value in (model_defaults.given | defaults.given).items()
        if name in type(body).model_fields and not {name, _ALIASES.get(name, name)} & body.model_fields_set
    }
    if body.constraint is not None:  # it defines where the text ends
        filled = {name: value for name, value in filled.items() if name not in _ENDS}
    if "template" in filled:
        filled["template"] = Template.model_validate(filled["template"])
    return body.model_copy(update=filled) if filled else body
