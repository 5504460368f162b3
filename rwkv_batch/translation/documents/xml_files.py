"""Safe XML, texts with inline elements, and bounded ZIP files."""

from __future__ import annotations

import html
import io
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from lxml import etree

from rwkv_batch.translation.documents.document import MAX_BYTES, DocumentError, Slot, Unit, slot, xml_text
from rwkv_batch.translation.markers import Format
from rwkv_batch.translation.segments import Split

XML = "{http://www.w3.org/XML/1998/namespace}"
_MAX_ENTRIES, _MAX_TOTAL, _MAX_PART = 10_000, 512 << 20, 64 << 20
_MAX_MARKS = 1_000_000
"""Brackets and equals signs in a file's XML. As a node or an attribute, each takes up to 300 bytes of memory."""
_MAX_RATIO, _FREE_BYTES = 200, 16 << 20
"""A ZIP file may expand to `_FREE_BYTES`, or to its size times `_MAX_RATIO`."""
_DECLARATION = re.compile(rb"(?:\xef\xbb\xbf)?<\?xml[^>]{0,200}\?>\s*")
_TAG = re.compile(r"<(/?)t(\d{1,6})(/?)>")


def num_marks(data: bytes) -> int:
    """Return the number of brackets and equals signs, a bound on nodes and attributes."""
    return data.count(b"<") + data.count(b"=")


def parse_xml(data: bytes, name: str = "the file") -> Any:
    """Return the tree of an XML file. Entities and other files are never read. Raises DocumentError."""
    if (count := num_marks(data)) > _MAX_MARKS:
        raise DocumentError(f"has {count} tags and attributes in {name}; the limit is {_MAX_MARKS}; split it")
    parser = etree.XMLParser(
        resolve_entities=False, no_network=True, load_dtd=False, huge_tree=False, strip_cdata=False, recover=False
    )
    try:
        tree = etree.fromstring(data, parser).getroottree()
    except (etree.XMLSyntaxError, ValueError, LookupError) as error:
        raise DocumentError(f"is not valid XML: {name}: {error}; repair it with the program that wrote it") from None
    dtd = tree.docinfo.internalDTD
    if dtd is not None and next(dtd.iterentities(), None) is not None:
        raise DocumentError(f"declares entities in {name}, which are not read; remove them from its DOCTYPE")
    if next(tree.iter(etree.Entity), None) is not None:
        raise DocumentError(f"has an unknown entity in {name}; write its character instead")
    return tree


def xml_bytes(tree: Any, original: bytes) -> bytes:
    """Return a tree in the encoding of the original file, with its declaration."""
    is_declared = b"<?xml" in original[:100] or original[:2] in (b"\xff\xfe", b"\xfe\xff")
    info = tree.docinfo
    if (found := _DECLARATION.match(original)) is not None:
        body: bytes = etree.tostring(tree, encoding=info.encoding or "UTF-8", xml_declaration=False)
        return found.group() + body + b"\n" * original.endswith(b"\n")
    text: bytes = etree.tostring(
        tree, encoding=info.encoding or "UTF-8", xml_declaration=is_declared, standalone=info.standalone or None
    )
    return text + b"\n" * original.endswith(b"\n")


def local(element: Any) -> str:
    """Return the name of an element without its namespace. "": a comment or an instruction."""
    return etree.QName(element).localname if isinstance(element.tag, str) else ""


def inline_text(element: Any, is_opaque: Callable[[Any], bool]) -> tuple[str, list[Any]]:
    """Return an element's content as text, and its inline elements.

    Numbered tags stand for the elements.

    is_opaque: whether an element's content is not translated
    """
    codes: list[Any] = []
    out: list[str] = []

    def walk(parent: Any) -> None:
        out.append(_escaped(parent.text))
        for child in parent:
            number = len(codes)
            codes.append(child)
            if not local(child) or is_opaque(child) or not "".join(child.itertext()).strip():
                out.append(f"<t{number}/>")
            else:
                out.append(f"<t{number}>")
                walk(child)
                out.append(f"</t{number}>")
            out.append(_escaped(child.tail))

    walk(element)
    return "".join(out), codes


def _escaped(text: str | None) -> str:
    return html.escape(text or "", quote=False)


def pieces_of(text: str) -> Iterator[tuple[str, int, str]]:
    """Yield the parts of a text with numbered tags: kind (text, open, close, whole), number and text."""
    at = 0
    for found in _TAG.finditer(text):
        yield "text", 0, xml_text(html.unescape(text[at : found.start()]))
        yield "close" if found[1] else "whole" if found[3] else "open", int(found[2]), ""
        at = found.end()
    yield "text", 0, xml_text(html.unescape(text[at:]))


