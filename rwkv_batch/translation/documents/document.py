"""A document: the texts of a file that are translated, and how their translations are put back."""

from __future__ import annotations

import codecs
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rwkv_batch.translation.languages import detect_languages
from rwkv_batch.translation.markers import Format
from rwkv_batch.translation.plan import AUTO
from rwkv_batch.translation.segments import MAX_TEXT_CHARACTERS, Split, has_letters

MAX_BYTES = 64 << 20
"""Size of a file."""
MAX_UNITS = 100_000
"""Texts of a file."""
MAX_DEPTH = 500
"""Nested lists and objects of a file."""
PLAIN_JOINER = " / "
"""Text between both languages where there are no tags and no line breaks."""
_LONG_TEXT = 500
"""A longer text is split at sentences."""
_DETECTED_AT_ONCE = 32
"""A short, ambiguous text takes the language of the texts around it."""


class DocumentError(ValueError):
    """The file cannot be translated. The message says why, and what to do."""


class ColumnError(DocumentError):
    """The table has no such column."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A text that is translated as a whole."""

    text: str
    format: Format = Format.TEXT
    split: Split = Split.NEWLINES
    note: str = ""
    """What the file says about it, like a key or a comment."""
    joiner: str = ""
    """Text before its translation in a bilingual file. "": the document's."""

    @property
    def body(self) -> dict[str, Any]:
        """Fields of the request that translates it."""
        is_long = self.split is Split.NEWLINES and len(self.text) > _LONG_TEXT
        split = Split.SENTENCES if is_long else self.split
        return {"text_list": [self.text], "format": str(self.format), "split": str(split)}


Texts = Sequence[str | None]
"""Translations. None: the text has none."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in a file: its texts, and a function that puts their translations there."""

    units: tuple[Unit, ...]
    put: Callable[[Texts], None]


