"""Small documents of each format, and a translator that marks each word."""

from __future__ import annotations

import io
import re
import zipfile

from rwkv_batch.translation.documents.document import Document, DocumentOptions, Unit
from rwkv_batch.translation.documents.formats import read_document
from rwkv_batch.translation.markers import Format, MarkerOptions
from rwkv_batch.translation.plan import TranslationCache, TranslationPlan, TranslationRequest
from rwkv_batch.translation.segments import Split

_KEPT = re.compile(r"<[^<>]*>|\{[^{}]*\}|%(?:\d\$)?[a-z@]|`[^`]*`|https?://\S+")


def marked(text: str) -> str:
    """Return a text whose words are marked, as a translation of it."""
    kept = iter([*_KEPT.findall(text), ""])
    return "".join(re.sub(r"[^\W\d_]+", r"ü\g<0>", part) + next(kept) for part in _KEPT.split(text))


def translated(unit: Unit) -> str:
    """Return the core's translation of a text; each word is marked."""
    body = unit.body
    request = TranslationRequest(
        texts=[unit.text],
        source="en",
        target="de",
        split=Split(body["split"]),
        markers=MarkerOptions(Format(body["format"])),
    )
    plan = TranslationPlan(request, 1000, TranslationCache(0))
    while queries := plan.missing():
        plan.add_answers({query: marked(query.text) for query in queries})
    return plan.results()[0].text


def read(data: bytes | str, name: str, target: str = "de", **options: object) -> Document:
    content = data.encode() if isinstance(data, str) else data
    return read_document(content, name, DocumentOptions(target=target, **options))  # type: ignore[arg-type]


def round_trip(
    data: bytes | str, name: str, target: str = "de", *, is_bilingual: bool = False, **options: object
) -> bytes:
    """Return the document with each text translated."""
    document = read(data, name, target, is_bilingual=is_bilingual, **options)
    return document.write([translated(unit) for unit in document.units], is_bilingual=is_bilingual)


def archive(parts: dict[str, str | bytes], stored: tuple[str, ...] = ()) -> bytes:
    """Return a ZIP file."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in parts.items():
            file.writestr(name, content, zipfile.ZIP_STORED if name in stored else None)
    return out.getvalue()


W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
PACKAGE = "http://schemas.openxmlformats.org/package/2006"
OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
DECLARATION = '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\n'


def docx(body: str, **more: str | bytes) -> bytes:
    """Return a Word file with these paragraphs."""
    relation = f'<Relationship Id="rId1" Type="{OFFICE}/officeDocument" Target="word/document.xml"/>'
    kind = "application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"
    types = (
        f'<Types xmlns="{PACKAGE}/content-types">'
        f'<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
        f'<Override PartName="/word/document.xml" ContentType="{kind}"/></Types>'
    )
    parts: dict[str, str | bytes] = {
        "[Content_Types].xml": DECLARATION + types,
        "_rels/.rels": f'{DECLARATION}<Relationships xmlns="{PACKAGE}/relationships">{relation}</Relationships>',
        "word/document.xml": f'{DECLARATION}<w:document xmlns:w="{W}" xmlns:r="{OFFICE}"><w:body>{body}</w:body>'
        "</w:document>",
    }
    return archive({**parts, **more})


CONTAINER = (
    '<container version="1.0" xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
    '<rootfile full-path="OEBPS/book.opf" media-type="application/oebps-package+xml"/></rootfiles></container>'
)
BOOK = (
    '<package xmlns="http://www.idpf.org/2007/opf" version="3.0" unique-identifier="id">'
    '<metadata xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:identifier id="id">urn:x</dc:identifier>'
    "<dc:title>A small book</dc:title><dc:language>en</dc:language></metadata><manifest>"
    '<item id="p" href="text%201.xhtml" media-type="application/xhtml+xml"/>'
    '<item id="n" href="toc.ncx" media-type="application/x-dtbncx+xml"/></manifest>'
    '<spine toc="n"><itemref idref="p"/></spine></package>'
)
NCX = (
    '<ncx xmlns="http://www.daisy.org/z3986/2005/ncx/" version="2005-1"><navMap><navPoint id="a"><navLabel>'
    '<text>First chapter</text></navLabel><content src="text%201.xhtml"/></navPoint></navMap></ncx>'
)


def epub(page: str, **more: str | bytes) -> bytes:
    """Return a book of one page."""
    parts: dict[str, str | bytes] = {
        "mimetype": "application/epub+zip",
        "META-INF/container.xml": CONTAINER,
        "OEBPS/book.opf": BOOK,
        "OEBPS/toc.ncx": NCX,
        "OEBPS/text 1.xhtml": page,
    }
    return archive({**parts, **more}, stored=("mimetype",))
