"""DeepL's API: its clients work with `server_url`, the address of this service."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal
from xml.parsers import expat

from pydantic import BaseModel, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from routes.context import Context
from routes.request.bodies import Texts
from routes.request.fields import Fields, IgnoredValue, TextFields
from routes.request.jobs import offload_if_large
from routes.request_context import cache_tenant, current_request
from routes.response.http_response import DEEPL_ERRORS, HandlerResponse, HttpResponse, json_response
from routes.response.task_stream import SharedAnswers, with_early_head
from routes.route import Routes
from routes.translation.batch_translate import ContextText
from routes.translation.glossaries import GlossaryId, named_glossaries
from routes.translation.languages import HEAD_AFTER_S, DeepLFormality, Language, TargetLanguage
from routes.translation.translator import TranslationFields, check_languages, translate
from rwkv_batch.errors import ErrorKind, invalid
from rwkv_batch.translation.glossary import GlossaryMode
from rwkv_batch.translation.languages import LANGUAGE_NAMES
from rwkv_batch.translation.markers import Format, MarkerOptions
from rwkv_batch.translation.plan import AUTO, TranslationRequest
from rwkv_batch.translation.prompts import style_lines
from rwkv_batch.translation.segments import Split

ROUTES = Routes(error_format=DEEPL_ERRORS)

NO_LIMIT = 1_000_000_000_000
"""The `character_limit` of DeepL's accounts without a limit."""
SPLITS = {"0": Split.NONE, "1": Split.SENTENCES, "nonewlines": Split.WRAPPED}
_VARIANTS = {
    "EN-GB": "English (British)", "EN-US": "English (American)", "ES-419": "Spanish (Latin American)",
    "PT-BR": "Portuguese (Brazilian)", "PT-PT": "Portuguese (European)", "ZH-HANS": "Chinese (simplified)",
    "ZH-HANT": "Chinese (traditional)",
}  # fmt: skip


def _tags(given: Any) -> Any:
    """Return the tags of a list, or of a text with commas."""
    texts = given if isinstance(given, list) else [given]
    if not all(isinstance(one, str) for one in texts):
        raise PydanticCustomError("tags", "must be a list of tags, or a text with commas between them")
    return [tag.strip() for text in texts for tag in text.split(",") if tag.strip()]


Tags = Annotated[
    list[Annotated[str, Field(max_length=64)]], Field(max_length=256, fail_fast=True), BeforeValidator(_tags)
]


class DeepLBody(TranslationFields, TextFields):
    """Body of a translation, as JSON or as a form."""

    text: Annotated[Texts, BeforeValidator(lambda given: [given] if isinstance(given, str) else given)] = Field(
        description="The texts to translate. Order and length are kept."
    )
    target_lang: TargetLanguage = Field(description="Code of a language in any case, like DE or ZH-HANT.")
    source_lang: Language = Field(AUTO, description="Code of the texts' language. Default: detected for each text.")
    context: ContextText = Field("", description="Text that is read and not translated.")
    split_sentences: Literal["0", "1", "nonewlines"] | None = Field(
        None, description="0: only at blank lines. nonewlines: at sentences. 1: at sentences and line breaks."
    )
    tag_handling: Literal["xml", "html"] | None = Field(None, description="Default: tags stay as placeholders do.")
    outline_detection: bool = Field(True, description="XML: whether tags with no text next to them split the text.")
    splitting_tags: Tags = Field([], description="Tags that split the text.")
    non_splitting_tags: Tags = Field([], description="Tags that never split the text.")
    ignore_tags: Tags = Field([], description="Tags whose content stays as it is.")
    model_type: Literal["quality_optimized", "prefer_quality_optimized", "latency_optimized"] | None = Field(
        None, description="There is one model. The answer has `model_type_used`."
    )
    formality: DeepLFormality = Field(
        "default", description="prefer_more and prefer_less are instructions. more and less are refused."
    )
    glossary_id: GlossaryId = Field("", description="Id of a stored glossary. It needs source_lang.")
    glossary_ids: Annotated[list[GlossaryId], Field(max_length=5), BeforeValidator(_tags)] = Field(
        [], description="Ids of stored glossaries, instead of glossary_id. The first one's terms win."
    )
    show_billed_characters: Any = Field(None, description="The answer always has them.")
    preserve_formatting: Any = Field(None, description="Formatting is always kept.")
    tag_handling_version: Literal["v1", "v2"] | None = Field(None, description="v2 refuses malformed XML.")
    enable_beta_languages: Any = Field(None, description="Changes nothing.")
    style_id: Any = Field(None, description="Refused: there are no stored styles. Use custom_instructions.")
    custom_instructions: Annotated[list[Annotated[str, Field(max_length=300)]], Field(max_length=10)] = Field(
        [], description='Instructions in plain words, like "Use short sentences." A model may ignore them.'
    )
    translation_memory_id: Any = Field(None, description="Refused: DeepL's translation memories are not served.")
    translation_memory_threshold: IgnoredValue = Field(None, description="Accepted and ignored.")


class DeepLTranslation(BaseModel):
    """One translated text."""

    detected_source_language: str = Field(description="Code of the text's language, in capital letters.")
    text: str
    billed_characters: int = Field(description="Length of the text.")
    model_type_used: str = Field("", description="If the request has `model_type`.")


class DeepLTranslations(BaseModel):
    """The translations, in the order of the texts."""

    translations: list[DeepLTranslation]


class DeepLUsage(BaseModel):
    """The used and the allowed characters."""

    character_count: int
    character_limit: int


