"""Translators' XML: XLIFF 1.2 and 2, TMX, TBX and Android's strings."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

from lxml import etree

from rwkv_batch.translation.documents.document import (
    AUTO,
    Document,
    DocumentError,
    DocumentOptions,
    Slot,
    Unit,
    slot,
    unescaped,
)
from rwkv_batch.translation.documents.plurals import plural_units
from rwkv_batch.translation.documents.xml_files import (
    XML,
    fill,
    has_text,
    inline_slots,
    inline_text,
    inline_unit,
    local,
    parse_xml,
    xml_bytes,
)
from rwkv_batch.translation.languages import language_name
from rwkv_batch.translation.segments import Split

_PAIRS = frozenset("g mrk pc hi".split())
"""Inline elements with text. Others stand for code of another format."""
_OPEN_STATES = frozenset("new needs-translation needs-adaptation needs-l10n initial".split())


def read_xliff(data: bytes, options: DocumentOptions) -> Document:
    """Read XLIFF 1.2 or 2. Segments without a translation get one; others stay. Raises DocumentError."""
    tree = parse_xml(data)
    root = tree.getroot()
    version = root.get("version", "")
    if local(root) != "xliff" or version[:2] not in ("1.", "2."):
        raise DocumentError(f"is not XLIFF 1.2 or 2: its root is {local(root)} {version}; save it as XLIFF")
    is_new = version.startswith("2")
    name, kind = ("trgLang", "{*}segment") if is_new else ("target-language", "{*}trans-unit")
    notes: list[str] = []
    slots: list[Slot] = []
    for file in [root] if is_new else root.iter("{*}file"):
        given = file.get(name, "")
        if given and language_name(given) != language_name(options.target) and _has_translations(file, kind):
            notes.append(f"a file with translations into {given[:40]!r} stays")
            continue
        file.set(name, options.target)
        slots += _xliff_slots(file, kind, is_new)
    if notes and not slots:
        raise DocumentError(f"{notes[0]}; ask for that language, or remove its translations")
    return Document(slots, lambda: xml_bytes(tree, data), notes)


def _has_translations(file: Any, kind: str) -> bool:
    """Return whether a file has a segment with a finished translation."""
    for part in file.iter(kind):
        source, target = part.find("{*}source"), part.find("{*}target")
        if source is not None and target is not None and not _is_open(part, source, target):
            return True
    return False


def _xliff_slots(file: Any, kind: str, is_new: bool) -> Iterator[Slot]:
    """Yield the segments that need a translation."""
    for part in file.iter(kind):
        source, target = part.find("{*}source"), part.find("{*}target")
        if source is None or _is_kept(part) or not _is_open(part, source, target):
            continue
        segmented = part.find("{*}seg-source")
        source = source if segmented is None else segmented
        notes = [*part.iterchildren("{*}note"), *part.itersiblings("{*}notes", preceding=True)]
        note = " ".join("".join(one.itertext()).strip() for one in notes)
        put = partial(_write_target, part, source, is_new)
        yield from inline_slots(source, lambda one: _is_code(one) or one.get("translate") == "no", put, note)


def _is_code(element: Any) -> bool:
    return local(element) not in _PAIRS


def _is_kept(element: Any) -> bool:
    """Return whether an element or one around it must not be translated."""
    for one in (element, *element.iterancestors()):
        if (value := one.get("translate")) is not None:
            return bool(value == "no")
    return False


def _is_open(part: Any, source: Any, target: Any) -> bool:
    """Return whether a segment needs a translation."""
    if part.get("approved") == "yes" or part.get("state") in ("final", "reviewed"):
        return False
    text = "" if target is None else "".join(target.itertext()).strip()
    state = part.get("state") or (None if target is None else target.get("state"))
    return not text or state in _OPEN_STATES or text == "".join(source.itertext()).strip()


def _write_target(part: Any, source: Any, is_new: bool, text: str, codes: list[Any]) -> None:
    target = part.find("{*}target")
    if target is None:
        target = etree.Element(f"{{{etree.QName(source).namespace}}}target" if "}" in source.tag else "target")
        target.tail = source.tail
        source.addnext(target)
    tail = target.tail
    fill(target, text, deepcopy(codes))
    target.tail = tail
    if source.get(f"{XML}space"):
        target.set(f"{XML}space", source.get(f"{XML}space"))
    if is_new:
        part.set("state", "translated")
    else:
        target.set("state", "needs-review-translation")


def read_tmx(data: bytes, options: DocumentOptions) -> Document:
    """Read a translation memory. Each entry without the language gets a translation. Raises DocumentError."""
    tree = parse_xml(data)
    root = tree.getroot()
    if local(root) != "tmx":
        raise DocumentError(f"is not TMX: its root is {local(root)!r}; save it as TMX")
    header = root.find("header")
    source_language = "*all*" if header is None else header.get("srclang", "*all*")
    slots: list[Slot] = []
    for entry in root.iter("tu"):
        variants = list(entry.iterchildren("tuv"))
        languages = [one.get(f"{XML}lang") or one.get("lang") or "" for one in variants]
        wanted = entry.get("srclang", source_language).lower()
        index = next((i for i, one in enumerate(languages) if wanted == "*all*" or one.lower() == wanted), None)
        target = language_name(options.target)
        if index is None or (segment := variants[index].find("seg")) is None or target in map(language_name, languages):
            continue
        slots += inline_slots(segment, _is_code, partial(_write_variant, variants[index], options.target))
    return Document(slots, lambda: xml_bytes(tree, data))


def _write_variant(source: Any, language: str, text: str, codes: list[Any]) -> None:
    made = etree.Element("tuv", {f"{XML}lang": language})
    fill(etree.SubElement(made, "seg"), text, deepcopy(codes))
    made.tail = source.tail
    source.getparent()[-1].addnext(made)


def read_tbx(data: bytes, options: DocumentOptions) -> Document:
    """Read a term base of TBX 2 or 3. Each entry without the language gets its first term's. Raises DocumentError."""
    tree = parse_xml(data)
    root = tree.getroot()
    if local(root) not in ("martif", "tbx"):
        raise DocumentError(f"is not TBX: its root is {local(root)!r}, not martif or tbx; save it as TBX")
    wanted = root.get(f"{XML}lang", "") if options.source == AUTO else options.source
    slots: list[Slot] = []
    for entry in root.iter("{*}termEntry", "{*}conceptEntry"):
        sections = [one for one in entry if local(one) in ("langSet", "langSec")]
        by_language = {language_name(one.get(f"{XML}lang", "")): one for one in reversed(sections)}
        source = by_language.get(language_name(wanted), sections[0] if sections else None)
        term = None if source is None else source.find(".//{*}term")
        if source is None or term is None or language_name(options.target) in by_language:
            continue
        note = " ".join(" ".join(one.itertext()).strip() for one in entry if local(one) in ("descrip", "descripGrp"))
        slots += inline_slots(term, _is_code, partial(_write_term, source, term, options.target), note)
    return Document(slots, lambda: xml_bytes(tree, data))