def slot(unit: Unit, put: Callable[[str], None]) -> Slot:
    """Return the slot of one text. Without a translation it stays."""
    return Slot((unit,), lambda texts: None if texts[0] is None else put(texts[0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentOptions:
    """What a reader of documents needs to know."""

    target: str
    """Code or name of the language of the translation."""
    source: str = AUTO
    column: str = ""
    """Column of a table."""
    encoding: str = ""
    """Encoding of a text file. "": it is detected."""
    is_bilingual: bool = False
    """Whether each text stays, with its translation after it."""


@dataclass(slots=True)
class Document:
    """A file that was read. `write` returns the translated file, once."""

    slots: list[Slot]
    save: Callable[[], bytes]
    notes: list[str] = field(default_factory=list)
    """What was found in the file, like its encoding. `write` may add some."""
    joiner: str | None = None
    """Text between a text and its translation in a bilingual file. None: there is no such file in this format."""

    @property
    def units(self) -> list[Unit]:
        return [unit for one in self.slots for unit in one.units]

    def write(self, translations: Texts, *, is_bilingual: bool = False) -> bytes:
        """Return the file with the translations of `units`."""
        at = 0
        for one in self.slots:
            texts = translations[at : at + len(one.units)]
            if is_bilingual and self.joiner is not None:
                texts = [
                    text
                    if text is None or text == unit.text
                    else unit.text + (unit.joiner or self.joiner) + _second(unit, text)
                    for unit, text in zip(one.units, texts, strict=True)
                ]
            one.put(texts)
            at += len(one.units)
        return self.save()


_ONCE = re.compile(
    r"<(script|style|select|textarea|iframe)\b.*?(?:</\1\s*>|\Z)|<input\b[^<>]*>|</?button\b[^<>]*>",
    re.DOTALL | re.IGNORECASE,
)
_START_TAG = re.compile("<[a-z][^<>]*>", re.IGNORECASE)
_NAME = re.compile(r"""("[^"]*"|'[^']*')|\s(?:id|name)\s*=\s*(?:"[^"]*"|'[^']*'|[^\s"'<>]+)""", re.IGNORECASE)
"""Quoted text, which stays, or an attribute."""


def _second(unit: Unit, text: str) -> str:
    """Return a translation that follows its text. What a page may have once is left out: scripts, fields, ids."""
    if unit.format is not Format.HTML:
        return text
    return _START_TAG.sub(lambda tag: _NAME.sub(r"\1", tag[0]), _ONCE.sub("", text))


def requests(document: Document, source: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield key and body of a request for each different text. See `unit_key`. Raises DocumentError for a long text."""
    longest = max((len(unit.text) for unit in document.units), default=0)
    if longest > MAX_TEXT_CHARACTERS:
        raise DocumentError(f"has a paragraph of {longest} characters, the limit is {MAX_TEXT_CHARACTERS}; divide it")
    units = list({unit_key(unit): unit for unit in document.units}.items())
    for start in range(0, len(units), _DETECTED_AT_ONCE):
        part = units[start : start + _DETECTED_AT_ONCE]
        is_auto = source.lower() == AUTO
        sources = (
            [one.code for one in detect_languages([unit.text for _, unit in part])] if is_auto else [source] * len(part)
        )
        for (key, unit), language in zip(part, sources, strict=True):
            yield key, {**fields, **unit.body, "source_lang": language or AUTO}


def unit_key(unit: Unit) -> str:
    """Return the key of a text. Equal texts have the same."""
    return hashlib.sha256(f"{unit.format} {unit.split} {unit.text}".encode("utf-8", "surrogatepass")).hexdigest()[:32]


@dataclass(slots=True)
class Source:
    """The text of a file, and its encoding."""

    text: str
    encoding: str
    bom: bytes = b""
    notes: list[str] = field(default_factory=list)
    errors: str = "strict"
    """What happens to characters that the encoding lacks, see `str.encode`."""

    def encode(self, text: str) -> bytes:
        """Return the text's bytes, in UTF-8 if a character is missing."""
        text = text.encode("utf-8", "replace").decode()
        try:
            return self.bom + text.encode(self.encoding, self.errors)
        except UnicodeEncodeError:
            self.notes.append(f"{self.encoding} lacks characters of the translation: the output is UTF-8")
            return text.encode()


_BOMS = (
    (codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF32_LE, "utf-32-le"), (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"),
)  # fmt: skip
_ENCODINGS = ("gb18030", "big5", "cp932", "cp949", "cp1251", "cp1252", "utf_16_le", "utf_16_be")
"""Encodings that are detected, best first: a short text fits several."""
_SAMPLE_BYTES = 1 << 16
_DETECTED_CHARACTERS = 2000


def decode(data: bytes, encoding: str = "", declared: str = "") -> Source:
    """Return the text of a file. `declared`: the encoding that the file names. Raises DocumentError."""
    for bom, name in () if encoding else _BOMS:
        if data.startswith(bom):
            return _decoded(data, name, bom)
    if encoding:
        return _decoded(data, encoding)
    if declared and declared.lower() not in ("utf-8", "utf8"):
        return _decoded(data, declared)
    if b"\0" in data and len(data) % 2 == 0:
        high, low = data[::2].count(0), data[1::2].count(0)
        if 5 * (high + low) > len(data) and not (high and low):
            return _decoded(data, "utf-16-be" if high else "utf-16-le")
    try:
        return Source(data.decode("utf-8"), "utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        place = f"is not UTF-8 ({error.reason} at byte {error.start}, line {line})"
        if _MIN_BYTES_PER_FAULT * data.decode("utf-8", "replace").count("\ufffd") <= len(data.translate(None, _ASCII)):
            raise DocumentError(f"{place}, but mostly is; correct that place, or name its encoding") from None
        found = _detected(data)
        if found is None:
            message = f"{place}, and its encoding is not known"
            raise DocumentError(f"{message}; convert it to UTF-8, or name its encoding") from None
    return _decoded(data, found)


_NO_ENCODINGS = {"idna", "punycode", "unicode-escape", "raw-unicode-escape", "undefined"}
"""Codecs of Python that turn text into bytes and are no encodings of files."""


def _decoded(data: bytes, encoding: str, bom: bytes = b"") -> Source:
    try:
        text = data[len(bom) :].decode(encoding)
        codec = codecs.lookup(encoding)
        codec.encode("")
    except (LookupError, ValueError, TypeError) as error:
        raise DocumentError(f"is not {encoding}: {error}; convert it to UTF-8, or name its encoding") from None
    if not isinstance(text, str) or codec.name in _NO_ENCODINGS:
        raise DocumentError(f"{encoding} is not an encoding of text; name another one")
    name = encoding.replace("_", "-")
    note = f"encoding {name}{' with a BOM' if bom else ''}"
    return Source(text, encoding, bom, [note] if bom or name.lower() != "utf-8" else [])


def _detected(data: bytes) -> str | None:
    from charset_normalizer import from_bytes

    sample = data[:_SAMPLE_BYTES]
    names = [name for name in _ENCODINGS if b"\0" in data or not name.startswith("utf")]
    found = from_bytes(sample, cp_isolation=names)
    matches = {
        one.encoding: one.chaos + _rare_share(str(one), one.encoding) for one in found if _is_likely(str(one), sample)
    }
    best = min(matches, key=lambda name: (matches[name], _ENCODINGS.index(name)), default=None)
    return best or next((name for name in _ENCODINGS[:-2] if _decodes(data, name)), None)


_COMMON = {"gb18030": "gb2312", "cp949": "euc_kr"}
"""Encodings, and older ones with their frequent characters."""
_RARE = {"cp932": re.compile("[\uff61-\uff9f]"), "cp949": re.compile("(?<=[\uac00-\ud7af])[\u4e00-\u9fff]")}
"""Rare characters: Japanese of half width, Chinese ones within Korean words."""


def _rare_share(text: str, encoding: str) -> float:
    """Return the share of characters that are rare in this encoding: mostly those of another one."""
    sample = text[:_DETECTED_CHARACTERS]
    letters = [one for one in sample if not one.isascii()]
    common = _COMMON.get(encoding, encoding)
    rare = sum(not one.encode(common, "ignore") for one in letters)
    rare += len(_RARE[encoding].findall(sample)) if encoding in _RARE else 0
    return rare / max(len(letters), 1)


_UNLIKELY = re.compile("[\x00-\x08\x0e-\x19\x1c-\x1f\x7f-\x9f\ue000-\uf8ff]")
"""Control characters and those for private use: files of text have hardly any."""
_MIN_BYTES_PER_FAULT = 10
"""Bytes beyond ASCII for each unlikely character, or each broken place of UTF-8, at least."""
_ASCII = bytes(range(128))


def _is_likely(text: str, data: bytes) -> bool:
    return _MIN_BYTES_PER_FAULT * len(_UNLIKELY.findall(text)) <= len(data.translate(None, _ASCII))


def _decodes(data: bytes, encoding: str) -> bool:
    try:
        return _is_likely(data.decode(encoding), data)
    except UnicodeDecodeError:
        return False


@dataclass(slots=True)
class TextEdits:
    """Changes of a text: parts that are replaced. Everything else stays."""

    text: str
    slots: list[Slot] = field(default_factory=list)
    _changes: list[tuple[int, int, str]] = field(default_factory=list)

    def change(self, start: int, end: int, text: str) -> None:
        """Replace a part. Parts must not overlap."""
        self._changes.append((start, end, text))

    def add(self, start: int, end: int, unit: Unit | None = None, encode: Callable[[str], str] = str) -> None:
        """Add a part that is translated, if it has letters. `unit`: its text, if it is written in another way.

        Raises DocumentError for the first of too many.
        """
        if unit is None:
            raw = self.text[start:end]
            start += len(raw) - len(raw.lstrip())
            end -= len(raw) - len(raw.rstrip())
            unit = Unit(self.text[start:end])
        if start < end and has_letters(unit.text):
            self.slots.append(slot(unit, lambda text: self.change(start, end, encode(text))))
        if len(self.slots) > MAX_UNITS:
            raise DocumentError(f"has more than {MAX_UNITS} texts; split it")

    def result(self) -> str:
        """Return the changed text."""
        out: list[str] = []
        at = 0
        for start, end, text in sorted(self._changes):
            out += (self.text[at:start], text)
            at = end
        return "".join((*out, self.text[at:]))


_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def xml_text(text: str) -> str:
    """Return the text without characters that XML does not have."""
    return _CONTROLS.sub("", text)


def unescaped(text: str, escape: re.Pattern[str], names: Mapping[str, str]) -> str:
    """Return the text without escapes, whose group 1 is u and four hex digits, or a character, perhaps of `names`."""

    def character(found: re.Match[str]) -> str:
        code = found[1] or ""
        return chr(int(code[1:], 16)) if len(code) == 5 else names.get(code, code)

    return paired(escape.sub(character, text))


def paired(text: str) -> str:
    """Return the text with pairs of surrogates, from escapes, as characters."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def text_document(source: Source, edits: TextEdits, joiner: str | None = None) -> Document:
    """Return the document of a text file."""
    return Document(edits.slots, lambda: source.encode(edits.result()), source.notes, joiner)
