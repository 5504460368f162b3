"""From a form's name to its reader and writer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from bulk.formats.delimited import Delimited
from bulk.formats.form import Form
from bulk.formats.jsonl import Jsonl
from bulk.formats.subtitles import Subtitles
from bulk.formats.text import Text
from bulk.inputs import Line
from bulk.records import Record, RunError


def make_form(name: str, field: str, out_field: str, is_json: bool = False) -> Form:
    """The form of that name; `is_json`: answers are JSON values."""
    match name:
        case "jsonl":
            return Jsonl(field, out_field, is_json)
        case "csv":
            return Delimited(",", field, out_field)
        case "tsv":
            return Delimited("\t", field, out_field)
        case "text":
            return Text(field)
        case _:
            return Subtitles(field, has_header=name == "vtt")


def combined(source: str, target: str, field: str, out_field: str, is_json: bool = False) -> Form:
    """Read in one form, written in the same or as JSON Lines. Raises RunError for other pairs."""
    if source == target:
        return make_form(source, field, out_field, is_json)
    if target != "jsonl":
        raise RunError(f"the input is {source}: the output must be {source} too, or jsonl, not {target}")
    return _AsJsonl(make_form(source, field, out_field), out_field, is_json)


class _AsJsonl:
    """Another form's records as JSON Lines, with their numbers."""

    def __init__(self, source: Form, out_field: str, is_json: bool) -> None:
        self._source = source
        self._jsonl = Jsonl("", out_field, is_json)

    def read(self, lines: Iterable[Line]) -> Iterator[Record]:
        """See Form. What is passed on verbatim has no place here."""
        for record in self._source.read(lines):
            record.fields = {"index": record.index, **({"cue": record.head} if record.head else {}), **record.fields}
            yield record

    def opening(self) -> str:
        """See Form."""
        return ""

    def write(self, record: Record, answer: str | None) -> str:
        """See Form."""
        return "" if record.verbatim is not None else self._jsonl.write(record, answer)
