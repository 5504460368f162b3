"""`POST /translate/v1/batch-translate`: immersive-translate's custom API, many short texts at once.

A text is translated paragraph by paragraph, since a blank line ends an answer; the white space around and
between paragraphs is kept as it is.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from routes.context import Context
from routes.request import languages, prompts
from routes.request.bodies import AUTO, TranslateBody
from routes.request.generate_requests import encode_all, greedy_row, offload_if_large
from routes.request.jobs import make_job
from routes.response.generate import RowResult, run_full
from routes.response.http_response import NATIVE_ERRORS, HandlerResponse, json_response
from routes.response.output_decoder import OutputDecoder
from routes.response.response_models import Translations
from routes.route import Route
from rwkv_batch.errors import ErrorKind, ServiceError, invalid
from rwkv_batch.request import FinishReason, GenerateRequest

LABEL = "/translate/v1/batch-translate"
CACHE_KEY = "translations"
_BLANK_LINES = re.compile(r"\n\s*\n\s*")
"""It begins at a newline and takes what white space is left, so no letter is looked at more than three times."""
_LABELS = ("User", "Assistant", "System", "Traditional Chinese", *languages.NAMES.values())
_NEXT_LABEL = re.compile(rf"\n(?:{'|'.join(map(re.escape, _LABELS))}):")
"""What a model goes on with behind a translation. Any word with a colon would cut lines like `Name: …` off a text."""
_TOKENS_PER_PROMPT_TOKEN = 4
_MIN_TOKENS = 64
_MAX_CACHED_CHARACTERS = 4000

ParagraphKey = tuple[str, str, str]
"""Source language, target language, paragraph."""


class TranslationCache:
    """The most recently used translations. Any thread may ask."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._texts: OrderedDict[ParagraphKey, str] = OrderedDict()

    def get(self, key: ParagraphKey) -> str | None:
        """The translation, if it is remembered."""
        with self._lock:
            if key not in self._texts:
                return None
            self._texts.move_to_end(key)
            return self._texts[key]

    def put(self, key: ParagraphKey, text: str) -> None:
        """Remember a translation; long texts are not."""
        if len(key[2]) + len(text) > _MAX_CACHED_CHARACTERS:
            return
        with self._lock:
            self._texts[key] = text
            while len(self._texts) > self._size:
                self._texts.popitem(last=False)


@dataclass(slots=True)
class TranslationPlan:
    """A request taken apart: what has to be computed, and how the answers are put together."""

    sources: list[str] = field(default_factory=list)
    """Language code of each text."""
    pieces: list[list[ParagraphKey | str]] = field(default_factory=list)
    """Of each text: paragraphs to translate (Key) between white space to keep (str)."""
    known: dict[ParagraphKey, str] = field(default_factory=dict)
    missing: list[ParagraphKey] = field(default_factory=list)
    """Paragraphs without a translation yet, each once."""

    def response_body(self) -> dict[str, object]:
        """The answer's body."""
        texts = [
            "".join(piece if isinstance(piece, str) else self.known[piece] for piece in text) for text in self.pieces
        ]
        return {
            "translations": [
                {"detected_source_lang": source, "text": text} for source, text in zip(self.sources, texts, strict=True)
            ]
        }


def make_plan(body: TranslateBody, cache: TranslationCache, limit: int) -> TranslationPlan:
    """Take a request apart. Equal paragraphs are computed once. Raises ServiceError if there are too many."""
    if (count := count_paragraphs(body.text_list)) > limit:
        raise invalid("text_list", f"has {count} paragraphs in all, the limit is {limit} (--max-contents)", count)
    request_plan = TranslationPlan()
    is_auto = body.source_lang.lower() == AUTO
    sources = languages.detect(body.text_list) if is_auto else [body.source_lang] * len(body.text_list)
    for source, text in zip(sources, body.text_list, strict=True):
        request_plan.sources.append(source or AUTO)
        is_copied = not source or languages.name_of(source) == languages.name_of(body.target_lang)
        request_plan.pieces.append([text] if is_copied else _pieces(source, body.target_lang, text))
        for piece in request_plan.pieces[-1]:
            if isinstance(piece, str) or piece in request_plan.known:
                continue
            request_plan.known[piece] = cache.get(piece) or ""
            if not request_plan.known[piece]:
                request_plan.missing.append(piece)
    return request_plan


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
    """How many paragraphs there are to translate; none is made."""
    bodies = (text.strip() for text in texts)
    return sum(1 + sum(1 for _ in _BLANK_LINES.finditer(body)) for body in bodies if body)


def _rows(context: Context, keys: list[ParagraphKey], body: TranslateBody) -> list[GenerateRequest]:
    rows = []
    language_names = [(languages.name_of(source), languages.name_of(target)) for source, target, _ in keys]
    texts = (
        ("text_list", prompts.translation(*labels, key[2])) for labels, key in zip(language_names, keys, strict=True)
    )
    for labels, prompt in zip(language_names, encode_all(context.tokenizer, texts, context.config), strict=True):
        stops = ["\n\n", *(f"\n{label}:" for label in labels)]
        max_tokens = min(_MIN_TOKENS + _TOKENS_PER_PROMPT_TOKEN * len(prompt), context.config.max_tokens_limit)
        rows.append(greedy_row(prompt, max_tokens, stops, body.state, body.adapter))
    return rows


def clean_answer(text: str) -> str:
    """The answer up to a new label, without the white space around it."""
    return _NEXT_LABEL.split(text, maxsplit=1)[0].strip()


async def batch_translate(context: Context, body: TranslateBody) -> HandlerResponse:
    """Translate every text; order and length are kept, texts of white space alone come back as they are."""
    limit, given = context.config.max_contents, len(body.text_list)
    if given > limit:
        raise invalid("text_list", f"has {given} texts, the limit is {limit} (--max-contents)", given)
    # What a tuned state or an adapter says is not remembered: another one may bear its name tomorrow.
    is_cacheable = not (body.state or body.adapter)
    cache: TranslationCache = context.shared[CACHE_KEY] if is_cacheable else TranslationCache(0)
    characters = sum(map(len, body.text_list))
    if body.source_lang.lower() == AUTO:  # it takes its time for every text, however short, and most for the first
        request_plan = await asyncio.to_thread(make_plan, body, cache, limit)
    else:
        request_plan = await offload_if_large(characters, make_plan, body, cache, limit)
    if not request_plan.missing:
        return json_response(request_plan.response_body())
    rows = await offload_if_large(characters, _rows, context, request_plan.missing, body)
    job = make_job(rows, body, LABEL)

    def full_body(results: list[RowResult]) -> object:
        for key, row in zip(request_plan.missing, results, strict=True):
            if row.finish is None or row.finish.reason in (
                FinishReason.TIMEOUT,
                FinishReason.CANCELLED,
                FinishReason.ERROR,
            ):
                raise ServiceError(ErrorKind.TIMEOUT, "a translation did not end in time; send fewer texts at once")
            request_plan.known[key] = clean_answer(row.text)
            cache.put(key, request_plan.known[key])
        return request_plan.response_body()

    return await run_full(context, job, OutputDecoder(len(rows)), full_body, NATIVE_ERRORS)


EXAMPLE = {"source_lang": "en", "target_lang": "zh-CN", "text_list": ["Hello world!", "Good morning"]}
ROUTES = (
    Route(
        "POST",
        LABEL,
        batch_translate,
        TranslateBody,
        "Translate many texts, greedily.",
        is_generation=True,
        answer=Translations,
        errors=(ErrorKind.TIMEOUT,),
        example=EXAMPLE,
    ),
)
