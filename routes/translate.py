"""`POST /translate/v1/batch-translate`: immersive-translate's custom API, for many short texts.

Each paragraph is translated on its own, because a blank line ends an answer. White space around and between paragraphs
is kept. Language detection is offline.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from routes.context import Context
from routes.request.bodies import PriorityFields, StateFields, Texts
from routes.request.fields import FixedSamplingFields
from routes.request.ignored import nearest_name, report_unknown
from routes.request.jobs import encode_all, greedy_row, make_job, offload_if_large
from routes.request.languages import LANGUAGE_NAMES, detect_languages, is_known_language, language_name
from routes.request.prompts import format_turn
from routes.request_context import cache_tenant
from routes.response.event_stream import OutputDecoder
from routes.response.generate import RowResult, run_full
from routes.response.http_response import NATIVE_ERRORS, HandlerResponse, json_response
from routes.response.response_models import Translations
from routes.route import Route
from rwkv_batch.errors import ErrorKind, ServiceError, invalid
from rwkv_batch.request import FinishReason, GenerateRequest

LABEL = "/translate/v1/batch-translate"
CACHE_KEY = "translations"
_BLANK_LINES = re.compile(r"\n\s*\n\s*")
"""The match takes all white space after a newline, so each character is scanned at most three times."""
_LABELS = ("User", "Assistant", "System", "Traditional Chinese", *LANGUAGE_NAMES.values())
_NEXT_LABEL = re.compile(rf"\n(?:{'|'.join(map(re.escape, _LABELS))}):")
"""Labels that a model may write after a translation. Any word with a colon would cut text lines like `Name: …`."""
_TOKENS_PER_PROMPT_TOKEN = 4
_MIN_TOKENS = 64
_MAX_CACHED_CHARACTERS = 4000

ParagraphKey = tuple[str, str, str]
"""Source language, target language, paragraph."""


def _one_line(name: str) -> str:
    if not name.strip() or name.splitlines() != [name]:
        raise PydanticCustomError("language", "must be one line with a language's code or name, like zh-TW or Klingon")
    return name


def _not_auto(name: str) -> str:
    if name.lower() == AUTO:
        raise PydanticCustomError("language", "must be the language to translate into; only source_lang may be auto")
    return name


AUTO = "auto"
"""Source language that stands for language detection."""
Language = Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_one_line)]
"""A language code or name. The prompt uses the English name of a known language, and any other text unchanged."""


class TranslateBody(FixedSamplingFields, PriorityFields, StateFields):
    """Body of a translation request, in the format of immersive-translate's custom API."""

    source_lang: Language = Field(
        AUTO,
        description="ISO code or auto. auto detects the language of each text. A short, ambiguous text takes the "
        "language of the other texts. A text without letters is copied. An unknown language is used unchanged.",
    )
    target_lang: Annotated[Language, AfterValidator(_not_auto)] = Field(
        description="ISO code or English name. An unknown language, like Klingon, is used unchanged, with a warning."
    )
    text_list: Texts = Field(description="The texts to translate. Order and length are kept.")
    placeholders: list[Any] | dict[str, Any] | str | None = Field(
        None, description="Accepted and ignored. Placeholders in texts are kept."
    )
    timeout_s: float | None = Field(
        None, gt=0, le=86400, description="Time limit in seconds. After it the answer is 504."
    )


