"""Creates file formats by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from programs.batch.formats.delimited import Delimited
from programs.batch.formats.file_format import FileFormat
from programs.batch.formats.jsonl import Jsonl
from programs.batch.formats.subtitles import Subtitles
from programs.batch.formats.text import Text
from programs.batch.inputs import Line
from programs.record import Record, RunError


def make_format(name: str, field: str, out_field: str, is_json: bool = False) -> FileFormat:
    """Creates the format of that name. `is_json`: answers are JSON values."""
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


def combine_formats(source: str, target: str, field: str, out_field: str, is_json: bool = False) -> FileFormat:
    """Combines an input format with the same output format or JSON Lines. Raises RunError for other pairs."""
    if source == target:
        return make_format(source, field, out_field, is_json)
    if target != "jsonl":
        raise RunError(f"the input is {source}: the output must be {source} too, or jsonl, not {target}")
    return _AsJsonl(make_format(source, field, out_field), out_field, is_json)


class _AsJsonl:
    """Writes another format's records as JSON Lines with their indexes."""

    def __init__(self, source: FileFormat, out_field: str, is_json: bool) -> None:
        self._source = source
        self._jsonl = Jsonl("", out_field, is_json)

    def read(self, lines: Iterable[Line]) -> Iterator[Record]:
        """See FileFormat. Verbatim text is dropped."""
        for record in self._source.read(lines):
            record.fields = {
                "index": record.index,
                **({"cue": record.cue_header} if record.cue_header else {}),
                **record.fields,
            }
            yield record

    def header(self) -> str:
        """See FileFormat."""
        return ""

    def write(self, record: Record, answer: str | None) -> str:
        """See FileFormat."""
        return "" if record.verbatim is not None else self._jsonl.write(record, answer)
