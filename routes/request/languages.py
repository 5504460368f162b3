"""Languages by ISO code with their English names, and offline detection of a text's language."""

from __future__ import annotations

import functools
import math
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence

from py3langid.langid import MODEL_FILE, LanguageIdentifier

NAMES = {
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
"""The candidates of detection: with rare languages among them short English texts are taken for those."""
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
"""Code points from which on letters are of these languages, as far as they are detected."""
_BLOCK_STARTS = [start for start, _ in _BLOCKS]
_KANA = re.compile("[\u3040-\u30ff]")
_LETTER = re.compile(r"[^\W\d_]")
_NOT_PROSE = re.compile(r"</?[A-Za-z][^<>]*>|\{[^{}]*\}|https?://\S+")
"""Tags, the placeholders that translators put in their place, and addresses: they are of no language."""
_NO_EVIDENCE = -1e9
"""The identifier's lowest number, where it knows nothing of a text, is near that of a float: sums need room."""
_LETTERS_OF_A_WORD = 3
"""Latin letters that weigh as one of another script, where a text has both."""
_ENGLISH_ADVANTAGE = 6.0
"""Added to a log-likelihood. Of words that several languages have, most are English."""
_MAX_PAGE_ADVANTAGE = 8.0
"""So much likelier a text has to be in its own language than in that of the others, to be taken for it. Lower, labels
are taken for languages that share the word; higher, short texts that are of another language are lost."""


def name_of(code: str) -> str:
    """The English name by which a prompt calls a language; an unknown code passes through."""
    base, _, rest = code.replace("_", "-").partition("-")
    base = _ALIASES.get(base.lower(), base.lower())
    if base == "zh" and any(part in _TRADITIONAL for part in rest.lower().split("-")):
        return "Traditional Chinese"
    return NAMES.get(base, code)


def detect(texts: Sequence[str]) -> list[str]:
    """ISO code of each text's language, Chinese as zh-CN or zh-TW; "" where there are no letters to tell by.

    The texts stand together, as those of a page: one that might be of several languages, as a button's label, is taken
    for that of the others. A long text is judged by its beginning.
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
    """The languages that are written as most of the letters are; none without letters."""
    weights: dict[tuple[str, ...], int] = defaultdict(int)
    for letter, count in Counter(_LETTER.findall(sample)).items():
        codes = _BLOCKS[bisect_right(_BLOCK_STARTS, ord(letter)) - 1][1]
        weights[codes] += count * (1 if codes is _LATIN else _LETTERS_OF_A_WORD)
    return max(weights, key=weights.__getitem__, default=())


def _classify(samples: list[str], candidates: tuple[str, ...]) -> list[str]:
    """Which of the candidates each sample is written in, the others being likely to be of the same."""
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
    scores = dict(_identifier().rank(f" {sample} "))  # blanks: how words begin and end tells
    return {code: max(float(scores[code]), _NO_EVIDENCE) for code in candidates}


def _chinese_variants(samples: list[str]) -> list[str]:
    """zh-TW for texts with more traditional than simplified forms; where neither is seen, as the others."""
    own_scores = [
        _letters_only_in(text, "big5", "gb2312") - _letters_only_in(text, "gb2312", "big5") for text in samples
    ]
    page_scores = sum(own_scores)
    return ["zh-TW" if (mine or page_scores) > 0 else "zh-CN" for mine in own_scores]


@functools.cache
def _identifier() -> LanguageIdentifier:
    """Loaded at first use: about a second, 84 MB."""
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE)
    identifier.set_languages(_DETECTED)
    return identifier


def _letters_only_in(text: str, charset: str, other: str) -> int:
    """Letters of `text` that one character set has and the other lacks: traditional forms against simplified."""
    return sum(_encodes(letter, charset) and not _encodes(letter, other) for letter in text)


def _encodes(letter: str, charset: str) -> bool:
    try:
        letter.encode(charset)
    except UnicodeEncodeError:
        return False
    return True
