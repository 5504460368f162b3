"""Text files of programs' strings: gettext's PO, Java's properties and Apple's strings."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import polib

from rwkv_batch.translation.documents.document import (
    Document,
    DocumentError,
    DocumentOptions,
    Slot,
    TextEdits,
    Texts,
    Unit,
    decode,
    slot,
    text_document,
    unescaped,
)
from rwkv_batch.translation.documents.plurals import plural_forms, plural_units
from rwkv_batch.translation.segments import has_letters

_PO_CHARSET = re.compile(rb"charset=([\w.:-]{1,40})")
_PO_NUMBER = re.compile(r"%(?:\(\w+\))?(?:l{0,2}|z)[du]|%n|\{(?:n|count|num)\}")
_MAX_PO_BYTES = 16 << 20


def read_po(data: bytes, options: DocumentOptions) -> Document:
    """Read gettext's PO or POT. Entries without a translation, and fuzzy ones, get one. Raises DocumentError.

    Fuzzy entries stay fuzzy: nobody has reviewed them.
    """
    if len(data) > _MAX_PO_BYTES:
        raise DocumentError(f"has {len(data)} bytes; the limit of PO files is {_MAX_PO_BYTES}; split it")
    declared = _PO_CHARSET.search(data[:8192])
    charset = declared[1].decode() if declared and declared[1] != b"CHARSET" else ""
    source = decode(data, options.encoding, charset)
    try:
        # A text that is the name of a file would be read as one, and no name begins with a line break and a comment.
        catalogue = polib.pofile("\n#\n" + source.text.replace("\r\n", "\n"), wrapwidth=78)
    except (OSError, ValueError, IndexError, AttributeError, KeyError, TypeError) as error:
        message = str(error).replace(source.text, "the text")[-200:]
        raise DocumentError(f"is not a PO file: {message}; check it with msgfmt --check") from None
    forms, _ = plural_forms(options.target)
    catalogue.metadata["Language"] = options.target.replace("-", "_")
    catalogue.metadata["Plural-Forms"] = forms
    catalogue.metadata["Content-Type"] = "text/plain; charset=UTF-8"
    catalogue.metadata.setdefault("MIME-Version", "1.0")
    catalogue.metadata.setdefault("Content-Transfer-Encoding", "8bit")
    catalogue.metadata_is_fuzzy = False
    catalogue.header = "\n".join(line for line in catalogue.header.split("\n") if line) if catalogue.header else ""
    slots = [_po_slot(entry, options.target) for entry in catalogue if _is_po_open(entry)]
    if len(catalogue) == 0:
        raise DocumentError("is not a PO file: it has no entries; check it with msgfmt --check")
    newline = "\r\n" if "\r\n" in source.text else "\n"
    return Document(slots, lambda: str(catalogue).replace("\n", newline).encode("utf-8", "replace"), source.notes)


def _is_po_open(entry: Any) -> bool:
    return not entry.obsolete and has_letters(entry.msgid) and (not entry.translated() or "fuzzy" in entry.flags)


def _po_slot(entry: Any, language: str) -> Slot:
    note = " ".join(filter(None, (entry.msgctxt, entry.comment)))

    def done() -> None:
        entry.previous_msgid = entry.previous_msgid_plural = entry.previous_msgctxt = None

    def put(text: str) -> None:
        entry.msgstr = _with_ends(entry.msgid, text)
        done()

    if not entry.msgid_plural:
        return slot(Unit(entry.msgid, note=note), put)
    units, finish = plural_units(
        Unit(entry.msgid, note=note), Unit(entry.msgid_plural, note=note), language, _PO_NUMBER
    )
    categories = [category for category, _ in plural_forms(language)[1]]

    def put_forms(texts: Texts) -> None:
        if found := finish(texts):
            ordered = [found[category] for category in categories]
            entry.msgstr_plural = {index: _with_ends(entry.msgid, text) for index, text in enumerate(ordered)}
            done()

    return Slot(units, put_forms)


def _with_ends(source: str, text: str) -> str:
    """Begin and end with a line break if the source does: msgfmt checks it."""
    return "\n" * source.startswith("\n") + text.strip("\n") + "\n" * source.endswith("\n")


_PROPERTY = re.compile(
    r"^(?![ \t\f]*[#!])[ \t\f]*(?P<key>(?:\\.|[^\\\s:=])+)(?:[ \t\f]*[:=][ \t\f]*|[ \t\f]+)"
    r"(?P<value>(?:\\(?:\r\n|[\s\S])|[^\\\r\n])*)",
    re.MULTILINE,
)
_PROPERTY_ESCAPE = re.compile(r"\\(?:(?:\r\n|[\r\n])[ \t\f]*|(u[0-9a-fA-F]{4}|[\s\S]))")


def read_properties(data: bytes, options: DocumentOptions) -> Document:
    r"""Read Java's properties. A file of ASCII gets \u escapes, which every version of Java reads."""
    source = decode(data, options.encoding)
    edits = TextEdits(source.text)
    encode: Callable[[str], str] = _ascii_property if source.text.isascii() else _property
    for found in _PROPERTY.finditer(source.text):
        value = unescaped(found["value"], _PROPERTY_ESCAPE, {"n": "\n", "t": "\t", "r": "\r", "f": "\f"})
        edits.add(*found.span("value"), Unit(value, note=found["key"]), encode)
    return text_document(source, edits)


def _property(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")


def _ascii_property(text: str) -> str:
    units = _property(text).encode("utf-16-be", "surrogatepass")
    codes = (int.from_bytes(units[at : at + 2], "big") for at in range(0, len(units), 2))
    return "".join(chr(code) if code < 128 else f"\\u{code:04X}" for code in codes)


_APPLE_TEXT = r'(?:[^"\\]++|\\[\s\S])*+'
_APPLE = re.compile(
    rf'/\*(?P<comment>(?s:.*?))(?:\*/|\Z)|//[^\n]*|(?P<key>"{_APPLE_TEXT}"|(?<![\w.-])[\w.-]++)\s*+=\s*+'
    rf'"(?P<value>{_APPLE_TEXT})"\s*+;|"{_APPLE_TEXT}(?:"|\Z)'
)
"""The last form takes other texts whole, so that no search begins within one: the time is linear."""
_APPLE_ESCAPE = re.compile(r"\\(U[0-9a-fA-F]{4}|[\s\S])")


def read_apple_strings(data: bytes, options: DocumentOptions) -> Document:
    """Read Apple's .strings. Raises DocumentError."""
    if data.startswith(b"bplist"):
        raise DocumentError(
            "is a binary property list; convert it with plutil -convert xml1, or use the project's file"
        )
    source = decode(data, options.encoding)
    edits = TextEdits(source.text)
    comment = ""
    for found in _APPLE.finditer(source.text):
        if found["comment"] is not None:
            comment = found["comment"].strip()
        elif found["key"] is not None:
            value = unescaped(found["value"], _APPLE_ESCAPE, {"n": "\n", "t": "\t", "r": "\r"})
            edits.add(*found.span("value"), Unit(value, note=comment or found["key"].strip('"')), _apple_escaped)
            comment = ""
    return text_document(source, edits)


def _apple_escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
