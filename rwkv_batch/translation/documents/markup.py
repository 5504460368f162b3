"""HTML and Markdown. Only the texts are replaced; everything else stays byte for byte."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from dataclasses import dataclass

from rwkv_batch.translation.documents.document import (
    PLAIN_JOINER,
    Document,
    DocumentError,
    DocumentOptions,
    TextEdits,
    Unit,
    decode,
    slot,
    text_document,
    xml_text,
)
from rwkv_batch.translation.elements import TAG, is_protected, tag_name
from rwkv_batch.translation.markers import BREAK, MARK, MAX_MARKERS, Format, MarkerOptions, TooManyMarkersError, parse
from rwkv_batch.translation.segments import Split, has_letters

_CHARSET = re.compile(rb"""<meta\b[^>]{0,200}?charset\s*=\s*["']?([\w.:-]{1,40})""", re.IGNORECASE)
_XML_ENCODING = re.compile(rb"""^\s*<\?xml\b[^>]{0,100}?encoding\s*=\s*["']([\w.:-]{1,40})""")
_ATTRIBUTE = re.compile(r"""\s([\w:-]+)\s{0,9}=\s{0,9}(?:"([^"]*)"|'([^']*)')""")
_TEXT_ATTRIBUTES = frozenset("alt title placeholder aria-label".split())
_META_NAMES = frozenset("description og:title og:description twitter:title twitter:description".split())
_PLAIN_BLOCKS = ("title", "option")
"""Elements without tags in them."""
_ONE_TAG = re.compile(TAG)
_HEAD_BYTES = 4096


def read_html(data: bytes, options: DocumentOptions) -> Document:
    """Read a page. Its text between block tags, titles and descriptions are translated."""
    head = data[:_HEAD_BYTES]
    declared = _XML_ENCODING.search(head) or _CHARSET.search(head)
    name = declared[1].decode() if declared else ""
    source = decode(data, options.encoding, "" if name.lower().startswith("utf-") else name)
    source.errors = "xmlcharrefreplace"
    edits = TextEdits(source.text)
    add_html(edits, options.target)
    return text_document(source, edits, "<br>")


def add_html(edits: TextEdits, target: str, start: int = 0, end: int | None = None) -> None:
    """Add the texts of HTML between two positions. Raises DocumentError."""
    text = edits.text[start:end]
    try:
        flat, markers = parse(text, MarkerOptions(Format.HTML))
    except TooManyMarkersError:
        raise DocumentError(f"has more than {MAX_MARKERS} tags; split it") from None
    at = begin = start
    written = flat_begin = 0
    inline: list[_Attribute] = []
    used = iter(markers)
    block = ""
    for found in re.finditer(f"[{MARK}{BREAK}]", flat):
        at += found.start() - written
        written = found.end()
        raw = next(used).raw
        attributes = _attributes(edits, at, raw, target) if _ONE_TAG.fullmatch(raw) else []
        if found.group() == BREAK:
            _add_block(edits, begin, at, inline, flat[flat_begin : found.start()], block)
            block = tag_name(raw)
            begin, flat_begin, inline = at + len(raw), found.end(), []
            for attribute in attributes:
                attribute.add(edits)
        else:
            inline += attributes
        at += len(raw)
    _add_block(edits, begin, start + len(text), inline, flat[flat_begin:], block)


@dataclass(frozen=True, slots=True)
class _Attribute:
    """A text in a tag."""

    tag: str
    at: int
    """Position of the tag."""
    start: int
    end: int

    def add(self, edits: TextEdits) -> None:
        """Add it as a part of its own."""
        value = html.unescape(self.tag[self.start : self.end])
        edits.add(self.at + self.start, self.at + self.end, Unit(value, joiner=PLAIN_JOINER), _escaped)

    def add_within(self, edits: TextEdits, tags: dict[str, str]) -> None:
        """Add it as a part of a text. Its tag with the translation is stored in `tags`."""
        value = html.unescape(self.tag[self.start : self.end])

        def put(text: str) -> None:
            tag = tags.get(self.tag, self.tag)
            tags[self.tag] = tag.replace(self.tag[self.start : self.end], _escaped(text))

        if has_letters(value):
            edits.slots.append(slot(Unit(value, joiner=PLAIN_JOINER), put))


