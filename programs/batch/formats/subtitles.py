"""SubRip (.srt) and WebVTT (.vtt). The text of each cue is answered, everything else is kept."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from programs.batch.formats.file_format import unreadable_reason
from programs.batch.inputs import MAX_LINE_BYTES, Line
from programs.record import Record

_ARROW = "-->"
_BLANK_LINES = re.compile(r"\n\s*\n")


class Subtitles:
    """Cues keep their number and time. A failed cue keeps its text."""

    def __init__(self, field: str, has_header: bool) -> None:
        self._field = field
        self._has_header = has_header
        self._header = ""

    def read(self, lines: Iterable[Line]) -> Iterator[Record]:
        """See FileFormat."""
        index = 0
        for block in _blocks(lines):
            if self._has_header and not self._header and not any(_ARROW in line.text for line in block):
                self._header = "\n".join(line.text for line in block) + "\n\n"
                continue
            yield self._record(index, block)
            index += 1

    def _record(self, index: int, block: list[Line]) -> Record:
        size = sum(line.size for line in block)
        problem = next(filter(None, map(unreadable_reason, block)), "")
        lines = [line.data.decode("utf-8", "replace") for line in block]
        at = next((at for at, line in enumerate(lines[:2]) if _ARROW in line), None)
        cue_header, said = ([], lines) if at is None else (lines[: at + 1], lines[at + 1 :])
        if not problem and (at is None or not "".join(said).strip()):
            return Record(index, block[0].number, verbatim="\n".join(lines), size=size)
        fields = {self._field: "\n".join(said)}
        return Record(index, block[0].number, fields, problem, size=size, cue_header="\n".join(cue_header))

    def header(self) -> str:
        """See FileFormat."""
        return self._header

    def write(self, record: Record, answer: str | None) -> str:
        """See FileFormat."""
        if record.verbatim is not None:
            return f"{record.verbatim}\n\n"
        text = answer if answer is not None else str(record.fields.get(self._field, ""))
        return f"{record.cue_header}\n{_BLANK_LINES.sub(chr(10), text).strip()}\n\n" if record.cue_header else ""


def _blocks(lines: Iterable[Line]) -> Iterator[list[Line]]:
    """Yields blocks of lines between blank lines. MAX_LINE_BYTES bounds a block."""
    block: list[Line] = []
    size = 0
    for line in lines:
        if block and (not line.data.strip() or size + line.size > MAX_LINE_BYTES):
            yield block
            block, size = [], 0
        if line.data.strip():
            block.append(line)
            size += line.size
    if block:
        yield block
