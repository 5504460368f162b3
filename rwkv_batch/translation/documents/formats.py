"""The formats of documents: how one is chosen, and its reader."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from typing import Any

from rwkv_batch.translation.documents import READERS
from rwkv_batch.translation.documents.document import (
    MAX_BYTES,
    MAX_UNITS,
    ColumnError,
    Document,
    DocumentError,
    DocumentOptions,
)
from rwkv_batch.translation.languages import language_tag
from rwkv_batch.translation.markers import TooManyMarkersError

ENDINGS = {ending: name for name, (*_, endings) in READERS.items() for ending in endings.split()}
_BILINGUAL = "txt md html epub docx pptx xlsx odt srt vtt ass csv tsv"
_ADVICE = {
    "pdf": "a PDF has lines but no paragraphs; convert it to docx or html, for example with LibreOffice",
    "doc": "save it as docx",
    "rtf": "save it as docx",
    "xls": "save it as xlsx",
    "ppt": "save it as pptx",
    "mobi": "convert it to epub, for example with Calibre",
    "azw3": "convert it to epub, for example with Calibre",
    "mo": "use the po file that it was made from",
}


def format_of(name: str) -> str | None:
    """Return the format of a file's name, or None."""
    return ENDINGS.get(PurePath(name).suffix.lower().lstrip("."))


def check_name(name: str) -> None:
    """Check that a file's format is known. Raises DocumentError."""
    if format_of(name) is None:
        ending = PurePath(name).suffix.lower().lstrip(".")
        if ending in _ADVICE:
            raise DocumentError(f"is a {ending} file, which is not translated: {_ADVICE[ending]}")
        known = ", ".join(f".{one}" for one in ENDINGS)
        raise DocumentError(f"is of no known format ({ending or 'no ending'}); the name must end in {known}")


def read_document(data: bytes, name: str, options: DocumentOptions) -> Document:
    """Read a file. Raises DocumentError."""
    if data.startswith(b"%PDF-"):
        raise DocumentError(f"is a pdf file, which is not translated: {_ADVICE['pdf']}")
    check_name(name)
    kind = format_of(name) or ""
    if len(data) > MAX_BYTES:
        raise DocumentError(f"has {len(data)} bytes; the limit is {MAX_BYTES}; split it")
    if options.is_bilingual and kind not in _BILINGUAL.split():
        raise DocumentError(f"{kind} has no place for two languages; formats that do: {_BILINGUAL}")
    module, function, arguments, _ = READERS[kind]
    if options.column and function != "read_table":
        raise ColumnError(f"{kind} has no columns, but column {options.column!r} is given; leave it out")
    package = importlib.import_module(f"{__package__}.{module}")  # lxml and others load with the first file
    reader: Any = partial(getattr(package, function), **arguments)
    try:
        document: Document = reader(data, replace(options, target=language_tag(options.target)))
    except TooManyMarkersError:
        raise DocumentError("has too many tags in a text; split it") from None
    except RecursionError:
        raise DocumentError("is nested too deep; flatten it") from None
    num_units = len(document.units)
    if num_units > MAX_UNITS:
        raise DocumentError(f"has more than {MAX_UNITS} texts; split it")
    if not num_units:
        document.notes.append("there is no text to translate")
    return document


_NO_NAME = re.compile(r"[^\w.-]+")
"""Characters of an unknown language's name that a file's name does not get."""


def translated_name(name: str, language: str) -> str:
    """Return the name of a translation: book.md becomes book.zh-CN.md."""
    path = PurePath(name)
    language = _NO_NAME.sub("-", language)
    return str(path.with_name(f"{path.stem}.{language}{path.suffix.replace('.pot', '.po')}"))
