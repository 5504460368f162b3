"""CSV and TSV with a header."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator

from programs.batch.inputs import MAX_LINE_BYTES, Line
from programs.record import Record, RunError

_MAX_COLUMNS = 10_000
"""Maximum columns of a table."""


class Delimited:
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
        """See FileFormat."""
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
