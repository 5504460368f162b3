"""`POST /translate/v1/batch-translate`: immersive-translate's custom API, for many short texts.

Each paragraph is translated on its own, because a blank line ends an answer. White space around and between paragraphs
is kept. Language detection is offline.
"""

from __future__ import annotations

import asyncio
import functools
import math
import re
import threading
from bisect import bisect_right
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from py3langid.langid import MODEL_FILE, LanguageIdentifier
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from routes.context import Context
from routes.request import prompts
from routes.request.bodies import PriorityFields, StateFields, Texts
from routes.request.fields import FixedSamplingFields
from routes.request.jobs import encode_all, greedy_row, make_job, offload_if_large
from routes.request.tenants import cache_tenant
from routes.response.generate import OutputDecoder, RowResult, run_full
from routes.response.http_response import NATIVE_ERRORS, HandlerResponse, json_response
from routes.response.response_models import Translations
from routes.route import Route
from rwkv_batch.errors import ErrorKind, ServiceError, invalid
from rwkv_batch.request import FinishReason, GenerateRequest

LANGUAGE_NAMES = {
    "af": "Afrikaans", "am": "Amharic", "ar": "Arabic", "as": "Assamese", "az": "Azerbaijani", "ba": "Bashkir",
    "be": "Belarusian", "bg": "Bulgarian", "bn": "Bengali", "bo": "Tibetan", "br": "Breton", "bs": "Bosnian",
    "ca": "Catalan", "ceb": "Cebuano", "co": "Corsican", "cs": "Czech", "cv": "Chuvash", "cy": "Welsh",
    "da": "Danish", "de": "German", "dv": "Dhivehi", "el": "Greek", "en": "English", "eo": "Esperanto",
    "es": "Spanish", "et": "Estonian", "eu": "Basque", "fa": "Persian", "fi": "Finnish", "fil": "Filipino",
    "fj": "Fijian", "fo": "Faroese", "fr": "French", "fy": "Western Frisian", "ga": "Irish", "gd": "Scottish Gaelic",
    "gl": "Galician", "gn": "Guarani", "gu": "Gujarati", "ha": "Hausa", "haw": "Hawaiian", "he": "Hebrew",
    "hi": "Hindi", "hmn": "Hmong", "hr": "Croatian", "ht": "Haitian Creole", "hu": "Hungarian", "hy": "Armenian",
    "id": "Indonesian", "ig": "Igbo", "ilo": "Ilocano", "is": "Icelandic", "it": "Italian", "iu": "Inuktitut",
    "ja": "Japanese", "jv": "Javanese", "ka": "Georgian", "kk": "Kazakh", "km": "Khmer", "kn": "Kannada",
    "ko": "Korean", "ku": "Kurdish", "ky": "Kyrgyz", "la": "Latin", "lb": "Luxembourgish", "ln": "Lingala",
    "lo": "Lao", "lt": "Lithuanian", "lv": "Latvian", "mg": "Malagasy", "mi": "Maori", "mk": "Macedonian",
    "ml": "Malayalam", "mn": "Mongolian", "mr": "Marathi", "ms": "Malay", "mt": "Maltese", "my": "Burmese",
    "ne": "Nepali", "nl": "Dutch", "no": "Norwegian", "ny": "Chichewa", "oc": "Occitan", "om": "Oromo",
    "or": "Odia", "pa": "Punjabi", "pl": "Polish", "ps": "Pashto", "pt": "Portuguese", "qu": "Quechua",
    "ro": "Romanian", "ru": "Russian", "rw": "Kinyarwanda", "sa": "Sanskrit", "sd": "Sindhi", "si": "Sinhala",
    "sk": "Slovak", "sl": "Slovenian", "sm": "Samoan", "sn": "Shona", "so": "Somali", "sq": "Albanian",
    "sr": "Serbian", "st": "Southern Sotho", "su": "Sundanese", "sv": "Swedish", "sw": "Swahili", "ta": "Tamil",
    "te": "Telugu", "tg": "Tajik", "th": "Thai", "ti": "Tigrinya", "tk": "Turkmen", "tl": "Tagalog",
    "tn": "Tswana", "to": "Tongan", "tr": "Turkish", "tt": "Tatar", "tw": "Twi", "ty": "Tahitian",
    "ug": "Uyghur", "uk": "Ukrainian", "ur": "Urdu", "uz": "Uzbek", "vi": "Vietnamese", "wo": "Wolof",
    "xh": "Xhosa", "yi": "Yiddish", "yo": "Yoruba", "yue": "Cantonese", "zh": "Chinese", "zu": "Zulu",
}  # fmt: skip
_ALIASES = {"iw": "he", "in": "id", "ji": "yi", "jw": "jv", "nb": "no", "nn": "no", "cmn": "zh", "mo": "ro", "sh": "sr"}
_TRADITIONAL = ("hant", "tw", "hk", "mo")
_SAMPLE_CHARACTERS = 4000
_DETECTED = (
    "ar bg bn ca cs da de el en es fa fi fr he hi hr hu id it ja ko ms nl no pl pt ro ru sk sr sv th tr uk ur vi zh"
).split()
"""Candidates of detection. More languages make the detection of short English texts worse."""
_CYRILLIC, _ARABIC, _HAN = ("bg", "ru", "sr", "uk"), ("ar", "fa", "ur"), ("zh", "ja")
_LATIN = tuple(
    code for code in _DETECTED if code not in {"bg", "ru", "uk", "bn", "el", "he", "hi", "ko", "th", *_ARABIC, *_HAN}
)
_BLOCKS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (0x0000, _LATIN), (0x0370, ("el",)), (0x0400, _CYRILLIC), (0x0530, ("hy",)), (0x0590, ("he",)), (0x0600, _ARABIC),
    (0x0780, ("dv",)), (0x07C0, _ARABIC), (0x0900, ("hi",)), (0x0980, ("bn",)), (0x0A00, ("pa",)), (0x0A80, ("gu",)),
    (0x0B00, ("or",)), (0x0B80, ("ta",)), (0x0C00, ("te",)), (0x0C80, ("kn",)), (0x0D00, ("ml",)), (0x0D80, ("si",)),
    (0x0E00, ("th",)), (0x0E80, ("lo",)), (0x0F00, ("bo",)), (0x1000, ("my",)), (0x10A0, ("ka",)), (0x1100, ("ko",)),
    (0x1200, ("am",)), (0x13A0, _LATIN), (0x1780, ("km",)), (0x1800, ("mn",)), (0x18B0, _LATIN), (0x1F00, ("el",)),
    (0x2000, _LATIN), (0x3005, _HAN), (0x3130, ("ko",)), (0x3190, _HAN), (0xA000, _LATIN), (0xAC00, ("ko",)),
    (0xF900, _HAN), (0xFB00, _LATIN), (0xFB1D, ("he",)), (0xFB50, _ARABIC), (0xFF00, _LATIN), (0xFF66, _HAN),
    (0xFFA0, _LATIN), (0x20000, _HAN),
)  # fmt: skip
"""(first code point, languages of the letters from there on), limited to detectable languages."""
_BLOCK_STARTS = [start for start, _ in _BLOCKS]
_KANA = re.compile("[\u3040-\u30ff]")
_LETTER = re.compile(r"[^\W\d_]")
_NOT_PROSE = re.compile(r"</?[A-Za-z][^<>]*>|\{[^{}]*\}|https?://\S+")
"""Tags, translators' placeholders and addresses. They have no language."""
_NO_EVIDENCE = -1e9
"""Floor of the log-likelihoods. The identifier's own is close to the limits of a float, so sums would overflow."""
_LETTERS_OF_A_WORD = 3
"""Weight of a non-Latin letter in Latin letters, for texts with both."""
_ENGLISH_ADVANTAGE = 6.0
"""Added to the log-likelihood of English. A word of several languages is most often English."""
_MAX_PAGE_ADVANTAGE = 8.0
"""Most that the other texts' language adds to a text's log-likelihood.

With a lower value, labels are assigned to other languages that share the word. With a higher one, short texts in
another language are missed.
"""


