"""`POST /translate/v1/batch-translate`: immersive-translate's custom API, for many short texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
from pydantic import Field

from routes.context import Context
from routes.request.bodies import Texts
from routes.request.fields import FixedSamplingFields
from routes.request.jobs import encode_all, greedy_row, make_job, offload_if_large
from routes.request.model_names import requested_origin
from routes.request_context import current_request, warn
from routes.response.event_stream import OutputDecoder
from routes.response.generate import finished_rows
from routes.response.http_response import NATIVE_ERRORS, HandlerResponse, json_response
from routes.response.response_models import StreamedTranslation, Translations
from routes.response.task_stream import stream_events
from routes.route import Routes
from routes.translation.glossaries import named_glossaries
from routes.translation.languages import LABEL, Formality, GlossaryTerms, Language, StyleText, TargetLanguage
from routes.translation.translator import TranslationFields, other_translations, report_unknown_languages, translate
from rwkv_batch.errors import ErrorKind, invalid
from rwkv_batch.request import GenerateRequest, PromptLogprobs
from rwkv_batch.translation.checks import least_certain
from rwkv_batch.translation.context import ContextMode, page_context
from rwkv_batch.translation.glossary import Glossary, GlossaryMode
from rwkv_batch.translation.markers import Format, MarkerOptions
from rwkv_batch.translation.memory import CacheUse
from rwkv_batch.translation.plan import AUTO, Query, Translation, TranslationRequest
from rwkv_batch.translation.prompt_forms import prompt_form
from rwkv_batch.translation.prompts import shared_prompt, style_lines, translation_prompt
from rwkv_batch.translation.segments import Split

EXAMPLE = {"source_lang": "en", "target_lang": "zh-CN", "text_list": ["Hello world!", "Good morning"]}
ROUTES = Routes()
_SCORE_DECIMALS = 4

Scored = tuple[str, str]
"""A prompt, and a text after it whose log-probability is wanted."""
ContextText = Annotated[str, Field(max_length=100_000)]
KeptTerms = Annotated[list[Annotated[str, Field(min_length=1, max_length=100)]], Field(max_length=256, fail_fast=True)]


class TranslateBody(FixedSamplingFields, TranslationFields):
    """Body of a translation request, in the format of immersive-translate's custom API."""

    source_lang: Language = Field(
        AUTO,
        description="ISO code or auto. auto detects the language of each text. A short, ambiguous text takes the "
        "language of the other texts. A text without letters is copied. An unknown language is used unchanged.",
    )
    target_lang: TargetLanguage = Field(
        description="ISO code or English name. An unknown language, like Klingon, is used unchanged, with a warning."
    )
    text_list: Texts = Field(description="The texts to translate. Order and length are kept.")
    split: Split = Field(
        Split.NEWLINES,
        strict=False,
        description="Where the text is split. newlines: each line alone, so the lines stay. sentences: also each "
        "sentence. wrapped: sentences, and a single line break is a space. none: only at blank lines.",
    )
    format: Format = Field(
        Format.TEXT,
        strict=False,
        description="text, html or xml. In all of them, placeholders, tags, addresses and inline code are kept. html "
        "and xml also decode entities, and split at block tags.",
    )
    title: str = Field("", max_length=1000, description="Title of the page or document. It is read before `context`.")
    context: ContextText = Field(
        "", description="Text that the model reads before each text, like a page's beginning. It is not translated."
    )
    context_mode: ContextMode | None = Field(
        None,
        strict=False,
        description="none: no context. page: `context`, or the beginning of the request's own texts, is read once. "
        "rolling: also the segments before, with their translations. Default: page with `title`, `context` or "
        "`document`, else none.",
    )
    document: str = Field(
        "",
        max_length=256,
        description="Id that the client chooses. Later requests with it continue its context, and with rolling its "
        "translations. It belongs to the API key.",
    )
    do_not_translate: KeptTerms = Field([], description="Words that stay as they are, like product names.")
    glossary: GlossaryTerms = Field(
        {},
        description='Terms and translations: {"state pool": "状态池"}, or forms: "Katze | Katzen", or a list. A text '
        "whose translation lacks one is translated again, with the translations in the text. `warnings` names terms "
        "that are still missing.",
    )
    glossary_mode: GlossaryMode = Field(
        GlossaryMode.CHECK,
        strict=False,
        description="hint: the prompt has the translations. check: as `glossary` says. enforce: the sampler ends no "
        "text without a form of each translation; the model chooses its place.",
    )
    instruction: StyleText = Field("", description='Instruction in plain words, like "Use short sentences."')
    formality: Formality = Field(
        "default", description="more or less formal. It is an instruction, which a model may ignore."
    )
    audience: StyleText = Field("", description='The readers, like "children". It is an instruction too.')
    glossary_id: str = Field(
        "", max_length=80, description="Id of a stored glossary (/translate/v1/glossaries). Terms of `glossary` win."
    )
    glossary_version: int | None = Field(None, ge=1, description="Version of the stored glossary. Default: the last.")
    memory: bool = Field(
        False,
        description="Use the key's approved translations (/translate/v1/memory): those of the same text instead of the "
        "model, those of similar texts as examples. The answer then has `source` for each text.",
    )
    cache: CacheUse = Field(
        CacheUse.USE,
        strict=False,
        description="use, refresh (translate and cache again) or off. If given, the answer has `source` for each text.",
    )
    alternatives: int = Field(
        0, ge=0, le=8, description="Number of other translations of each text, the most likely one first."
    )
    scores: bool = Field(
        False,
        description="Add `score` and `confidence` to each text: mean log-probabilities per token of the translation "
        "after the text, and of the text after the translation. The ten lowest confidences, at most a third, have "
        "`review`.",
    )
    stream: bool = Field(
        False,
        description="Send each text as an event when it is complete, with its `index`. `[DONE]` ends the stream.",
    )
    placeholders: list[Any] | dict[str, Any] | str | None = Field(
        None, description="Accepted and ignored. Placeholders in texts are kept."
    )
    timeout_s: float | None = Field(
        None, gt=0, le=86400, description="Time limit in seconds. After it the answer is 504."
    )


