"""What the bodies of several translation routes share: languages, terms, and what is DeepL's and LibreTranslate's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from routes.request.bodies import Body
from routes.request.fields import TextFields, reject_values
from routes.response.http_response import HTTP_STATUS, NATIVE_ERRORS, ErrorFormat
from rwkv_batch.errors import ErrorKind
from rwkv_batch.translation.plan import AUTO
from rwkv_batch.translation.prompts import MAX_STYLE_CHARACTERS

LABEL = "/translate/v1/batch-translate"


def _one_line(name: str) -> str:
    if not name.strip() or name.splitlines() != [name]:
        raise PydanticCustomError("language", "must be one line with a language's code or name, like zh-TW or Klingon")
    return name


def _not_auto(name: str) -> str:
    if name.lower() == AUTO:
        raise PydanticCustomError("language", "must be the language to translate into; only source_lang may be auto")
    return name


Language = Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_one_line)]
"""A language code or name. The prompt uses the English name of a known language, and any other text unchanged."""
TargetLanguage = Annotated[Language, AfterValidator(_not_auto)]

LIBRE_ERRORS = ErrorFormat(
    NATIVE_ERRORS.body,
    HTTP_STATUS | {ErrorKind.UNAUTHORIZED: 403, ErrorKind.INVALID_FIELD: 400},
    NATIVE_ERRORS.schema,
)
_OWN_CODES = {"zt": "zh-TW", "pb": "pt-BR"}
"""LibreTranslate's codes that other services do not have."""
LANGUAGE_CODE = BeforeValidator(lambda given: _OWN_CODES.get(given, given) if isinstance(given, str) else given)


class LibreBody(Body, TextFields):
    """A body as JSON or as a form."""

    api_key: str = Field("", description="The service's password or an API key, if the service requires one.")


HEAD_AFTER_S = 2.0
"""DeepL's Node client sends the same request again if it has no head after 5 s, the Python client after 10 s."""
NO_FORMALITY = "is not supported: the model may ignore it; use default, prefer_more or prefer_less"
DeepLFormality = Annotated[
    str,
    reject_values(NO_FORMALITY, "default", "prefer_more", "prefer_less"),
    AfterValidator(lambda given: given.removeprefix("prefer_") or "default"),
]
"""Becomes a `Formality`."""
Formality = Literal["default", "more", "less"]
StyleText = Annotated[str, Field(max_length=MAX_STYLE_CHARACTERS)]


def _is_text(given: Any) -> bool:
    return isinstance(given, str)


def _term_on_one_line(term: str) -> str:
    if len(term.strip().splitlines()) > 1:  # a line break ends the model's answer
        raise PydanticCustomError("term", "must be on one line; send a term for each line")
    return term


_Term = Annotated[str, Field(max_length=100, pattern=r"\S"), AfterValidator(_term_on_one_line)]
_TranslatedTerm = Annotated[
    str,
    Field(max_length=1024, pattern=r"\S"),
    AfterValidator(_term_on_one_line),
    BeforeValidator(
        lambda given: " | ".join(given) if isinstance(given, list) and all(map(_is_text, given)) else given
    ),
]
GlossaryTerms = Annotated[dict[_Term, _TranslatedTerm], Field(max_length=10_000)]


def _decoded(given: Any) -> Any:
    try:
        return msgspec.json.decode(given) if isinstance(given, str) else given
    except (msgspec.DecodeError, RecursionError):
        return given


GlossaryText = Annotated[GlossaryTerms, BeforeValidator(_decoded)]
"""The terms in a form, as JSON."""
