"""Files of lines: plain text, subtitles and tables."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from typing import Literal

from rwkv_batch.translation.documents.document import (
    Document,
    DocumentError,
    DocumentOptions,
    Slot,
    Source,
    TextEdits,
    Unit,
    decode,
    slot,
    text_document,
)
from rwkv_batch.translation.segments import Split, has_letters

_MAX_LINE = 42
"""Characters of a subtitle's line."""
_MAX_CUE_LINES = 3
_GAP = re.compile(r"\s(?![^<>]{0,64}>)|(?<=[，。！？、；：])")
_LINE = re.compile(r"[^\r\n]+")
_CUE_TIME = re.compile(r"^[^\r\n]*-->[^\r\n]*(?=[\r\n]|\Z)", re.MULTILINE)
_BLANK_LINE = re.compile(r"(?>\r\n?|\n)[^\S\r\n]*(?:\r\n?|\n)")
_NUMBER_LINE = re.compile(r"(?>\r\n?|\n)[^\S\r\n]*\d+[^\S\r\n]*(?>\r\n?|\n)?\Z")
_ASS_EVENT = re.compile(r"^(?:Dialogue|Comment)\s*:[^\r\n]*", re.MULTILINE)
_ASS_FORMAT = re.compile(r"^\[Events\][^\[]*?^Format\s*:([^\r\n]*)", re.MULTILINE | re.DOTALL | re.IGNORECASE)


def read_text(data: bytes, options: DocumentOptions) -> Document:
    """Read a text. Each line is translated alone, so the lines stay."""
    source = decode(data, options.encoding)
    edits = TextEdits(source.text)
    for found in _LINE.finditer(source.text):
        edits.add(*found.span())
    return text_document(source, edits, "\n")


def read_subtitles(data: bytes, options: DocumentOptions) -> Document:
    """Read SubRip or WebVTT. Times, settings, notes and styles stay. Raises DocumentError."""
    source = decode(data, options.encoding)
    edits = TextEdits(source.text)
    times = list(_CUE_TIME.finditer(source.text))
    if not times:
        raise DocumentError("has no cue: a line with --> and the times; check its format")
    newline = "\r\n" if "\r\n" in source.text else "\n"
    for index, found in enumerate(times):
        start = found.end()
        limit = times[index + 1].start() if index + 1 < len(times) else len(source.text)
        blank = _BLANK_LINE.search(source.text, start, limit)
        end = blank.start() if blank else limit
        if end == limit and (number := _NUMBER_LINE.search(source.text, start, end)) is not None:
            end = number.start()
        _add_cue(edits, start, end, newline)
    return text_document(source, edits, "\n")


def _add_cue(edits: TextEdits, start: int, end: int, newline: str) -> None:
    raw = edits.text[start:end]
    start += len(raw) - len(raw.lstrip())
    end -= len(raw) - len(raw.rstrip())
    lines = [line.strip() for line in edits.text[start:end].splitlines()]
    if any(re.match(r"(?:<[^<>]*>)?[-–—]\s?\S", line) for line in lines[1:]):  # a line per speaker
        edits.add(start, end, Unit("\n".join(lines)), lambda text: newline.join(_no_blank_lines(text)))
    else:
        edits.add(
            start,
            end,
            Unit(" ".join(lines)),
            lambda text: newline.join(_cue_lines(text, min(len(lines), _MAX_CUE_LINES))),
        )


def _no_blank_lines(text: str) -> list[str]:
    return [line for line in text.replace("-->", "→").splitlines() if line.strip()]


def _cue_lines(text: str, count: int) -> list[str]:
    """Return a cue's lines: the same number as before if the text is long."""
    found: list[str] = []
    for line in _no_blank_lines(text):
        found += _balanced(line, count) if count > 1 and len(line) > _MAX_LINE // 2 else [line]
    return found


