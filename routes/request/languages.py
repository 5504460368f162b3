"""Languages by ISO code with their English names, and offline detection of a text's language."""

from __future__ import annotations

import functools

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
_SAME = {"iw": "he", "in": "id", "ji": "yi", "jw": "jv", "nb": "no", "nn": "no", "cmn": "zh", "mo": "ro", "sh": "sr"}
_TRADITIONAL = ("hant", "tw", "hk", "mo")
_SAMPLE_CHARACTERS = 4000
_DETECTED = (
    "ar bg bn ca cs da de el en es fa fi fr he hi hr hu id it ja ko ms nl no pl pt ro ru sk sr sv th tr uk ur vi zh"
).split()
"""The candidates of detection: with rare languages among them short English texts are taken for those."""


def name_of(code: str) -> str:
    """The English name by which a prompt calls a language; an unknown code passes through."""
    base, _, rest = code.replace("_", "-").partition("-")
    base = _SAME.get(base.lower(), base.lower())
    if base == "zh" and any(part in _TRADITIONAL for part in rest.lower().split("-")):
        return "Traditional Chinese"
    return NAMES.get(base, code)


def detect(text: str) -> str:
    """ISO code of the text's language; Chinese as zh-CN or zh-TW. A long text is judged by its beginning."""
    text = text.lstrip()[:_SAMPLE_CHARACTERS]
    if any("\u3040" <= letter <= "\u30ff" for letter in text):
        return "ja"
    code = str(_identifier().classify(text)[0])
    if code != "zh":
        return code
    return "zh-TW" if _letters_only_in(text, "big5", "gb2312") > _letters_only_in(text, "gb2312", "big5") else "zh-CN"


def is_loaded() -> bool:
    """Whether detection is quick by now."""
    return bool(_identifier.cache_info().currsize)


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
