"""Word, PowerPoint, Excel and OpenDocument files, and EPUB: XML in a ZIP file.

Word splits a sentence into runs. Neighbouring runs of equal form are one text, and the others become numbered tags.
"""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from contextlib import suppress
from copy import deepcopy
from functools import partial
from html import escape
from typing import Any
from urllib.parse import unquote

from lxml import etree

from rwkv_batch.translation.documents.document import (
    PLAIN_JOINER,
    Document,
    DocumentError,
    DocumentOptions,
    Slot,
    TextEdits,
    decode,
    slot,
    xml_text,
)
from rwkv_batch.translation.documents.markup import add_html
from rwkv_batch.translation.documents.xml_files import (
    XML,
    Archive,
    fill,
    has_text,
    inline_slots,
    inline_unit,
    local,
    parse_xml,
    pieces_of,
)

_WORD = re.compile(r"word/(?:document|header\d*|footer\d*|footnotes|endnotes|comments)\.xml")
_SLIDES = re.compile(r"ppt/(?:slides/slide|notesSlides/notesSlide)\d+\.xml")
_SHEETS = re.compile(r"xl/(?:sharedStrings|worksheets/sheet\d+)\.xml")
_PARTS = {"docx": _WORD, "pptx": _SLIDES, "xlsx": _SHEETS, "odt": re.compile(r"content\.xml|styles\.xml")}
_PROPERTIES = frozenset(("docProps/core.xml", "meta.xml"))
"""Parts with the file's title."""
_CONTAINERS = frozenset("hyperlink ins smartTag sdt sdtContent moveTo".split())
"""Elements with runs in them. In a text they are a pair of tags."""
_DROPPED = frozenset("proofErr lastRenderedPageBreak".split())
"""What a program writes about the old text."""
_UNSEEN = frozenset("lang noProof".split())
"""Properties of a run that do not change its form."""


def read_office(data: bytes, options: DocumentOptions, kind: str) -> Document:
    """Read a docx, pptx, xlsx or odt file. Raises DocumentError."""
    archive = Archive(data)
    names = [name for name in archive.names if _PARTS[kind].fullmatch(name)]
    if not names:
        raise DocumentError(f"has none of the parts of a {kind} file; save it again with an office program")
    slots: list[Slot] = []
    for name in _PROPERTIES.intersection(archive.names):
        with suppress(DocumentError):  # office programs open a file whose properties are broken; they stay as they are
            for title in archive.tree(name).getroot().iter(f"{_DC}title"):
                slots += _element_slots(title)
    for name in names:
        if _has_no_text(archive, name):
            continue
        root = archive.tree(name).getroot()
        slots += _mixed_paragraphs(root) if kind == "odt" else _run_paragraphs(root)
    return Document(slots, archive.save, joiner=PLAIN_JOINER if kind == "xlsx" else "<t999999/>")


def _has_no_text(archive: Archive, name: str) -> bool:
    """Return whether a part is a sheet of numbers and references: such parts are the largest."""
    return name.startswith("xl/worksheets/") and not re.search(rb"<(?:\w+:)?is[\s>]", archive.read(name))


def _mixed_paragraphs(root: Any) -> list[Slot]:
    """Return the paragraphs of an OpenDocument file."""
    found: list[Slot] = []
    for one in root.iter("{*}p", "{*}h"):
        found += inline_slots(one, lambda part: local(part) not in ("span", "a", "meta"), partial(_fill_mixed, one))
    return found


def _fill_mixed(paragraph: Any, text: str, codes: list[Any]) -> None:
    line_break = etree.Element(f"{{{etree.QName(paragraph).namespace}}}line-break")
    fill(paragraph, text.replace("<t999999/>", f"<t{len(codes)}/>"), [*codes, line_break])


def _run_paragraphs(root: Any) -> list[Slot]:
    """Return paragraphs of Word and PowerPoint, or cells of Excel."""
    paragraphs = [_Paragraph(one) for one in root.iter("{*}p", "{*}si", "{*}is")]
    return [slot(inline_unit(one.text), one.put) for one in paragraphs if has_text(one.text)]