def _balanced(line: str, count: int) -> list[str]:
    """Return a line as several of like length: at spaces, or between characters where there are none."""
    out = []
    for left in range(count, 1, -1):
        middle = len(line) // left
        gaps = [found.start() for found in _GAP.finditer(line) if found.start()]
        if not gaps:
            break
        at = min(gaps, key=lambda gap: abs(gap - middle))
        out.append(line[:at].strip())
        line = line[at:].strip()
    return [one for one in (*out, line) if one]


def read_ass(data: bytes, options: DocumentOptions) -> Document:
    r"""Read SubStation Alpha. Styles, times and effects stay; `\N` is a line break."""
    source = decode(data, options.encoding)
    edits = TextEdits(source.text)
    fields = _ASS_FORMAT.search(source.text)
    commas = fields[1].count(",") if fields else 9
    for found in _ASS_EVENT.finditer(source.text):
        parts = found.group().split(",", commas)
        if len(parts) <= commas or found.group().startswith("Comment") or re.search(r"\\p[1-9]", parts[-1]):
            continue  # \p begins a drawing
        start = found.end() - len(parts[-1])
        text = parts[-1].replace("\\N", "<br0/>").replace("\\n", "<br1/>").replace("\\h", "\u00a0")
        edits.add(start, found.end(), Unit(text), _ass_text)
    return text_document(source, edits, "<br0/>")


def _ass_text(text: str) -> str:
    text = text.replace("\r", "").replace("\n", "\\N").replace("\u00a0", "\\h")
    return text.replace("<br0/>", "\\N").replace("<br1/>", "\\n")


_MAX_CELL = 1 << 24


def read_table(data: bytes, options: DocumentOptions, delimiter: str = "") -> Document:
    """Read CSV or TSV. The cells of one column are translated; a bilingual file has one more column.

    Raises DocumentError.
    """
    source = decode(data, options.encoding)
    delimiter = delimiter or _delimiter(source.text)
    csv.field_size_limit(_MAX_CELL)
    try:
        rows = list(csv.reader(io.StringIO(source.text, newline=""), delimiter=delimiter))
    except csv.Error as error:
        raise DocumentError(f"is not a table: {error}; save it again as CSV in UTF-8") from None
    header = next((row for row in rows if row), [])
    if not header:
        raise DocumentError("is an empty table; its first line must name the columns")
    column = options.column or (header[0] if len(header) == 1 else "text")
    if column not in header:
        given = "no column is given" if not options.column else f"there is no column {column!r}"
        raise DocumentError(f"{given}; name one of {', '.join(map(repr, header[:50]))}")
    index = header.index(column)
    slots: list[Slot] = []
    for row in rows[rows.index(header) + 1 :]:
        if options.is_bilingual and len(row) == len(header):
            row.append("")
        if index < len(row) and has_letters(row[index]):
            slots.append(
                slot(Unit(row[index], split=Split.NEWLINES), _cell_writer(row, -1 if options.is_bilingual else index))
            )
    if options.is_bilingual:
        header.append(f"{column} ({options.target})")
    return Document(slots, lambda: _written(source, rows, delimiter), [*source.notes, f"column {column!r}"])


def _cell_writer(row: list[str], index: int) -> Callable[[str], None]:
    def put(text: str) -> None:
        row[index] = text

    return put


def _delimiter(text: str) -> str:
    """Return the delimiter of a CSV: the most frequent one of the first line."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    return max(",;\t|", key=first.count)


def _written(source: Source, rows: list[list[str]], delimiter: str) -> bytes:
    out = io.StringIO(newline="")
    newline = "\r\n" if "\r\n" in source.text else "\n"
    first = next((line for line in source.text.splitlines() if line.strip()), "")
    is_quoted = re.fullmatch(r'"[^"]*"(?:."[^"]*")*', first) is not None
    quoting: Literal[0, 1] = csv.QUOTE_ALL if is_quoted else csv.QUOTE_MINIMAL
    csv.writer(out, delimiter=delimiter, lineterminator=newline, quoting=quoting).writerows(rows)
    text = out.getvalue()
    return source.encode(text if source.text.endswith(("\n", "\r")) else text.removesuffix(newline))
