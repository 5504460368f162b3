"""File formats: a reader and a writer per format, and how they are chosen."""

from __future__ import annotations

import csv
import io
import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePath
from typing import Any, Protocol

from programs.batch.inputs import MAX_LINE_BYTES, Line
from programs.record import Record, RunError, json_line

COMPRESSIONS = {".gz": "gz", ".zst": "zst"}
_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv", ".txt": "text", ".text": "text"}
FORMAT_NAMES = ("jsonl", "csv", "tsv", "text")


class FileFormat(Protocol):
    """Reads lines and writes answers."""

    @abstractmethod
    def read(self, lines: Iterable[Line]) -> Iterator[Record]:
        """Yields every record. An invalid one has a `problem`. Raises RunError if the whole file is invalid."""

    def header(self) -> str:
        """Returns the output's header. Call it after the first record was read."""
        return ""

    @abstractmethod
    def write(self, record: Record, answer: str | None) -> str:
        """Formats a record's output. `answer` None: the record failed."""


def format_of(path: str) -> str | None:
    """Returns the format of a file name, or None."""
    name = PurePath(path)
    if compression_of(path):
        name = name.with_suffix("")
    return _SUFFIXES.get(name.suffix.lower())


def compression_of(path: str) -> str:
    """Returns "gz", "zst" or "" by the file's name."""
    return COMPRESSIONS.get(PurePath(path).suffix.lower(), "")


def unreadable_reason(line: Line) -> str:
    """Returns the fault in a line's bytes, or ""."""
    if line.is_too_long:
        return f"has {line.size} bytes, the limit of a line is {MAX_LINE_BYTES}"
    try:
        line.data.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"is not UTF-8: {error.reason} at byte {error.start}"
    return ""


def unknown_format(path: str, remedy: str) -> RunError:
    """Returns the error for a name without a known format."""
    return RunError(f"the format of {path} cannot be seen in its name; {remedy}: {', '.join(FORMAT_NAMES)}")


MAX_DEPTH = 200
"""Maximum nesting of a line. Deeper values could be read but not written."""


class Jsonl(FileFormat):
    """Objects keep their fields and get one more."""

    def __init__(
        self, field: str, out_field: str, is_json: bool = False, check: Callable[[bytes], str] = lambda data: ""
    ) -> None:
        """`is_json`: answers are JSON values. `check` returns why a line must not be parsed, or ""."""
        self._check = check
        self._is_json = is_json
        self._field = field
        self._out_field = out_field

    def read(self, lines: Iterable[Line]) -> Iterator[Record]:
        """See FileFormat. Empty lines are skipped."""
        index = 0
        for line in lines:
            if not line.data.strip():
                continue
            fields, problem = self._parsed(line)
            yield Record(index, line.number, fields, problem, size=line.size)
            index += 1

    def _parsed(self, line: Line) -> tuple[dict[str, Any], str]:
        if problem := unreadable_reason(line) or self._check(line.data):
            return {}, problem
        try:
            value = json.loads(line.data.decode())  # as bytes they may be UTF-16, which `check` does not read
        except (ValueError, RecursionError) as error:
            return {}, f"is not JSON: {error}"
        if isinstance(value, str):
            value = {self._field: value}
        if is_too_deep(value):
            return {}, f"has more than {MAX_DEPTH} nested lists and objects"
        if not isinstance(value, dict):
            return {}, f"must be a JSON object or a text, got {type(value).__name__}"
        try:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError:
            return {}, "has a lone surrogate, which UTF-8 cannot encode"
        except ValueError:
            return {}, "has a number that JSON cannot write, like NaN or one beyond 1e308"
        return value, ""

    def write(self, record: Record, answer: str | None) -> str:
        """See FileFormat. A failed record is in the error file only."""
        if answer is None:
            return ""
        value = json.loads(answer) if self._is_json else answer
        return json_line({**record.fields, self._out_field: value})


