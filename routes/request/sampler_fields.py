"""The requests' fields of `sampling.params.Filters`. Its annotations are their types, limits and descriptions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_type_hints

import msgspec
from pydantic import BeforeValidator, Field, create_model
from pydantic_core import PydanticCustomError

from routes.request.fields import Fields, list_default
from rwkv_batch.errors import invalid
from sampling.params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_BREAKER_BYTES, MAX_BREAKERS, Filters, SamplingParams

_LETTERS = {
    "e": "penalties", "d": "dry", "t": "temperature", "s": "top_n_sigma", "m": "min_p", "y": "typ_p", "p": "top_p",
    "k": "top_k", "x": "xtc",
}  # fmt: skip
"""llama.cpp's letters of its samplers."""
SamplerName = Literal[
    "penalties", "dry", "temperature", "top_n_sigma", "min_p", "typ_p", "epsilon_cutoff", "eta_cutoff", "top_p",
    "top_k", "xtc",
]  # fmt: skip
BadWord = Annotated[str, Field(min_length=1, max_length=256)]
_LIMITS = ("ge", "gt", "le", "lt", "description")


def _names(value: Any) -> Any:
    """Return llama.cpp's text of letters as a list of names."""
    if not isinstance(value, str):
        return value
    if wrong := next((letter for letter in value if letter not in _LETTERS), ""):
        raise PydanticCustomError(
            "samplers",
            "has the letter {wrong}; allowed are {allowed}",
            {"wrong": repr(wrong), "allowed": ", ".join(f"{letter} ({name})" for letter, name in _LETTERS.items())},
        )
    return [_LETTERS[letter] for letter in value]


def _breaker(value: Any) -> Any:
    if isinstance(value, str) and len(value.encode("utf-8", "surrogatepass")) > MAX_BREAKER_BYTES:
        raise PydanticCustomError("too_long", "must have at most {limit} bytes", {"limit": MAX_BREAKER_BYTES})
    return value


def number_fields(is_optional: bool = False) -> dict[str, Any]:
    """Return the fields of all numbers: name -> type and field, as `create_model` takes them.

    is_optional: their default is None
    """
    made = {}
    defaults = {field.name: field.default for field in msgspec.structs.fields(Filters)}
    for name, hint in get_type_hints(Filters, include_extras=True).items():
        kind, *metas = get_args(hint) or (hint,)
        if kind in (int, float):
            limits = {
                limit: value for meta in metas for limit in _LIMITS if (value := getattr(meta, limit)) is not None
            }
            default = None if is_optional else defaults[name]
            made[name] = (kind | None if is_optional else kind, Field(default, **limits))
    return made


if TYPE_CHECKING:

    class _NumberFields(Fields):
        min_tokens: int = 0

else:
    _NumberFields = create_model("_NumberFields", __base__=Fields, **number_fields())


class SamplerFields(_NumberFields):
    """Samplers beyond temperature, top_k and top_p. The names are those of vLLM and llama.cpp."""

    repeat_penalty: float | None = Field(
        None, ge=0.01, le=100, description="llama.cpp's name of repetition_penalty, which takes precedence."
    )
    samplers: Annotated[list[SamplerName], Field(max_length=16), BeforeValidator(_names)] = Field(
        list_default(get_args(SamplerName)),
        description="The samplers in use, in order: names, or llama.cpp's letters in a text.",
    )
    dry_sequence_breakers: Annotated[
        list[Annotated[str, BeforeValidator(_breaker)]], Field(max_length=MAX_BREAKERS, fail_fast=True)
    ] = Field(
        list_default(Filters().dry_sequence_breakers),
        description="Texts of at most 32 bytes. No sequence that DRY finds has a token with one of them.",
    )
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] = Field(
        [], description="Texts that the answer does not contain, as far as it is written with the same tokens."
    )

    def given_samplers(self, repeat_last_n: int) -> dict[str, Any]:
        """Return the given fields, for a body of another format. The argument is the format's default."""
        given = {name: getattr(self, name) for name in SamplerFields.model_fields if name in self.model_fields_set}
        return {"repeat_last_n": repeat_last_n, **given} if given else {}

    @property
    def text_bias(self) -> dict[str, float]:
        """Text -> value added to the logits of its tokens."""
        return {}

    @property
    def filters(self) -> Filters | None:
        """The parameters of the samplers, without `bad_words`. None: all are off."""
        if self.model_fields_set.isdisjoint(SamplerFields.model_fields):
            return _default_filters(type(self))
        return self.make_filters()

    def make_filters(self) -> Filters | None:
        """Return the parameters without looking at what was given."""
        given = {name: getattr(self, name) for name in Filters.__struct_fields__ if name != "bad_words"}
        if self.repeat_penalty is not None and "repetition_penalty" not in self.model_fields_set:
            given["repetition_penalty"] = self.repeat_penalty
        given |= {name: tuple(given[name]) for name in ("samplers", "dry_sequence_breakers")}
        filters = Filters(**given)
        return filters if filters.is_active else None


@functools.cache
def _default_filters(model: type[SamplerFields]) -> Filters | None:
    """Return the filters of a body without any of the fields, as most are."""
    return model.model_construct().make_filters()


def with_texts(
    params: SamplingParams, encode: Callable[[str], list[int]], bad_words: Sequence[str], text_bias: Mapping[str, float]
) -> SamplingParams:
    """Return the parameters with bad words and biases of texts, as tokens. Raises ServiceError.

    encode: returns the token ids of a text

    A bad word is banned with and without a space before it. Each token of a text gets its bias.
    """
    if not (bad_words or text_bias):
        return params
    bias = dict(params.logit_bias)
    for text, value in text_bias.items():
        bias |= {token: bias.get(token, 0.0) + value for token in encode(text)}
    sequences: list[tuple[int, ...]] = []
    for i, word in enumerate(bad_words):
        plain, spaced = encode(word), encode(f" {word}")
        for ids in (plain, spaced) if spaced[1:] != plain else (plain,):
            if len(ids) > MAX_BAD_WORD_TOKENS:
                raise invalid(f"bad_words[{i}]", f"has {len(ids)} tokens, the limit is {MAX_BAD_WORD_TOKENS}", word)
            if len(ids) == 1:
                bias[ids[0]] = -math.inf
            else:
                sequences.append(tuple(ids))
    filters = params.filters
    if sequences:
        filters = msgspec.structs.replace(filters or Filters(), bad_words=tuple(sequences))
    return msgspec.structs.replace(params, logit_bias=bias, filters=filters)