class TranslationCache:
    """The most recently used translations, separately for each tenant (`cache_tenant`). Thread-safe."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._texts: OrderedDict[tuple[str, ParagraphKey], str] = OrderedDict()

    def get(self, tenant: str, paragraph: ParagraphKey) -> str | None:
        key = (tenant, paragraph)
        with self._lock:
            if key not in self._texts:
                return None
            self._texts.move_to_end(key)
            return self._texts[key]

    def put(self, tenant: str, paragraph: ParagraphKey, text: str) -> None:
        """Cache a translation, unless it is too long."""
        if len(paragraph[2]) + len(text) > _MAX_CACHED_CHARACTERS:
            return
        with self._lock:
            self._texts[tenant, paragraph] = text
            while len(self._texts) > self._size:
                self._texts.popitem(last=False)


@dataclass(slots=True)
class TranslationPlan:
    """A request split into paragraphs, with their translations."""

    sources: list[str] = field(default_factory=list)
    """Language code of each text."""
    pieces: list[list[ParagraphKey | str]] = field(default_factory=list)
    """Per text: paragraphs to translate (Key) and white space to keep (str)."""
    known: dict[ParagraphKey, str] = field(default_factory=dict)
    missing: list[ParagraphKey] = field(default_factory=list)
    """Paragraphs without a translation, without duplicates."""

    def response_body(self) -> dict[str, object]:
        texts = [
            "".join(piece if isinstance(piece, str) else self.known[piece] for piece in text) for text in self.pieces
        ]
        return {
            "translations": [
                {"detected_source_lang": source, "text": text} for source, text in zip(self.sources, texts, strict=True)
            ]
        }


def make_plan(body: TranslateBody, cache: TranslationCache, limit: int, tenant: str = "") -> TranslationPlan:
    """Split a request into paragraphs. Raises ServiceError if there are too many.

    Equal paragraphs are translated once.
    """
    if (count := count_paragraphs(body.text_list)) > limit:
        raise invalid(
            "text_list",
            f"has {count} paragraphs in total, the limit is {limit} (--max-contents); send several requests",
            count,
        )
    plan = TranslationPlan()
    is_auto = body.source_lang.lower() == AUTO
    sources = detect_languages(body.text_list) if is_auto else [body.source_lang] * len(body.text_list)
    for source, text in zip(sources, body.text_list, strict=True):
        plan.sources.append(source or AUTO)
        is_copied = not source or language_name(source) == language_name(body.target_lang)
        plan.pieces.append([text] if is_copied else _pieces(source, body.target_lang, text))
        for piece in plan.pieces[-1]:
            if isinstance(piece, str) or piece in plan.known:
                continue
            plan.known[piece] = cache.get(tenant, piece) or ""
            if not plan.known[piece]:
                plan.missing.append(piece)
    return plan


def _pieces(source: str, target: str, text: str) -> list[ParagraphKey | str]:
    pieces: list[ParagraphKey | str] = []
    at = 0
    for end, begin in (*((gap.start(), gap.end()) for gap in _BLANK_LINES.finditer(text)), (len(text), len(text))):
        part = text[at:end]
        body = part.strip()
        start = part.index(body)
        pieces += [part[:start], (source, target, body)] if body else []
        pieces.append(part[start + len(body) :] + text[end:begin])
        at = begin
    return pieces


def count_paragraphs(texts: Iterable[str]) -> int:
    """Count the paragraphs to translate without creating them."""
    bodies = (text.strip() for text in texts)
    return sum(1 + sum(1 for _ in _BLANK_LINES.finditer(body)) for body in bodies if body)


def translation_prompt(source: str, target: str, text: str) -> str:
    """Return `English: …\\n\\nChinese:`, with English language names."""
    return f"{source}: {format_turn(text)}\n\n{target}:"


def _rows(context: Context, keys: list[ParagraphKey], body: TranslateBody) -> list[GenerateRequest]:
    rows = []
    language_names = [(language_name(source), language_name(target)) for source, target, _ in keys]
    texts = (
        ("text_list", translation_prompt(*labels, key[2])) for labels, key in zip(language_names, keys, strict=True)
    )
    for labels, prompt in zip(language_names, encode_all(context.tokenizer, texts, context.config), strict=True):
        stops = ["\n\n", *(f"\n{label}:" for label in labels)]
        max_tokens = min(_MIN_TOKENS + _TOKENS_PER_PROMPT_TOKEN * len(prompt), context.config.max_tokens_limit)
        rows.append(greedy_row(prompt, max_tokens, stops, body.state, body.adapter))
    return rows


def clean_answer(text: str) -> str:
    """Return the answer up to the next label, without surrounding white space."""
    return _NEXT_LABEL.split(text, maxsplit=1)[0].strip()


def _report_unknown_languages(body: TranslateBody, is_strict: bool) -> None:
    """Add a warning for each unknown language. Raises ServiceError if `is_strict`."""
    for name, language in (("source_lang", body.source_lang), ("target_lang", body.target_lang)):
        if language.lower() != AUTO and not is_known_language(language):
            near = nearest_name(language, [*LANGUAGE_NAMES, *LANGUAGE_NAMES.values()])
            problem = f"unknown language {language!r}; use an ISO code or an English name{near}"
            report_unknown(name, problem, "the prompt has it unchanged", language, is_strict=is_strict)


async def batch_translate(context: Context, body: TranslateBody) -> HandlerResponse:
    """Translate every text, in order. Texts of only white space are returned unchanged."""
    limit, given = context.config.max_contents, len(body.text_list)
    if given > limit:
        raise invalid(
            "text_list", f"has {given} texts, the limit is {limit} (--max-contents); send several requests", given
        )
    _report_unknown_languages(body, context.config.strict_fields)
    # Translations with a tuned state or an adapter are not cached, because the name may later mean another one.
    is_cacheable = not (body.state or body.adapter)
    cache: TranslationCache = context.shared[CACHE_KEY] if is_cacheable else TranslationCache(0)
    characters, tenant = sum(map(len, body.text_list)), cache_tenant(context.config)
    if body.source_lang.lower() == AUTO:  # detection is slow even for short texts, and slowest at its first use
        plan = await asyncio.to_thread(make_plan, body, cache, limit, tenant)
    else:
        plan = await offload_if_large(characters, make_plan, body, cache, limit, tenant)
    if not plan.missing:
        return json_response(plan.response_body())
    rows = await offload_if_large(characters, _rows, context, plan.missing, body)
    job = make_job(rows, body, LABEL)

    def full_body(results: list[RowResult]) -> object:
        for key, row in zip(plan.missing, results, strict=True):
            if row.finish is None or row.finish.reason in (
                FinishReason.TIMEOUT,
                FinishReason.CANCELLED,
                FinishReason.ERROR,
            ):
                raise ServiceError(
                    ErrorKind.TIMEOUT,
                    "a translation did not end in time; send fewer texts per request, or raise timeout_s",
                )
            plan.known[key] = clean_answer(row.text)
            cache.put(tenant, key, plan.known[key])
        return plan.response_body()

    return await run_full(context, job, OutputDecoder(len(rows)), full_body, NATIVE_ERRORS)


EXAMPLE = {"source_lang": "en", "target_lang": "zh-CN", "text_list": ["Hello world!", "Good morning"]}
ROUTES = (
    Route(
        "POST",
        LABEL,
        batch_translate,
        TranslateBody,
        "Translate many texts with greedy sampling.",
        is_generation=True,
        allows_any_origin=True,
        answer=Translations,
        errors=(ErrorKind.TIMEOUT,),
        example=EXAMPLE,
    ),
)
