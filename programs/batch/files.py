"""The files of a run: output, errors and sidecar. They are synced in this order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

from native.files import sync
from programs.batch.formats import FileFormat, compression_of
from programs.batch.inputs import STDIN, Input, is_stream
from programs.batch.lines import OK, Outcome
from programs.batch.options import ERRORS_SUFFIX, Options
from programs.batch.outputs import (
    STDOUT,
    CommitBatch,
    FinishedRecord,
    OutputFile,
    StandardError,
    StandardOutput,
)
from programs.batch.sidecar import SUFFIX, Progress, Sidecar
from programs.record import Record, RunError, json_line


@dataclass(slots=True)
class RunFiles:
    """The open files of a run. Records that the sidecar lists as done are synced."""

    output: OutputFile | StandardOutput
    errors: OutputFile | StandardOutput
    sidecar: Sidecar
    file_format: FileFormat
    progress: Progress
    """Progress that is durable."""
    error_line: Callable[[Record, Outcome], str]
    is_compressed: bool = False
    waiting: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Output and error of records that an earlier run finished, and that waited for earlier ones."""

    def __post_init__(self) -> None:
        self.waiting = self.sidecar.waiting()

    def finished_record(self, record: Record, outcome: Outcome) -> FinishedRecord:
        """Formats a record's lines for the files."""
        output = self.file_format.write(record, outcome.answer)
        return FinishedRecord(
            output, self.error_line(record, outcome) if outcome.problem else "", outcome.key, outcome.answer
        )

    def close(self) -> None:
        self.sidecar.close()
        self.errors.close()
        self.output.close()

    def commit(self, batch: CommitBatch, is_last: bool) -> None:
        """Syncs a batch: first its lines, then the sidecar. Raises RunError."""
        before = self.progress
        if not before.has_begun and (batch.output or is_last):
            batch.output = self.file_format.header().encode() + batch.output
        try:
            self.output.append(batch.output)
            self.errors.append(batch.errors)
            progress = Progress(
                next_index=batch.next_index,
                beyond=batch.beyond,
                has_begun=before.has_begun or bool(batch.output) or is_last,
                output_bytes=self.output.length,
                errors_bytes=self.errors.length,
                answered=before.answered + batch.answered,
                failed=before.failed + batch.failed,
            )
            self.sidecar.commit(progress, batch.answers, batch.waiting)
        except OSError as error:
            raise RunError(self._write_error_message(error, before.answered + before.failed)) from None
        self.progress = progress

    def _write_error_message(self, error: OSError, lines: int) -> str:
        reason = error.strerror or str(error)
        if isinstance(self.output, StandardOutput):
            return f"standard output cannot be written ({reason}): {lines} lines were written; a pipe cannot resume"
        again = f"make room and give the same command again: {lines} lines are safe"
        return f"the answers cannot be written ({reason}); {again}"


def errors_path(options: Options) -> str:
    """Returns the path of the error file, or "" for standard error."""
    return options.errors or ("" if options.output == STDOUT else options.output + ERRORS_SUFFIX)


def error_line(id_field: str) -> Callable[[Record, Outcome], str]:
    """Returns a function that formats a record's error line."""

    def line(record: Record, outcome: Outcome) -> str:
        entry = {"index": record.index, "line": record.line, "error": outcome.problem, "input": record.fields}
        if outcome.status != OK:
            entry["status"] = outcome.status
        if id_field:
            entry["id"] = record.fields.get(id_field)
        return json_line(entry)

    return line


def open_files(options: Options, source: Input, file_format: FileFormat, settings: dict[str, str]) -> RunFiles:
    """Opens the run's files.

    Truncates them to the durable part of an earlier run. Raises RunError, with all files closed.
    """
    with ExitStack() as opened:
        files = _to_pipe(options, file_format, settings, opened) if options.output == STDOUT else None
        files = files or _to_files(options, source, file_format, settings, opened)
        opened.pop_all()
        return files


def _to_pipe(options: Options, file_format: FileFormat, settings: dict[str, str], opened: ExitStack) -> RunFiles:
    errors: OutputFile | StandardOutput = StandardError()
    if options.errors:
        check_different([options.input, options.glossary, options.errors])
        errors = opened.enter_context(closing(OutputFile(Path(options.errors), "")))
        errors.cut(0)
    sidecar = Sidecar(None)
    return RunFiles(
        StandardOutput(), errors, sidecar, file_format, sidecar.begin(settings, ""), error_line(options.id_field)
    )


def _to_files(
    options: Options, source: Input, file_format: FileFormat, settings: dict[str, str], opened: ExitStack
) -> RunFiles:
    path, errors_file = Path(options.output), Path(errors_path(options))
    sidecar_path, compression = Path(options.output + SUFFIX), compression_of(options.output)
    check_different([options.input, options.glossary, path, errors_file, sidecar_path])
    output = opened.enter_context(closing(OutputFile(path, compression)))
    errors = opened.enter_context(closing(OutputFile(errors_file, "")))
    if options.fresh:
        sidecar_path.unlink(missing_ok=True)
        output.cut(0)
        errors.cut(0)
    sidecar = opened.enter_context(closing(Sidecar(sidecar_path)))
    if sidecar.is_new and (output.length or errors.length):
        sidecar_path.unlink()
        raise RunError(f"{path} or {errors_file} exists and is not from this command; give --fresh to overwrite")
    if not sidecar.is_new and is_stream(options.input):
        name = "standard input" if options.input == STDIN else f"the pipe {options.input}"
        raise RunError(f"{name} cannot be read twice, so this output cannot be resumed; give --fresh to start over")
    progress = sidecar.begin(settings, source.digest())
    sync(path.parent)
    output.cut(progress.output_bytes)
    errors.cut(progress.errors_bytes)
    return RunFiles(output, errors, sidecar, file_format, progress, error_line(options.id_field), bool(compression))


def check_different(files: Iterable[Path | str]) -> None:
    """Check that no file is given twice; one may have two names. "": none. STDIN: no file. Raises RunError."""
    seen: set[object] = set()
    for file in (Path(one) for one in files if one not in ("", STDIN)):
        key = (file.stat().st_dev, file.stat().st_ino) if file.exists() else file.resolve()
        if key in seen:
            raise RunError(f"{file} is given twice; all inputs and outputs must be different files, so name another")
        seen.add(key)
