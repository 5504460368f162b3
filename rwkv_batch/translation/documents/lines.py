"""Files of lines: plain text, subtitles and tables."""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from rwkv_batch.translation.documents.document import (
    ColumnError,
    Document,
    DocumentError,
    DocumentOptions,
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
_CUE_TIME = re.compile(r"^[^\S\r\n]*+\d[\d:.,]*+[^\S\r\n]*+-->[^\r\n]*(?=[\r\n]|\Z)", re.MULTILINE)
_NO_CUES = re.compile(
    r"(?:\A|(?>\r\n?|\n)[^\S\r\n]*+(?>\r\n?|\n))(?:NOTE|STYLE|REGION)(?=\s|\Z)"
    r"[^\r\n]*+(?:(?>\r\n?|\n)(?![^\S\r\n]*+(?:[\r\n]|\Z))[^\r\n]*+)*+"
)
"""WebVTT's blocks without cues. A note may have commented cues."""
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
    notes = [found.span() for found in _NO_CUES.finditer(source.text)]
    times = [found for found in _CUE_TIME.finditer(source.text) if not _is_within(notes, found.start())]
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


def _is_within(spans: list[tuple[int, int]], at: int) -> bool:
    """Return whether a position is in one of these parts, which are in order."""
    index = bisect_right(spans, (at, sys.maxsize)) - 1
    return index >= 0 and at < spans[index][1]


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


_MAX_COLUMNS, _MAX_ROWS = 10_000, 1_000_000


class _Cell(NamedTuple):
    start: int
    end: int
    text: str
    is_quoted: bool


def read_table(data: bytes, options: DocumentOptions, delimiter: str = "") -> Document:
    """Read CSV or TSV. The cells of one column are translated; a bilingual file has one more column.

    Raises DocumentError.
    """
    source = decode(data, options.encoding)
    delimiter = delimiter or _delimiter(source.text)
    edits = TextEdits(source.text)
    rows = _rows(source.text, delimiter)
    header = next(rows, [])
    if not header:
        raise DocumentError("is an empty table; its first line must name the columns")
    names = [cell.text for cell in header]
    column = options.column or (names[0] if len(names) == 1 else "text")
    if column not in names:
        given = "no column is given" if not options.column else f"there is no column {column!r}"
        raise ColumnError(f"{given}; name one of {', '.join(map(repr, names[:50]))}")
    index, place = names.index(column), len(names) if options.is_bilingual else -1
    for row in rows:
        if index < len(row) and has_letters(row[index].text):
            _add_cell(edits, row, index, place, delimiter)
        elif place >= 0 and len(row) >= place:
            edits.change(row[place - 1].end, row[place - 1].end, delimiter)
    if options.is_bilingual:
        edits.change(header[-1].end, header[-1].end, delimiter + _cell(f"{column} ({options.target})", header[index]))
    return Document(edits.slots, lambda: source.encode(edits.result()), [*source.notes, f"column {column!r}"])


def _add_cell(edits: TextEdits, row: list[_Cell], index: int, place: int, delimiter: str) -> None:
    """Add a cell. Its translation replaces it, or becomes the cell at `place`."""
    cell = row[index]
    unit = Unit(cell.text, split=Split.NEWLINES)
    if place < 0:
        edits.add(cell.start, cell.end, unit, lambda text: _cell(text, cell, delimiter))
        return
    end = row[min(place, len(row)) - 1].end
    missing = delimiter * (place - len(row))
    edits.slots.append(
        slot(unit, lambda text: edits.change(end, end, missing + delimiter + _cell(text, cell, delimiter)))
    )


def _cell(text: str, like: _Cell, delimiter: str = ",") -> str:
    """Return a cell's text as the file has it. It is quoted if the other cell is, or if it must be."""
    is_quoted = like.is_quoted or any(mark in text for mark in (delimiter, '"', "\n", "\r"))
    return '"' + text.replace('"', '""') + '"' if is_quoted else text


def _rows(text: str, delimiter: str) -> Iterator[list[_Cell]]:
    """Yield the rows that are not empty. Raises DocumentError."""
    end = re.escape(delimiter)
    cell = re.compile(rf'"((?:[^"]++|"")*+)(?:"|\Z)([^{end}\r\n]*+)|[^{end}\r\n]*+')
    at, row, count = 0, list[_Cell](), 0
    while at <= len(text):
        found = cell.match(text, at)
        assert found is not None, "a cell may be empty"
        is_quoted = found[1] is not None
        value = found[1].replace('""', '"') + found[2] if is_quoted else found.group()
        row.append(_Cell(*found.span(), value, is_quoted))
        if len(row) > _MAX_COLUMNS:
            raise DocumentError(f"is not a table: a row has more than {_MAX_COLUMNS} cells; check its quotation marks")
        at = found.end() + 1
        if text[at - 1 : at] == delimiter:
            continue
        if len(row) > 1 or row[0].start < row[0].end:
            count += 1
            if count > _MAX_ROWS:
                raise DocumentError(f"has more than {_MAX_ROWS} rows; split it")
            yield row
        row = []
        at += text[at - 1 : at + 1] == "\r\n"


def _delimiter(text: str) -> str:
    """Return the delimiter of a CSV: the most frequent one of the first line."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    return max(",;\t|", key=first.count)