def language_name(code: str) -> str:
    """Return the English name of a language. An unknown code is returned unchanged."""
    base, _, rest = code.replace("_", "-").partition("-")
    base = _ALIASES.get(base.lower(), base.lower())
    if base == "zh" and any(part in _TRADITIONAL for part in rest.lower().split("-")):
        return "Traditional Chinese"
    return LANGUAGE_NAMES.get(base, code)


def detect_languages(texts: Sequence[str]) -> list[str]:
    """Return each text's ISO code: zh-CN or zh-TW for Chinese, "" without letters.

    The texts are assumed to be of one page: a short text that fits several languages gets the language of the others.
    Only the first 4,000 characters of a text count.
    """
    samples = [_NOT_PROSE.sub(" ", text.lstrip()[:_SAMPLE_CHARACTERS]).strip() for text in texts]
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for index, sample in enumerate(samples):
        groups[_candidates(sample)].append(index)
    found = [""] * len(samples)
    for candidates, indices in groups.items():
        for index, code in zip(indices, _classify([samples[index] for index in indices], candidates), strict=True):
            found[index] = "ja" if _KANA.search(samples[index]) else code
    chinese = [index for index, code in enumerate(found) if code == "zh"]
    for index, code in zip(chinese, _chinese_variants([samples[index] for index in chinese]), strict=True):
        found[index] = code
    return found