LABEL = "/v2/translate"
RUNNING_KEY = "deepl"
"""Key of the `SharedAnswers` in `Context.shared`. DeepL's clients repeat a slow request while it runs."""


@ROUTES.add(
    "POST",
    LABEL,
    "DeepL: translate texts.",
    is_generation=True,
    allows_any_origin=True,
    answer=DeepLTranslations,
    errors=(ErrorKind.TIMEOUT,),
    form_lists=(
        "text",
        "splitting_tags",
        "non_splitting_tags",
        "ignore_tags",
        "glossary_ids",
        "custom_instructions",
    ),
    example={"text": ["Good morning"], "target_lang": "ZH"},
)
async def translate_text(context: Context, body: DeepLBody) -> HandlerResponse:
    """Translate texts as DeepL does. The key is sent as `Authorization: DeepL-Auth-Key`."""
    check_languages({"source_lang": body.source_lang, "target_lang": body.target_lang})
    if body.style_id:
        raise invalid("style_id", "there are no stored styles; leave it out, or use custom_instructions", body.style_id)
    if body.translation_memory_id:
        message = "DeepL's translation memories are not served; leave it out, or use memory of /translate/v1"
        raise invalid("translation_memory_id", message, body.translation_memory_id)
    form = Format(body.tag_handling or Format.TEXT)
    if form is Format.XML and body.tag_handling_version == "v2":
        await offload_if_large(sum(map(len, body.text)), _check_xml, body.text)
    default = "nonewlines" if form is Format.HTML else "1"
    request = TranslationRequest(
        texts=body.text,
        source=body.source_lang,
        target=body.target_lang,
        split=SPLITS[body.split_sentences or default],
        markers=MarkerOptions(
            form,
            ignore_tags=frozenset(map(str.lower, body.ignore_tags)),
            splitting_tags=frozenset(map(str.lower, body.splitting_tags)),
            non_splitting_tags=frozenset(map(str.lower, body.non_splitting_tags)),
            detects_outline=body.outline_detection,
        ),
        context=body.context,
        glossary_mode=GlossaryMode.ENFORCE,
        style=style_lines(" ".join(body.custom_instructions), body.formality, ""),
    )

    ids = [body.glossary_id] if body.glossary_id else body.glossary_ids
    if body.glossary_id and body.glossary_ids:
        raise invalid("glossary_ids", "cannot be given with glossary_id; leave one of them out", body.glossary_ids)
    if ids and body.source_lang == AUTO:
        raise invalid("source_lang", "must be given with a glossary, like EN", None)
    request = await named_glossaries(context, ids, request)

    async def answer() -> HttpResponse:
        used = {"model_type_used": "quality_optimized"} if body.model_type else {}
        translations = [
            {
                "detected_source_language": one.source.partition("-")[0].upper() if one.source != AUTO else "EN",
                "text": one.text,
                "billed_characters": len(text),
                **used,
            }
            for one, text in zip(await translate(context, request, body, LABEL, "text"), body.text, strict=True)
        ]
        return json_response({"translations": translations})

    same = (cache_tenant(context.config), current_request().owner, context.config.model_name, body.model_dump_json())
    running: SharedAnswers = context.shared.setdefault(RUNNING_KEY, SharedAnswers())
    return await with_early_head(running.get(same, answer), DEEPL_ERRORS, HEAD_AFTER_S)


def _check_xml(texts: list[str]) -> None:
    """Check that texts are well-formed documents of XML, or parts of them. Raises ServiceError."""
    for index, text in enumerate(texts):
        why = _xml_fault(text)
        if why and not text.lstrip().startswith(("<?xml", "<!DOCTYPE")):
            root = f"x{secrets.token_hex(4)}"  # which the text cannot close
            why = _xml_fault(text, f"<{root}>", f"</{root}>")
        if why:
            message = f"is not well-formed XML: {why}; correct it, or leave out tag_handling_version"
            raise invalid(f"text[{index}]", message, text)


def _xml_fault(text: str, before: str = "", after: str = "") -> str:
    """Return the fault, "" for well-formed XML. Prefixes and entities may be declared elsewhere."""
    parser = expat.ParserCreate()
    parser.UseForeignDTD(True)
    parser.DefaultHandler = lambda _: None  # with a handler, no entity is expanded
    try:
        parser.Parse(before, False)
        parser.Parse(text, False)
        parser.Parse(after, True)
    except expat.ExpatError as error:
        column = error.offset - len(before) * (error.lineno == 1) + 1
        return f"{expat.errors.messages[error.code]} at line {error.lineno}, column {column}"
    return ""


class LanguagesQuery(Fields):
    """Query of the list of languages."""

    type: Literal["source", "target"] = Field("source", description="source or target.")


@ROUTES.add("GET", "/v2/languages", "DeepL: the languages.", form_lists=(), example={"type": "target"})
async def languages(context: Context, query: LanguagesQuery) -> HandlerResponse:
    """Return the source languages or the target languages."""
    names = {code.upper(): name for code, name in LANGUAGE_NAMES.items()}
    if query.type == "source":
        return json_response([{"language": code, "name": name} for code, name in sorted(names.items())])
    targets = {code: name for code, name in names.items() if code not in ("EN", "PT")} | _VARIANTS
    return json_response(
        [{"language": code, "name": name, "supports_formality": False} for code, name in sorted(targets.items())]
    )


@ROUTES.add("GET", "/v2/usage", "DeepL: the usage.", answer=DeepLUsage)
async def usage(context: Context) -> HandlerResponse:
    """Return a usage without a limit. Characters are not counted."""
    return json_response({"character_count": 0, "character_limit": NO_LIMIT})
