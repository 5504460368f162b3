"""Names of languages, and the detection of a text's language and script."""

from __future__ import annotations

import functools
import math
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier

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
_NAMES = {name.lower(): name for name in (*LANGUAGE_NAMES.values(), "Traditional Chinese")} | {
    "simplified chinese": "Chinese", "zt": "Traditional Chinese",
}  # fmt: skip
"""By name in lower case, also LibreTranslate's code."""
_CODES = {name: code for code, name in LANGUAGE_NAMES.items()} | {"Traditional Chinese": "zh"}
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
_WIDE_ENDS = tuple("。！？」』）")
"""Ends of Chinese and Japanese sentences. No space follows them."""
_NO_SPACES = frozenset("bo ja km lo my th zh".split())
_KANA = re.compile("[\u3040-\u30ff]")
_LETTER = re.compile(r"[^\W\d_]")
_NOT_PROSE = re.compile(r"</?[A-Za-z][^<>]*>|\{[^{}]*\}|https?://\S+")
"""Tags, translators' placeholders and addresses. They have no language."""
_NO_EVIDENCE = -1e9
"""Floor of the log-likelihoods. The identifier's own is close to the limits of a float, so sums would overflow."""
_NON_LATIN_WEIGHT = 3
"""Number of Latin letters that count as much as one letter of another script, in texts with both."""
_ENGLISH_ADVANTAGE = 6.0
"""Added to the log-likelihood of English. A word of several languages is most often English."""
_MAX_PAGE_ADVANTAGE = 8.0
"""Most that the other texts' language adds to a text's log-likelihood.

With a lower value, labels are assigned to other languages that share the word. With a higher one, short texts in
another language are missed.
"""
_CERTAIN = 0.5
"""A less probable language of a text yields to that of a clear page."""


def is_known_language(code: str) -> bool:
    """Return whether this is a known language's code or English name."""
    return language_name(code) != code or code.lower() in _NAMES


def language_name(code: str) -> str:
    """Return the English name of a language, given its code or name. An unknown one is returned unchanged."""
    base, _, rest = code.replace("_", "-").partition("-")
    base = _ALIASES.get(base.lower(), base.lower())
    if base == "zh" and any(part in _TRADITIONAL for part in rest.lower().split("-")):
        return "Traditional Chinese"
    return LANGUAGE_NAMES.get(base) or _NAMES.get(code.lower(), code)


def language_code(language: str) -> str:
    """Return the ISO code of a language's code or name. "": it is unknown."""
    return _CODES.get(language_name(language), "")


def language_tag(language: str) -> str:
    """Return the tag that files have for a language's code or name: zh-CN for ZH_cn, de for German."""
    if language.lower() in _NAMES:
        return "zh-Hant" if language_name(language) == "Traditional Chinese" else language_code(language)
    if not is_known_language(language):
        return language
    first, *rest = language.replace("_", "-").split("-")
    parts = (part.upper() if len(part) == 2 else part.title() if len(part) == 4 else part for part in rest)
    return "-".join((first.lower(), *parts))


def base_language(language: str) -> str:
    """Return the language of a code without its region, in lower case."""
    return language_code(language) or language.replace("_", "-").partition("-")[0].lower()


def join_sentences(pieces: Iterable[tuple[str, bool]], language: str) -> str:
    """Join sentences and the text between them, which is white space in most cases.

    Sentences without a space get one in a language that has them. In Chinese and Japanese, spaces after a full stop go.
    pieces: texts, each with whether it is a sentence
    """
    language = base_language(language)
    has_spaces, is_wide, out, between = language not in _NO_SPACES, language in ("zh", "ja"), [""], ""
    for text, is_sentence in pieces:
        if not is_sentence:
            between += text
            continue
        if len(out) > 1 and has_spaces:
            between = between or " "
        elif is_wide and not between.strip(" ") and out[-1].endswith(_WIDE_ENDS):
            between = ""
        out += between, text
        between = ""
    return "".join((*out, between))


def letters_in_script(text: str, language: str) -> tuple[int, int]:
    """Count the text's letters in the language's script, and all its letters.

    Both counts are 0 if the script is not known.
    """
    code = language_code(language)
    if code not in _DETECTED:
        return 0, 0
    letters = _LETTER.findall(_NOT_PROSE.sub(" ", text[:_SAMPLE_CHARACTERS]))
    own = sum(code in _BLOCKS[bisect_right(_BLOCK_STARTS, ord(letter)) - 1][1] for letter in letters)
    return own, len(letters)


class Detected(NamedTuple):
    """A text's language."""

    code: str
    """ISO code: zh-CN or zh-TW for Chinese. "": the text has no letters."""
    probability: float