def _escaped(text: str) -> str:
    return html.escape(xml_text(text))


def _add_block(edits: TextEdits, start: int, end: int, attributes: list[_Attribute], text: str, block: str) -> None:
    """Add the text between two block tags, and its tags' texts. `text`: without tags and code. block: the first tag."""
    raw = edits.text[start:end]
    if not has_letters(html.unescape(text)):
        for attribute in attributes:
            attribute.add(edits)
        return
    tags: dict[str, str] = {}
    for attribute in attributes:
        attribute.add_within(edits, tags)

    def encode(text: str) -> str:
        for old, new in tags.items():
            text = text.replace(old, new)
        return xml_text(text)

    joiner = PLAIN_JOINER if block in _PLAIN_BLOCKS else ""
    edits.add(start, end, Unit(raw, Format.HTML, Split.WRAPPED, joiner=joiner), encode)


def _attributes(edits: TextEdits, at: int, tag: str, target: str) -> list[_Attribute]:
    """Return the texts of a tag's attributes. The page's language is changed."""
    if tag.startswith("</") or is_protected(tag):
        return []
    name = tag_name(tag)
    found = {one[1].lower(): one for one in _ATTRIBUTE.finditer(tag)}
    texts = []
    for key, one in found.items():
        start, end = one.span(2 if one[2] is not None else 3)
        if key in ("lang", "xml:lang") and name == "html":
            edits.change(at + start, at + end, html.escape(target))
        kind = found.get("name") or found.get("property") if name == "meta" and key == "content" else None
        if key in _TEXT_ATTRIBUTES or (kind is not None and (kind[2] or kind[3]) in _META_NAMES):
            texts.append(_Attribute(tag, at, start, end))
    return texts


_FRONT_MATTER = re.compile(r"\A---[ \t]*\r?\n(.*?)^(?:---|\.\.\.)[ \t]*\r?$", re.DOTALL | re.MULTILINE)
_FRONT_FIELD = re.compile(
    r"""^(?:title|subtitle|description|summary)[ \t]*:[ \t]+"""
    r"""(?:"([^"\\\n]+)"|([^\s"'|>\[{&*!#%@`\n][^\r\n:#]*))[ \t]*\r?$""",
    re.MULTILINE,
)
_INLINE = re.compile(
    r"(?P<code>(?P<ticks>`+)(?!`)[^\n]*?(?<!`)(?P=ticks)(?!`))"
    r"|(?P<escape>\\[!-/:-@\[-`{-~])"
    r"|(?P<image>!\[)|(?P<open>\[)"
    r"|(?P<close>\](?:\((?:[^()\s\n]|\([^()\s\n]*\))*(?:[ \t]+(?:\"[^\"\n]*\"|'[^'\n]*'))?[ \t]*\)|\[[^\]\n]*\])?)"
    r"|(?P<mark>\*\*|__|~~|(?<!\w)_(?=\w)|(?<=\w)_(?!\w)|\*)"
)
_BLOCK_START = re.compile(r"^(?:[#>+*-]|\d{1,9}(?=[.)]))(?=[.)]?\s)")
"""Beginning of a text that would be a list or a heading."""
_JOINER = "  \n"
_MAX_LINES = 200_000
_HARD_BREAK = re.compile(r"(?: {2,}|\\)$")


def read_markdown(data: bytes, options: DocumentOptions) -> Document:
    """Read a Markdown file: paragraphs, headings, list items and cells. Code and addresses stay.

    Raises DocumentError.
    """
    from markdown_it import MarkdownIt

    source = decode(data, options.encoding)
    edits = TextEdits(source.text)
    lines = [0, *(found.end() for found in re.finditer(r"\r\n|\r|\n", source.text)), *[len(source.text)] * 2]
    if len(lines) > _MAX_LINES:
        raise DocumentError(f"has more than {_MAX_LINES} lines; split it")
    parser = MarkdownIt("commonmark").enable("table")
    parser.core.ruler.disable("inline")  # only positions are needed
    blank = _add_front_matter(edits)
    text = re.sub(r"[^\r\n]", " ", source.text[:blank]) + source.text[blank:]
    cursor = (0, 0)
    kind = ""
    for token in parser.parse(text.replace("\r\n", "\n").replace("\r", "\n")):
        if token.type.endswith("_open"):
            kind = token.type
        if token.map is None:
            continue
        first, last = token.map
        if token.type == "html_block":
            add_html(edits, options.target, lines[first], lines[last])
        elif token.type == "inline":
            if cursor[0] != first:
                cursor = (first, lines[first])
            joiner = "" if kind == "paragraph_open" else PLAIN_JOINER
            cursor = (first, _add_lines(edits, token.content.split("\n"), lines, first, cursor[1], joiner))
    return text_document(source, edits, _JOINER)


