"""LibreTranslate's API: its clients and apps work with the address of this service."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from pydantic import BaseModel, Field

from routes.context import Context
from routes.request.bodies import Texts
from routes.response.http_response import HandlerResponse, json_response
from routes.route import Routes
from routes.translation import stored
from routes.translation.languages import LANGUAGE_CODE, LIBRE_ERRORS, Language, LibreBody, TargetLanguage
from routes.translation.memory import MAX_CHARACTERS, add_pairs
from routes.translation.translator import TranslationFields, check_languages, other_translations, translate
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.translation.documents.formats import ENDINGS
from rwkv_batch.translation.languages import LANGUAGE_NAMES, detect_languages, language_probabilities
from rwkv_batch.translation.markers import Format, MarkerOptions
from rwkv_batch.translation.plan import AUTO, TranslationRequest
from rwkv_batch.translation.segments import Split

ROUTES = Routes(allows_any_origin=True)
_BODY: dict[str, Any] = {
    "error_format": LIBRE_ERRORS,
    "form_lists": (),
    "secret_field": "api_key",
    "ignored_query": ("api_key",),  # clients without a setting for a key have it in the address
}
"""Fields of the routes with a body."""

_SHOWN_CODES = {"zh-CN": "zh-Hans", "zh-TW": "zh-Hant", AUTO: "en"}
_LANGUAGES = {code: name for code, name in LANGUAGE_NAMES.items() if code not in ("zh", "pt")} | {
    "pt": "Portuguese", "pt-BR": "Portuguese (Brazil)", "zh-Hans": "Chinese", "zh-Hant": "Chinese (traditional)",
}  # fmt: skip
_FRONTEND_TIMEOUT_MS = 500
_MAX_DETECTED, _MIN_PROBABILITY = 3, 0.01

_ApprovedText = Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS)]
_NotEmpty = Annotated[str, Field(min_length=1)]


class LibreTranslateBody(TranslationFields, LibreBody):
    """Body of a translation."""

    q: _NotEmpty | Annotated[Texts, Field(min_length=1)] = Field(description="A text or a list of texts.")
    source: Annotated[Language, LANGUAGE_CODE] = Field(AUTO, description="Code of the language, or auto.")
    target: Annotated[TargetLanguage, LANGUAGE_CODE] = Field(description="Code of the language to translate into.")
    format: Annotated[str, Field(pattern="^(text|html)$")] = Field("text", description="text or html.")
    alternatives: int = Field(0, ge=0, le=8, description="Number of other translations.")


class DetectedLanguage(BaseModel):
    """A detected language."""

    confidence: float = Field(description="In percent.")
    language: str


class LibreTranslation(BaseModel):
    """The translation of a text, or lists for a list of texts."""

    translatedText: str | list[str]  # noqa: N815 - LibreTranslate's name
    detectedLanguage: DetectedLanguage | list[DetectedLanguage] | None = Field(  # noqa: N815
        None, description="If `source` is auto."
    )
    alternatives: list[str] | list[list[str]] = Field([], description="Other translations, if requested.")


class DetectBody(LibreBody):
    """Body of a language detection."""

    q: _NotEmpty = Field(description="The text.")


LABEL = "/translate"


@ROUTES.add(
    "POST",
    LABEL,
    "LibreTranslate: translate a text or a list of texts.",
    is_generation=True,
    answer=LibreTranslation,
    errors=(ErrorKind.TIMEOUT,),
    **_BODY,
    example={"q": "Good morning", "source": "en", "target": "zh"},
)
async def translate_text(context: Context, body: LibreTranslateBody) -> HandlerResponse:
    """Translate a text or a list of texts as LibreTranslate does."""
    check_languages({"source": body.source, "target": body.target})
    request = TranslationRequest(
        texts=[body.q] if isinstance(body.q, str) else body.q,
        source=body.source,
        target=body.target,
        split=Split.SENTENCES,
        markers=MarkerOptions(Format(body.format)),
    )
    first = await translate(context, request, body, LABEL, "q", uses_memory=_takes_suggestions(context))
    known = [one.text for one in first]

    def shaped(values: list[Any]) -> Any:
        return values[0] if isinstance(body.q, str) else values

    answer = {"translatedText": shaped(known)}
    if body.source.lower() == AUTO:
        answer["detectedLanguage"] = shaped([_entry(one.source, one.source_probability) for one in first])
    if body.alternatives:
        others = await other_translations(context, request, body, LABEL, "q", body.alternatives, known)
        answer["alternatives"] = shaped(others)
    return json_response(answer)


def _entry(code: str, probability: float) -> dict[str, Any]:
    return {"confidence": round(100 * probability, 1), "language": _SHOWN_CODES.get(code, code)}


@ROUTES.add(
    "POST",
    "/detect",
    "LibreTranslate: detect a text's language.",
    **_BODY,
    example={"q": "Good morning"},
)
async def detect(context: Context, body: DetectBody) -> HandlerResponse:
    """Return the likely languages of a text, the best one first. Confidences are in percent."""
    found = await asyncio.to_thread(language_probabilities, body.q)
    best = sorted(found.items(), key=lambda entry: -entry[1])[:_MAX_DETECTED]
    likely = [one for one in best if one[1] > _MIN_PROBABILITY]
    return json_response([_entry(*one) for one in likely or [("en", 0.0)]])  # clients read the first one


class SuggestBody(LibreBody):
    """A better translation of a text."""

    q: _ApprovedText = Field(description="The text.")
    s: _ApprovedText = Field(description="Its translation.")
    source: Annotated[Language, LANGUAGE_CODE] = Field(description="Code of the text's language.")
    target: Annotated[TargetLanguage, LANGUAGE_CODE] = Field(description="Code of the translation's language.")


def _takes_suggestions(context: Context) -> bool:
    """Return whether clients are known. Strangers must not change translations."""
    return bool(context.config.password or context.keys.is_configured) and context.files is not None


@ROUTES.add(
    "POST",
    "/suggest",
    "LibreTranslate: store a better translation.",
    **_BODY,
    example={"q": "Good morning", "s": "Guten Morgen", "source": "en", "target": "de"},
)
async def suggest(context: Context, body: SuggestBody) -> HandlerResponse:
    """Store an approved translation.

    The service needs a folder of files, and a password or API keys.
    """
    if not _takes_suggestions(context):
        message = "suggestions need a service with a password or API keys that stores files (--files-dir)"
        raise ServiceError(ErrorKind.FORBIDDEN, message)
    source = body.source
    if source.lower() == AUTO:  # LibreTranslate's page sends it; a translation asks for the detected language
        (detected,) = await asyncio.to_thread(detect_languages, [body.q])
        source = detected.code or "en"
    pair = stored.Pair(source, body.target, body.q, body.s)
    await add_pairs(context, [pair], "q")
    return json_response({"success": True})


@ROUTES.add("GET", "/languages", "LibreTranslate: the languages.", is_public=True)
async def languages(context: Context) -> HandlerResponse:
    """Return the languages. Each can be translated into each."""
    codes = sorted(_LANGUAGES)
    return json_response([{"code": code, "name": _LANGUAGES[code], "targets": codes} for code in codes])


@ROUTES.add("GET", "/frontend/settings", "LibreTranslate: the settings.", is_public=True)
async def frontend_settings(context: Context) -> HandlerResponse:
    """Return the settings that LibreTranslate's clients read first."""
    needs_key = bool(context.config.password or context.keys.is_configured)
    language = {"source": {"code": AUTO, "name": "Auto Detect"}, "target": {"code": "en", "name": "English"}}
    keys = {"apiKeys": needs_key, "keyRequired": needs_key}
    has_files = context.files is not None
    endings = [f".{ending}" for ending in ENDINGS] if has_files else []
    features = {
        "suggestions": _takes_suggestions(context),
        "filesTranslation": has_files,
        "supportedFilesFormat": endings,
    }
    limits = {"charLimit": -1, "frontendTimeout": _FRONTEND_TIMEOUT_MS}
    return json_response({**limits, **keys, **features, "language": language})