def detect_languages(texts: Sequence[str]) -> list[Detected]:
    """Return each text's language and its probability.

    The texts are assumed to be of one page: a short text that fits several languages gets the language of the others.
    Only the first 4,000 characters of a text count.
    """
    samples = [_NOT_PROSE.sub(" ", text.lstrip()[:_SAMPLE_CHARACTERS]).strip() for text in texts]
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for index, sample in enumerate(samples):
        groups[_candidates(sample)].append(index)
    found = [Detected("", 0.0)] * len(samples)
    for candidates, indices in groups.items():
        for index, one in zip(indices, _classify([samples[index] for index in indices], candidates), strict=True):
            found[index] = Detected("ja", 1.0) if _KANA.search(samples[index]) else one
    chinese = [index for index, one in enumerate(found) if one.code == "zh"]
    for index, code in zip(chinese, _chinese_variants([samples[index] for index in chinese]), strict=True):
        found[index] = Detected(code, found[index].probability)
    return found


def language_probabilities(text: str) -> dict[str, float]:
    """Return the probability of each language that the text may have. Empty without letters."""
    sample = _NOT_PROSE.sub(" ", text.lstrip()[:_SAMPLE_CHARACTERS]).strip()
    candidates = _candidates(sample)
    if len(candidates) > 1 and _KANA.search(sample):
        candidates = ("ja",)
    scores = _log_likelihoods(sample, candidates) if len(candidates) > 1 else dict.fromkeys(candidates, 0.0)
    if "en" in scores:
        scores["en"] += _ENGLISH_ADVANTAGE
    found = _probabilities(scores)
    return {_chinese_variants([sample])[0] if code == "zh" else code: one for code, one in found.items()}


def _probabilities(scores: Mapping[str, float]) -> dict[str, float]:
    """Return the probabilities of log-likelihoods."""
    highest = max(scores.values(), default=0.0)
    weights = {code: math.exp(score - highest) for code, score in scores.items()}
    total = math.fsum(weights.values())
    return {code: one / total for code, one in weights.items()}


def _candidates(sample: str) -> tuple[str, ...]:
    """Return the languages of the script of most letters. Empty without letters."""
    weights: dict[tuple[str, ...], int] = defaultdict(int)
    for letter, count in Counter(_LETTER.findall(sample)).items():
        codes = _BLOCKS[bisect_right(_BLOCK_STARTS, ord(letter)) - 1][1]
        weights[codes] += count * (1 if codes is _LATIN else _NON_LATIN_WEIGHT)
    return max(weights, key=weights.__getitem__, default=())


def _classify(samples: list[str], candidates: tuple[str, ...]) -> list[Detected]:
    """Return each sample's most likely candidate. The result considers that the samples share a page."""
    if len(candidates) < 2:
        return [Detected("".join(candidates), float(len(candidates)))] * len(samples)
    own_scores = [_log_likelihoods(sample, candidates) for sample in samples]
    page_scores = {code: math.fsum(scores[code] for scores in own_scores) for code in candidates}
    if "en" in page_scores:
        page_scores["en"] += _ENGLISH_ADVANTAGE
    return [_most_likely(scores, page_scores) for scores in own_scores]


def _most_likely(scores: dict[str, float], page_scores: dict[str, float]) -> Detected:
    """Return the language of one text of a page. Its own score, which the page's contains, counts once."""
    others = {code: page_scores[code] - score for code, score in scores.items()}
    highest = max(others.values())
    found = _probabilities(
        {code: score + max(-_MAX_PAGE_ADVANTAGE, others[code] - highest) for code, score in scores.items()}
    )
    code = max(found, key=found.__getitem__)
    first, second = sorted(others, key=others.__getitem__, reverse=True)[:2]
    if found[code] < _CERTAIN and others[first] - others[second] > _MAX_PAGE_ADVANTAGE:
        code = first  # the text says little, and the page is clear
    return Detected(code, found[code])


def _log_likelihoods(sample: str, candidates: tuple[str, ...]) -> dict[str, float]:
    scores = dict(_identifier().rank(f" {sample} "))  # the spaces mark word boundaries
    return {code: max(float(scores[code]), _NO_EVIDENCE) for code in candidates}


def _chinese_variants(samples: list[str]) -> list[str]:
    """Return zh-TW or zh-CN for each text.

    zh-TW: the text has more traditional than simplified forms. A text without either kind follows the other texts.
    """
    own_scores = [
        _letters_only_in(text, "big5", "gb2312") - _letters_only_in(text, "gb2312", "big5") for text in samples
    ]
    page_scores = sum(own_scores)
    return ["zh-TW" if (score or page_scores) > 0 else "zh-CN" for score in own_scores]


@functools.cache
def _identifier() -> LanguageIdentifier:
    """Load the identifier at first use. It takes about 1 s and 84 MB."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

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
