"""The forms by name, and what each must do."""

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
    """How lines are read and answers written."""

    def read(self, lines: Iterable[Line]) -> Iterator[Record]:
        """Every record; one that cannot be read says so in `problem`. Raises RunError if none of them can be."""

    def header(self) -> str:
        """What the output begins with; known once the first record has been read."""

    def write(self, record: Record, answer: str | None) -> str:
        """What the output says of a record; None: it has failed."""


def format_of(path: str) -> str | None:
    """The form that a file's name tells; None if it does not."""
    name = PurePath(path)
    if compression_of(path):
        name = name.with_suffix("")
    return _SUFFIXES.get(name.suffix.lower())


def compression_of(path: str) -> str:
    """ "gz", "zst" or "", by the file's name."""
    return COMPRESSIONS.get(PurePath(path).suffix.lower(), "")


def unreadable_reason(line: Line) -> str:
    """What is wrong with a line's bytes; "" if nothing is."""
    if line.is_too_long:
        return f"has {line.size} bytes, the limit of a line is {MAX_LINE_BYTES}"
    try:
        line.data.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"is not UTF-8: {error.reason} at byte {error.start}"
    return ""


def unknown_format(path: str, remedy: str) -> RunError:
    """The refusal of a name that does not tell its form."""
    return RunError(f"the form of {path} is not known by its name; {remedy}: {', '.join(FORMAT_NAMES)}")