@ROUTES.add(
    "POST",
    LABEL,
    "Translate many texts.",
    is_generation=True,
    allows_any_origin=True,
    answer=Translations,
    events=(StreamedTranslation,),
    errors=(ErrorKind.TIMEOUT,),
    example=EXAMPLE,
)
async def batch_translate(context: Context, body: TranslateBody) -> HandlerResponse:
    """Translate every text, in order. White space, placeholders and tags are kept.

    `warnings` names texts whose translation is suspicious: it was sampled twice. It also names texts that were split
    around their placeholders, because the model did not keep them.
    """
    report_unknown_languages(
        {"source_lang": body.source_lang, "target_lang": body.target_lang}, context.config.strict_fields
    )
    read = "\n".join(filter(None, (body.title.strip(), body.context)))
    has_context = bool(read.strip() or body.document)
    if body.context_mode is ContextMode.NONE and has_context:
        given = "title" if body.title else "context" if body.context else "document"
        raise invalid("context_mode", f"is none, but {given} is given; leave one of them out", "none")
    is_own_page = body.context_mode is ContextMode.PAGE and not has_context
    request = TranslationRequest(
        texts=body.text_list,
        source=body.source_lang,
        target=body.target_lang,
        split=body.split,
        markers=MarkerOptions(body.format, tuple(body.do_not_translate)),
        mode=body.context_mode or ContextMode.PAGE,
        context=page_context(body.text_list) if is_own_page else read,
        document=body.document,
        cache=body.cache,
        glossary=Glossary(body.glossary),
        glossary_mode=body.glossary_mode,
        style=style_lines(body.instruction, body.formality, body.audience),
    )
    ids = [body.glossary_id] if body.glossary_id else []
    request = await named_glossaries(context, ids, request, body.glossary_version)
    limit, rows = context.config.max_contents, (1 + body.alternatives) * len(body.text_list)
    if body.alternatives and rows > limit:
        message = f"make {rows} translations, the limit is {limit} (--max-contents); send fewer texts or alternatives"
        raise invalid("alternatives", message, body.alternatives)
    if kept := [term for term in body.glossary if term in body.do_not_translate]:
        names = ", ".join(map(repr, kept))
        warn("glossary", f"glossary: {names}: in do_not_translate too, stays as in the text", is_ignored=False)
    if body.stream:
        return await _streamed(context, body, request)
    translations = await translate(context, request, body, LABEL, "text_list", uses_memory=body.memory)
    entries = [_entry(body, one) for one in translations]
    if body.scores:
        await _add_scores(context, body, entries)
    if body.alternatives:
        await _add_alternatives(context, body, request, entries)
    return json_response({"translations": entries})