def fill(element: Any, text: str, codes: list[Any]) -> None:
    """Replace an element's content by a text with numbered tags. See `inline_text`. A second use takes a copy."""
    used: set[int] = set()
    for child in list(element):
        element.remove(child)
    element.text = None
    stack = [element]
    for kind, number, part in pieces_of(text):
        parent = stack[-1]
        if kind == "text":
            if len(parent):
                parent[-1].tail = (parent[-1].tail or "") + part
            else:
                parent.text = (parent.text or "") + part
        elif kind == "close":
            if len(stack) > 1:
                stack.pop()
        elif number < len(codes):
            code = codes[number] if number not in used else deepcopy(codes[number])
            used.add(number)
            code.tail = None
            parent.append(code)
            if kind == "open":
                for child in list(code):
                    code.remove(child)
                code.text = None
                stack.append(code)


def inline_unit(text: str, note: str = "", split: Split = Split.WRAPPED, joiner: str = "") -> Unit:
    """Return the unit of a text with numbered tags."""
    return Unit(text, Format.XML, split, note, joiner)


def inline_slots(
    element: Any,
    is_opaque: Callable[[Any], bool],
    put: Callable[[str, list[Any]], None],
    note: str = "",
    joiner: str = "",
) -> list[Slot]:
    """Return the slot of an element's text, none if it has no letters. See `inline_text`.

    put: takes the translation, and what its tags stand for
    """
    text, codes = inline_text(element, is_opaque)
    return [slot(inline_unit(text, note, joiner=joiner), lambda new: put(new, codes))] if has_text(text) else []


def has_text(text: str) -> bool:
    """Return whether a text with numbered tags has letters outside of them."""
    return re.search(r"[^\W\d_]", html.unescape(_TAG.sub("", text))) is not None


class Archive:
    """A ZIP file that is read and written part by part."""

    def __init__(self, data: bytes) -> None:
        """Raises DocumentError, also if it expands to too much."""
        try:
            self._zip = zipfile.ZipFile(io.BytesIO(data))
        except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            raise DocumentError(f"is not a ZIP file, as its format requires: {error}; save it again") from None
        infos = self._zip.infolist()
        total = sum(one.file_size for one in infos)
        limit = min(_MAX_TOTAL, max(_FREE_BYTES, _MAX_RATIO * len(data)))
        if len(infos) > _MAX_ENTRIES or total > limit:
            message = f"expands to {total} bytes in {len(infos)} parts; the limits are {limit} and {_MAX_ENTRIES}"
            raise DocumentError(f"{message}; split it")
        self.names = [one.filename for one in infos]
        if len(set(self.names)) != len(self.names):
            raise DocumentError("has two parts of the same name; save it again")
        if any(one.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for one in infos):
            # Python decompresses these without a limit, whatever size they name.
            raise DocumentError("has parts that are compressed by other means than deflate; save it again")
        if any(one.flag_bits & 1 for one in infos):
            raise DocumentError("is encrypted; save it without a password")
        self._num_marks = 0
        self._changed: dict[str, Callable[[], bytes]] = {}

    def read(self, name: str) -> bytes:
        """Return a part. Raises DocumentError."""
        try:
            info = self._zip.getinfo(name)
        except KeyError:
            raise DocumentError(f"has no part {name[:200]!r}, which its format requires; save it again") from None
        if info.file_size > _MAX_PART:
            raise DocumentError(f"has a part {name[:200]!r} of {info.file_size} bytes; the limit is {_MAX_PART}")
        return self._content(info)

    def tree(self, name: str) -> Any:
        """Return a part's tree, whose changes are written. Raises DocumentError."""
        data = self.read(name)
        self._num_marks += num_marks(data)
        if self._num_marks > _MAX_MARKS:
            raise DocumentError(f"has more than {_MAX_MARKS} tags and attributes in its parts; split it")
        tree = parse_xml(data, name)
        self._changed[name] = lambda: xml_bytes(tree, data)
        return tree

    def replace(self, name: str, content: Callable[[], bytes]) -> None:
        """Write other content for a part."""
        self._changed[name] = content

    def save(self) -> bytes:
        """Return the file with its changes. Other parts stay as they are. Raises DocumentError."""
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as written:
            for info in self._zip.infolist():
                make = self._changed.get(info.filename)
                content = self._content(info) if make is None else make()
                copy = zipfile.ZipInfo(info.filename, info.date_time)
                copy.compress_type = info.compress_type
                copy.external_attr, copy.create_system = info.external_attr, info.create_system
                written.writestr(copy, content)
        if out.tell() > 4 * MAX_BYTES:
            raise DocumentError(f"would have {out.tell()} bytes; the limit is {4 * MAX_BYTES}")
        return out.getvalue()

    def _content(self, info: zipfile.ZipInfo) -> bytes:
        try:
            return self._zip.read(info)
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError, zlib.error) as error:
            raise DocumentError(f"has a damaged part {info.filename[:200]!r} ({error}); save it again") from None