def _write_term(source: Any, term: Any, language: str, text: str, codes: list[Any]) -> None:
    made = parent = etree.Element(source.tag, {f"{XML}lang": language}, nsmap=source.nsmap)
    around = list(itertools.takewhile(lambda one: one is not source, term.iterancestors()))
    for element in reversed(around):
        parent = etree.SubElement(parent, element.tag)
    fill(etree.SubElement(parent, term.tag), text, deepcopy(codes))
    made.tail = source.tail
    source.addnext(made)


_ANDROID_NUMBER = re.compile(r"%(?:1\$)?d")
_ANDROID_ESCAPE = re.compile(r"""\\(u[0-9a-fA-F]{4}|.)|(")""", re.DOTALL)


def read_android(data: bytes, options: DocumentOptions) -> Document:
    """Read Android's strings.xml: strings, arrays and plurals of the language. Raises DocumentError."""
    tree = parse_xml(data)
    root = tree.getroot()
    if local(root) != "resources":
        raise DocumentError(f"is not a file of Android's strings: its root is {local(root)!r}, not resources")
    slots: list[Slot] = []
    for element in root:
        if element.get("translatable") == "false":
            continue
        if local(element) == "string":
            slots += _android_slots(element)
        elif local(element) == "string-array":
            for item in element.iterchildren("item"):
                slots += _android_slots(item)
        elif local(element) == "plurals":
            slots += _android_plurals(element, options.target)
    return Document(slots, lambda: xml_bytes(tree, data))


class _AndroidText(NamedTuple):
    unit: Unit
    codes: list[Any]
    is_quoted: bool
    """Whether it is in quotation marks, which keep its white space and are not shown."""

    def fill(self, element: Any, text: str, *, copies: bool = False) -> None:
        """Write a translation into an element."""
        mark = '"' * self.is_quoted
        fill(element, f"{mark}{_android_escaped(text)}{mark}", deepcopy(self.codes) if copies else self.codes)


def _android_unit(element: Any) -> _AndroidText | None:
    raw, codes = inline_text(element, lambda one: local(one) == "g" or one.get("translatable") == "false")
    is_quoted = any(found[2] for found in _ANDROID_ESCAPE.finditer(raw))
    text = unescaped(raw, _ANDROID_ESCAPE, {"n": "<br/>", "t": "\t"})
    if not has_text(text) or text.lstrip().startswith(("@string/", "?attr/")):
        return None
    note = element.getprevious()
    is_note = note is not None and note.tag is etree.Comment
    about = (note.text or "").strip() if is_note else element.get("name", "")
    return _AndroidText(inline_unit(text, about, Split.NEWLINES), codes, is_quoted)


def _android_escaped(text: str) -> str:
    """Escape the text outside of tags as Android requires."""
    parts = re.split(r"(<[^<>]*>)", text)
    parts[::2] = [re.sub(r"""(?=['"\\])""", r"\\", part) for part in parts[::2]]
    return re.sub(r"^([@?])", r"\\\1", "".join(parts)).replace("<br/>", "\\n")


def _android_slots(element: Any) -> Iterator[Slot]:
    if (found := _android_unit(element)) is not None:
        yield slot(found.unit, lambda text: found.fill(element, text))


def _android_plurals(element: Any, language: str) -> Iterator[Slot]:
    """Yield the plural's forms. Items of categories that the language lacks are removed."""
    items = {item.get("quantity"): item for item in element.iterchildren("item")}
    other = items.get("other")
    if other is None or (plural := _android_unit(other)) is None:
        return
    singular = _android_unit(items.get("one", other)) or plural
    units, finish = plural_units(singular.unit, plural.unit, language, _ANDROID_NUMBER)

    def put(texts: Any) -> None:
        forms = finish(texts)
        if not forms:
            return
        template, tail, end = deepcopy(other), element[0].tail, element[-1].tail
        for item in items.values():
            element.remove(item)
        for category, text in forms.items():
            item = deepcopy(template)
            item.set("quantity", category)
            (singular if category == "one" else plural).fill(item, text, copies=True)
            item.tail = tail
            element.append(item)
        element[-1].tail = end

    yield Slot(units, put)