class _Paragraph:
    """A paragraph of runs as a text with numbered tags."""

    def __init__(self, element: Any) -> None:
        self._element = element
        self._prefix = f"{{{etree.QName(element).namespace}}}"
        self._codes: list[Any] = []
        """What the tags stand for: a list of elements, a container, or a run with other properties."""
        atoms = list(self._atoms(element))
        lengths: Counter[str] = Counter()
        for kind, value, form in atoms:
            if kind == "text":
                lengths[self._key(form)] += len(value)
        self._main = max(lengths, key=lambda key: lengths[key], default="")
        self._main_run = next(
            (form for kind, _, form in atoms if kind == "text" and self._key(form) == self._main), None
        )
        self.text = self._shown(atoms)

    def _key(self, run: Any) -> str:
        """Return the properties of a run as text."""
        properties = run.find("{*}rPr")
        if properties is None:
            return ""
        properties = deepcopy(properties)
        properties.tail = None
        for child in list(properties):
            if local(child) in _UNSEEN:
                properties.remove(child)
        for name in ("lang", "altLang", "dirty", "err"):
            properties.attrib.pop(name, None)
        return etree.tostring(properties, method="c14n").decode() if len(properties) or properties.attrib else ""

    def _atoms(self, parent: Any) -> Any:
        """Yield (kind, value, run): text, other elements, or the beginning and the end of a container."""
        field: list[Any] = []
        depth = 0
        for child in parent:
            name = local(child)
            if name in _DROPPED or name in ("pPr", "rPr", "endParaRPr", "phoneticPr", "rPh"):
                continue
            kinds = [field_type.get(f"{self._prefix}fldCharType") for field_type in child.iter("{*}fldChar")]
            if depth or kinds:  # a field is one element: its parts must stay in order
                field.append(child)
                depth += kinds.count("begin") - kinds.count("end")
                if depth <= 0:
                    yield "code", field, None
                    field, depth = [], 0
            elif name == "r":
                yield from self._of_run(child)
            elif name == "t":  # a cell without runs
                yield "text", child.text or "", child
            elif name in _CONTAINERS:
                yield "open", child, None
                yield from self._atoms(child)
                yield "close", child, None
            else:
                yield "code", [child], None
        if field:
            yield "code", field, None

    def _of_run(self, run: Any) -> Any:
        """Yield a run's texts and its other elements."""
        for child in run:
            name = local(child)
            if name == "t":
                yield "text", child.text or "", run
            elif name != "rPr" and name not in _DROPPED:
                yield "code", [(run, child)], None

    def _empty(self, run: Any) -> Any:
        """Return a run with the same properties."""
        made = etree.Element(run.tag, run.attrib, nsmap=run.nsmap)
        properties = run.find("{*}rPr")
        if properties is not None:
            made.append(deepcopy(properties))
        return made

    def _shown(self, atoms: list[Any]) -> str:
        out: list[str] = []
        containers: list[int] = []
        opened: tuple[str, int] | None = None
        """Properties and number of the open tag of runs."""
        for kind, value, run in atoms:
            key = self._key(run) if kind == "text" else self._main
            if opened is not None and key != opened[0]:
                out.append(f"</t{opened[1]}>")
                opened = None
            if kind == "text":
                if key != self._main and opened is None:
                    opened = key, self._add(run)
                    out.append(f"<t{opened[1]}>")
                out.append(escape(value, quote=False))
            elif kind == "close":
                out.append(f"</t{containers.pop()}>")
            elif kind == "open":
                containers.append(self._add(value))
                out.append(f"<t{containers[-1]}>")
            else:
                out.append(f"<t{self._add(value)}/>")
        if opened is not None:
            out.append(f"</t{opened[1]}>")
        return "".join(out)

    def _add(self, code: Any) -> int:
        self._codes.append(code)
        return len(self._codes) - 1

    def put(self, text: str) -> None:
        """Replace the runs by those of a translation."""
        properties = [one for one in self._element if local(one) in ("pPr", "endParaRPr", "phoneticPr")]
        before = [one for one in properties if local(one) == "pPr"]
        for child in list(self._element):
            self._element.remove(child)
        self._element.extend(before)
        parents, runs = [self._element], [self._main_run]
        used: set[int] = set()
        for kind, number, part in pieces_of(text):
            code = self._codes[number] if number < len(self._codes) else None
            if kind == "text":
                if part:
                    parents[-1].append(self._run(runs[-1], part))
            elif number == _BREAK:
                alone = self._empty(self._main_run)
                alone.append(etree.Element(f"{self._prefix}br"))
                parents[-1].append(alone if "drawingml" not in self._prefix else alone[-1])
            elif code is None:
                continue
            elif kind == "whole":
                is_first = number not in used
                used.add(number)
                for one in code if isinstance(code, list) else [code]:
                    parents[-1].append(self._whole(one, is_first))
            elif kind == "close":
                if len(parents) > 1:
                    parents.pop()
                    runs.pop()
            elif local(code) in _CONTAINERS:
                made = etree.SubElement(parents[-1], code.tag, code.attrib, nsmap=code.nsmap)
                made.extend(deepcopy(one) for one in code if local(one) in ("sdtPr", "rPr", "customXmlPr"))
                parents.append(made)
                runs.append(runs[-1])
            else:
                parents.append(parents[-1])
                runs.append(code)
        self._element.extend(one for one in properties if local(one) != "pPr")

    def _whole(self, code: Any, is_first: bool) -> Any:
        """Return an element, or a copy if it was taken before.

        A tuple: a part of a run.
        """
        run, element = code if isinstance(code, tuple) else (None, code)
        element = element if is_first else deepcopy(element)
        element.tail = None
        if run is None:
            return element
        alone = self._empty(run)
        alone.append(element)
        return alone

    def _run(self, run: Any, text: str) -> Any:
        """Return a run of that form with a text."""
        if run is None or local(run) == "t":
            made = holder = etree.Element(f"{self._prefix}t")
        else:
            made = self._empty(run)
            holder = etree.SubElement(made, f"{self._prefix}t")
        holder.text = text
        if text != text.strip() and "drawingml" not in self._prefix:
            holder.set(f"{XML}space", "preserve")
        return made