def _candidates(sample: str) -> tuple[str, ...]:
    """Return the languages of the script of most letters. Empty without letters."""
    weights: dict[tuple[str, ...], int] = defaultdict(int)
    for letter, count in Counter(_LETTER.findall(sample)).items():
        codes = _BLOCKS[bisect_right(_BLOCK_STARTS, ord(letter)) - 1][1]
        weights[codes] += count * (1 if codes is _LATIN else _LETTERS_OF_A_WORD)
    return max(weights, key=weights.__getitem__, default=())


def _classify(samples: list[str], candidates: tuple[str, ...]) -> list[str]:
    """Return each sample's most likely candidate, given that the samples share a page."""
    if len(candidates) < 2:
        return ["".join(candidates)] * len(samples)
    own_scores = [_log_likelihoods(sample, candidates) for sample in samples]
    page_scores = {code: math.fsum(scores[code] for scores in own_scores) for code in candidates}
    if "en" in page_scores:
        page_scores["en"] += _ENGLISH_ADVANTAGE
    highest = max(page_scores.values())
    shared = {code: max(-_MAX_PAGE_ADVANTAGE, score - highest) for code, score in page_scores.items()}
    return [max(candidates, key=lambda code: scores[code] + shared[code]) for scores in own_scores]


def _log_likelihoods(sample: str, candidates: tuple[str, ...]) -> dict[str, float]:
    scores = dict(_identifier().rank(f" {sample} "))  # the spaces mark word borders
    return {code: max(float(scores[code]), _NO_EVIDENCE) for code in candidates}


def _chinese_variants(samples: list[str]) -> list[str]:
    """Return zh-TW for each text with more traditional than simplified forms, else zh-CN.

    A text without either kind follows the other texts.
    """
    own_scores = [
        _letters_only_in(text, "big5", "gb2312") - _letters_only_in(text, "gb2312", "big5") for text in samples
    ]
    page_scores = sum(own_scores)
    return ["zh-TW" if (mine or page_scores) > 0 else "zh-CN" for mine in own_scores]


@functools.cache
def _identifier() -> LanguageIdentifier:
    """Load the identifier at first use. It takes about 1 s and 84 MB."""
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE)
    identifier.set_languages(_DETECTED)
    return identifier


def _letters_only_in(text: str, charset: str, other: str) -> int:
    """Count the letters that `charset` has and `other` lacks."""
    return sum(_encodes(letter, charset) and not _encodes(letter, other) for letter in text)


def _encodes(letter: str, charset: str) -> bool:
    try:
        letter.encode(charset)
    except UnicodeEncodeError:
        return False
    return True


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
"""A language code or name. The prompt uses the English name of a known code, and any other text unchanged."""


class TranslateBody(FixedSamplingFields, PriorityFields, StateFields):
    """Body of a translation request, in the format of immersive-translate's custom API."""

    source_lang: Language = Field(
        AUTO,
        description="ISO code or auto. auto detects the language of each text. A short, ambiguous text takes the "
        "language of the other texts. A text without letters is copied. An unknown code is used unchanged.",
    )
    target_lang: Annotated[Language, AfterValidator(_not_auto)] = Field(
        description="ISO code. An unknown code, like Klingon, is used unchanged."
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
        """Return the cached translation, or None."""
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


def _rows(context: Context, keys: list[ParagraphKey], body: TranslateBody) -> list[GenerateRequest]:
    rows = []
    language_names = [(language_name(source), language_name(target)) for source, target, _ in keys]
    texts = (
        ("text_list", prompts.translation(*labels, key[2])) for labels, key in zip(language_names, keys, strict=True)
    )
    for labels, prompt in zip(language_names, encode_all(context.tokenizer, texts, context.config), strict=True):
        stops = ["\n\n", *(f"\n{label}:" for label in labels)]
        max_tokens = min(_MIN_TOKENS + _TOKENS_PER_PROMPT_TOKEN * len(prompt), context.config.max_tokens_limit)
        rows.append(greedy_row(prompt, max_tokens, stops, body.state, body.adapter))
    return rows


def clean_answer(text: str) -> str:
    """Return the answer up to the next label, without surrounding white space."""
    return _NEXT_LABEL.split(text, maxsplit=1)[0].strip()


async def batch_translate(context: Context, body: TranslateBody) -> HandlerResponse:
    """Translate every text, in order. Texts of only white space are returned unchanged."""
    limit, given = context.config.max_contents, len(body.text_list)
    if given > limit:
        raise invalid(
            "text_list", f"has {given} texts, the limit is {limit} (--max-contents); send several requests", given
        )
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