def _add_front_matter(edits: TextEdits) -> int:
    """Add titles and descriptions of YAML before the text. Returns its end."""
    front = _FRONT_MATTER.match(edits.text)
    if front is None:
        return 0
    for found in _FRONT_FIELD.finditer(edits.text, *front.span(1)):
        group = 1 if found[1] else 2
        encode: Callable[[str], str] = _quoted_part if group == 1 else _plain_scalar
        value = found[group].rstrip()
        edits.add(found.start(group), found.start(group) + len(value), Unit(value, joiner=PLAIN_JOINER), encode)
    return front.end()


def _quoted_part(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _plain_scalar(text: str) -> str:
    return f'"{_quoted_part(text)}"' if re.search(r"""^[\W\d]|: |:$| #""", text) else text


def _add_lines(edits: TextEdits, contents: list[str], lines: list[int], first: int, at: int, joiner: str) -> int:
    """Add a block's lines, which end at hard breaks. Returns the end of the block in its last line.

    joiner: see `Unit`
    """
    begin = end = -1
    pieces: list[str] = []

    def flush() -> None:
        if pieces:
            shown, tags = _with_tags(" ".join(pieces))
            unit = Unit(shown, Format.TEXT, Split.WRAPPED, joiner=joiner)
            edits.add(begin, end, unit, lambda text: _without_tags(text, tags))
        pieces.clear()

    for number, content in enumerate(contents):
        line_start = max(at, lines[first + number]) if number == 0 else lines[first + number]
        wanted = _HARD_BREAK.sub("", content).strip()
        start = edits.text.find(wanted, line_start, lines[first + number + 1]) if wanted else -1
        if start < 0:  # a cell with an escaped bar, or a tab that was expanded
            flush()
            continue
        begin = start if not pieces else begin
        end = start + len(wanted)
        pieces.append(wanted)
        if _HARD_BREAK.search(content):
            flush()
    flush()
    return max(at, end)


def _with_tags(text: str) -> tuple[str, list[str]]:
    """Return the text with numbered tags, and what they stand for. The tags stand for links and emphasis."""
    tags: list[str] = []
    opened: list[tuple[str, int, int]] = []
    out: list[str] = []
    at = 0
    for found in _INLINE.finditer(text):
        out.append(text[at : found.start()])
        at = found.end()
        raw, kind = found.group(), found.lastgroup
        match = next((one for one in range(len(opened) - 1, -1, -1) if _closes(raw, opened[one][0])), None)
        can_open = kind == "mark" and match is None and at < len(text) and not text[at].isspace()
        if can_open or kind in ("image", "open"):
            opened.append((raw, len(out), at))
        elif match is not None and at - len(raw) > opened[match][2] and len(raw) > (kind == "close"):
            opener, index, _ = opened[match]
            del opened[match:]
            out[index], raw = f"<m{len(tags) // 2}>", f"</m{len(tags) // 2}>"
            tags += [opener, found.group()]
        out.append(raw)
    return "".join((*out, text[at:])), tags


def _closes(raw: str, opener: str) -> bool:
    return opener.endswith("[") if raw.startswith("]") else raw == opener


def _without_tags(text: str, tags: list[str]) -> str:
    def raw(found: re.Match[str]) -> str:
        number = 2 * int(found[2]) + bool(found[1])
        return tags[number] if number < len(tags) else found.group()

    return _BLOCK_START.sub(r"\\\g<0>", re.sub(r"<(/?)m(\d{1,6})>", raw, text))
