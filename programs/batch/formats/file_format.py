"""Names of the file formats, and their interface."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import Protocol

from programs.batch.inputs import MAX_LINE_BYTES, Line
from programs.record import Record, RunError

COMPRESSIONS = {".gz": "gz", ".zst": "zst"}
_SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "text",
    ".text": "text",
    ".srt": "srt",
    ".vtt": "vtt",
}
FORMAT_NAMES = ("jsonl", "csv", "tsv", "text", "srt", "vtt")


class FileFormat(Protocol):
    """Reads lines and writes answers."""

    def read(self, lines: Iterable[Line]) -> Iterator[Record]:
        """Yields every record. An invalid one has a `problem`. Raises RunError if the whole file is invalid."""

    def header(self) -> str:
        """Returns the output's header. Call it after the first record was read."""

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