def _entry(body: TranslateBody, translation: Translation) -> dict[str, Any]:
    entry: dict[str, Any] = {"detected_source_lang": translation.source, "text": translation.text}
    if body.source_lang.lower() == AUTO:
        entry["detected_confidence"] = round(translation.source_probability, 3)
    shows_origin = body.memory or "cache" in body.model_fields_set
    return entry | {"source": translation.origin} if shows_origin else entry


async def _streamed(context: Context, body: TranslateBody, request: TranslationRequest) -> HandlerResponse:
    """Send the translations as events. Each has the warnings since the one before."""
    if given := [name for name in ("scores", "alternatives") if getattr(body, name)]:
        raise invalid("stream", f"cannot be combined with {' and '.join(given)}; leave one out", True)

    async def work(send: Callable[[Any], None]) -> None:
        sent = 0

        def with_new_warnings(event: dict[str, Any]) -> dict[str, Any]:
            nonlocal sent
            new = current_request().warnings[sent:]
            sent += len(new)
            return event | {"warnings": new} if new else event

        def on_text(index: int, one: Translation) -> None:
            send(with_new_warnings({"index": index} | _entry(body, one)))

        await translate(context, request, body, LABEL, "text_list", uses_memory=body.memory, on_text=on_text)
        if last := with_new_warnings({}):
            send(last)

    return await stream_events(work, NATIVE_ERRORS)


async def _mean_logprobs(context: Context, body: TranslateBody, scored: Sequence[Scored]) -> list[float]:
    """Return each text's mean log-probability per token. Raises ServiceError."""
    if not scored:
        return []
    origin = requested_origin(body, context.config)
    characters = sum(len(text) for one in scored for text in one)
    rows = await offload_if_large(characters, _scored_rows, context, scored, origin)
    results = await finished_rows(context, make_job(rows, body, LABEL), OutputDecoder(len(rows)))
    values = [result.scores("translation") for result in results]
    return [round(sum(one) / max(len(one), 1), _SCORE_DECIMALS) for one in values]


def _scored_rows(context: Context, scored: Sequence[Scored], origin: tuple[str, str]) -> list[GenerateRequest]:
    texts = (("text_list", text) for one in scored for text in one)
    ids = encode_all(context.tokenizer, texts, context.config)
    rows = []
    for prompt, text in zip(ids, ids, strict=True):
        row = greedy_row([*prompt, *text], 0, (), *origin)
        rows.append(msgspec.structs.replace(row, prompt_logprobs=PromptLogprobs(start=len(prompt))))
    return rows


def _scored(context: Context, source: str, target: str, text: str, translation: str) -> Scored:
    form, query = prompt_form(context.config.translation_prompt), Query(source, target, text)
    prompt = shared_prompt(query, form) + translation_prompt(query, form)
    return prompt, translation.strip() if prompt[-1].isspace() else f" {translation.strip()}"


async def _add_scores(context: Context, body: TranslateBody, entries: list[dict[str, Any]]) -> None:
    pairs = list(zip(body.text_list, entries, strict=True))
    target = body.target_lang
    forward = [_scored(context, one["detected_source_lang"], target, text, one["text"]) for text, one in pairs]
    reverse = [_scored(context, target, one["detected_source_lang"], one["text"], text) for text, one in pairs]
    found = await _mean_logprobs(context, body, [*forward, *reverse])
    for entry, score, confidence in zip(entries, found, found[len(entries) :], strict=False):
        entry |= {"score": score, "confidence": confidence}
    for index in least_certain(entry["confidence"] for entry in entries):
        entries[index]["review"] = True


async def _add_alternatives(
    context: Context, body: TranslateBody, request: TranslationRequest, entries: list[dict[str, Any]]
) -> None:
    """Add the texts of other samples to each entry."""
    known = [entry["text"] for entry in entries]
    others = await other_translations(context, request, body, LABEL, "text_list", body.alternatives, known)
    scored = [
        _scored(context, entry["detected_source_lang"], body.target_lang, text, other)
        for text, entry, found in zip(body.text_list, entries, others, strict=True)
        for other in found
    ]
    scores = iter(await _mean_logprobs(context, body, scored))
    for entry, found in zip(entries, others, strict=True):
        alternatives = [{"text": other, "score": next(scores)} for other in found]
        entry["alternatives"] = sorted(alternatives, key=lambda one: -one["score"])
    if few := sum(len(found) < body.alternatives for found in others):
        message = f"alternatives: {few} of {len(others)} texts have fewer, because other samples were equal or wrong"
        warn("alternatives", message, is_ignored=False)