def is_too_deep(value: Any) -> bool:
    """Whether a JSON value is nested deeper than MAX_DEPTH."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inside = [one for one in level if isinstance(one, dict | list)]
        if not inside:
            return False
        level = [one for outer in inside for one in (outer.values() if isinstance(outer, dict) else outer)]
    return True


_MAX_COLUMNS = 10_000
"""Maximum columns of a table."""


class Delimited(FileFormat):
    """A table. Its columns are kept and one is added."""

    def __init__(self, delimiter: str, field: str, out_field: str) -> None:
        self._delimiter = delimiter
        self._field = field
        self._out_field = out_field
        self._columns: list[str] = []

    def read(self, lines: Iterable[Line]) -> Iterator[Record]:
        """See FileFormat."""
        csv.field_size_limit(MAX_LINE_BYTES)
        counted = _LineCounter(lines)
        rows = csv.reader(counted, delimiter=self._delimiter)
        try:
            self._columns = self._header(next(rows, []))
        except csv.Error as error:
            raise RunError(f"the table's first line, which must name the columns, cannot be read: {error}") from None
        index = 0
        while True:
            begins, counted.size, counted.is_cut = counted.number + 1, 0, False
            problem, row = "", None
            try:
                row = next(rows, None)
                if row is None:
                    return
                if not row:
                    continue
            except csv.Error as error:
                problem = f"is not a row of the table: {error}"
            if counted.is_cut:
                problem = f"has a line of more than {MAX_LINE_BYTES} bytes, which is the limit"
            fields, problem = self._fields(row or [], problem)
            yield Record(index, begins, fields, problem, size=counted.size)
            index += 1

    def _fields(self, row: list[str], problem: str) -> tuple[dict[str, str], str]:
        if not problem and len(row) != len(self._columns):
            problem = f"has {len(row)} columns, the header has {len(self._columns)}"
        try:
            "".join(row).encode()
        except UnicodeEncodeError:
            problem = problem or "is not UTF-8"
        return ({}, problem) if problem else (dict(zip(self._columns, row, strict=True)), "")

    def _header(self, columns: list[str]) -> list[str]:
        try:
            "".join(columns).encode()
        except UnicodeEncodeError:
            raise RunError("the table's first line, which names its columns, is not UTF-8; convert the file") from None
        if not columns:
            raise RunError("the table is empty; its first line must name the columns")
        if len(columns) > _MAX_COLUMNS or len(set(columns)) != len(columns):
            raise RunError(f"the table's header names a column twice, or more than {_MAX_COLUMNS}: {columns[:20]}")
        if self._out_field in columns:
            raise RunError(f"the table has a column {self._out_field!r} already; give another --out-field")
        return columns

    def header(self) -> str:
        return self._row([*self._columns, self._out_field])

    def write(self, record: Record, answer: str | None) -> str:
        """See FileFormat. A failed row is in the error file only."""
        return "" if answer is None else self._row([*record.fields.values(), answer])

    def _row(self, cells: Iterable[str]) -> str:
        text = io.StringIO()
        csv.writer(text, delimiter=self._delimiter, lineterminator="\n").writerow(cells)
        return text.getvalue()


class _LineCounter(Iterator[str]):
    """Lines for the csv module, with a counter."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self._lines = iter(lines)
        self.number = self.size = 0
        self.is_cut = False
        """Whether a line was truncated."""

    def __next__(self) -> str:
        line = next(self._lines)
        self.number, self.size = line.number, self.size + line.size
        self.is_cut |= line.is_too_long
        return line.text + "\n"


class Text(FileFormat):
    """Line n of the output answers line n of the input. It is empty if the line failed."""

    def __init__(self, field: str) -> None:
        self._field = field

    def read(self, lines: Iterable[Line]) -> Iterator[Record]:
        for index, line in enumerate(lines):
            if problem := unreadable_reason(line):
                yield Record(index, line.number, problem=problem, size=line.size)
            elif not line.data.strip():
                yield Record(index, line.number, verbatim=line.text, size=line.size)
            else:
                yield Record(index, line.number, {self._field: line.text}, size=line.size)

    def write(self, record: Record, answer: str | None) -> str:
        r"""See FileFormat. A line break inside an answer becomes \n."""
        text = record.verbatim if record.verbatim is not None else answer or ""
        return text.replace("\r\n", "\n").replace("\r", "\n").replace("\n", "\\n") + "\n"


def make_format(name: str, field: str, out_field: str, is_json: bool = False) -> FileFormat:
    """Creates the format of that name. `is_json`: answers are JSON values."""
    match name:
        case "jsonl":
            return Jsonl(field, out_field, is_json)
        case "csv":
            return Delimited(",", field, out_field)
        case "tsv":
            return Delimited("\t", field, out_field)
        case _:
            return Text(field)


def combine_formats(source: str, target: str, field: str, out_field: str, is_json: bool = False) -> FileFormat:
    """Combines an input format with the same output format or JSON Lines. Raises RunError for other pairs."""
    if source == target:
        return make_format(source, field, out_field, is_json)
    if target != "jsonl":
        raise RunError(f"the input is {source}: the output must be {source} too, or jsonl, not {target}")
    return _AsJsonl(make_format(source, field, out_field), out_field, is_json)


class _AsJsonl(Jsonl):
    """Writes another format's records as JSON Lines with their indexes."""

    def __init__(self, source: FileFormat, out_field: str, is_json: bool) -> None:
        super().__init__("", out_field, is_json)
        self._source = source

    def read(self, lines: Iterable[Line]) -> Iterator[Record]:
        """See FileFormat. Verbatim text is dropped."""
        for record in self._source.read(lines):
            record.fields = {"index": record.index, **record.fields}
            yield record

    def write(self, record: Record, answer: str | None) -> str:
        return "" if record.verbatim is not None else super().write(record, answer)