_BREAK = 999_999
_DC = "{http://purl.org/dc/elements/1.1/}"


def read_epub(data: bytes, options: DocumentOptions) -> Document:
    """Read a book: its pages, its contents and its title. Raises DocumentError."""
    archive = Archive(data)
    container = parse_xml(archive.read("META-INF/container.xml"), "META-INF/container.xml")
    root = next(container.iter("{*}rootfile"), None)
    package_name = "" if root is None else root.get("full-path", "")
    package = archive.tree(package_name).getroot()
    slots: list[Slot] = []
    for language in package.iter(f"{_DC}language"):
        language.text = options.target
    for title in (*package.iter(f"{_DC}title"), *package.iter(f"{_DC}description")):
        slots += _element_slots(title)
    folder = posixpath.dirname(package_name)
    for item in package.iter("{*}item"):
        name = posixpath.normpath(posixpath.join(folder, unquote(item.get("href", ""))))
        kind = item.get("media-type", "")
        if name not in archive.names:
            continue
        if kind == "application/xhtml+xml":
            _add_page(archive, name, options, slots)
        elif kind == "application/x-dtbncx+xml":
            for label in archive.tree(name).getroot().iter("{*}text"):
                slots += _element_slots(label)
    return Document(slots, archive.save, joiner="<br/>")


def _element_slots(element: Any) -> list[Slot]:
    return inline_slots(element, lambda _: True, partial(fill, element), joiner=PLAIN_JOINER)


def _add_page(archive: Archive, name: str, options: DocumentOptions, slots: list[Slot]) -> None:
    data = archive.read(name)
    without_names = re.sub(rb"&(?!(?:amp|lt|gt|quot|apos);)(\w{1,32});", rb"&amp;\1;", data)  # no DTD is read
    encoding = parse_xml(without_names, name).docinfo.encoding or "utf-8"
    source = decode(data, "" if encoding.lower() in ("utf-8", "utf8") else encoding)
    source.errors = "xmlcharrefreplace"
    edits = TextEdits(source.text)
    add_html(edits, options.target)
    slots += edits.slots
    archive.replace(name, lambda: source.encode(xml_text(edits.result())))
