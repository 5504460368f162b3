"""Plain text: one text and one answer per line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from programs.batch.formats.file_format import unreadable_reason
from programs.batch.inputs import Line
from programs.record import Record


class Text:
    """Line n of the output answers line n of the input. It is empty if the line failed."""

    def __init__(self, field: str) -> None:
        self._field = field

    def read(self, lines: Iterable[Line]) -> Iterator[Record]:
        """See FileFormat."""
        for index, line in enumerate(lines):
            if problem := unreadable_reason(line):
                yield Record(index, line.number, problem=problem, size=line.size)
            elif not line.data.strip():
                yield Record(index, line.number, verbatim=line.text, size=line.size)
            else:
                yield Record(index, line.number, {self._field: line.text}, size=line.size)

    def header(self) -> str:
        """See FileFormat."""
        return ""

    def write(self, record: Record, answer: str | None) -> str:
        r"""See FileFormat. A line break inside an answer becomes \n."""
        text = record.verbatim if record.verbatim is not None else answer or ""
        return text.replace("\r\n", "\n").replace("\r", "\n").replace("\n", "\\n") + "\n"
