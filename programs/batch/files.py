"""Where a run writes: the output, the file of errors and the sidecar, opened together and made durable in order."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from programs.batch.formats.file_format import FileFormat, compression_of
from programs.batch.inputs import STDIN, Input, is_stream
from programs.batch.lines import OK, Outcome
from programs.batch.options import ERRORS_SUFFIX, Options
from programs.batch.outputs import STDOUT, OutputFile, StandardError, StandardOutput, sync_folder
from programs.batch.reorder_buffer import CommitBatch, FinishedRecord
from programs.batch.sidecar import SUFFIX, Progress, Sidecar
from programs.record import Record, RunError


@dataclass(slots=True)
class RunFiles:
    """All of them. What the sidecar calls done has been synced."""

    output: OutputFile | StandardOutput
    errors: OutputFile | StandardOutput
    sidecar: Sidecar
    file_format: FileFormat
    progress: Progress
    """True of the disk."""
    error_line: Callable[[Record, Outcome], str]
    is_compressed: bool = False

    def finished_record(self, record: Record, outcome: Outcome) -> FinishedRecord:
        """What the files say of a record."""
        output = self.file_format.write(record, outcome.answer)
        return FinishedRecord(
            output, self.error_line(record, outcome) if outcome.problem else "", outcome.key, outcome.answer
        )

    def close(self) -> None:
        """Let go of all of them."""
        self.sidecar.close()
        self.errors.close()
        self.output.close()

    def commit(self, batch: CommitBatch, is_last: bool) -> None:
        """Make a batch durable: first the lines, then that they are done. Raises RunError."""
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
            self.sidecar.commit(progress, batch.answers)
        except OSError as error:
            raise RunError(self._write_error_message(error, before.answered + before.failed)) from None
        self.progress = progress

    def _write_error_message(self, error: OSError, lines: int) -> str:
        reason = error.strerror or str(error)
        if isinstance(self.output, StandardOutput):
            return (
                f"standard output takes no more ({reason}): {lines} lines went out, and nothing is gone on with there"
            )
        again = f"make room and give the same command again: {lines} lines are safe"
        return f"the answers cannot be written ({reason}); {again}"


def errors_path(options: Options) -> str:
    """Where failures are written; "": standard error."""
    return options.errors or ("" if options.output == STDOUT else options.output + ERRORS_SUFFIX)


def _error_line(id_field: str) -> Callable[[Record, Outcome], str]:
    """What the file of errors says of a record."""

    def line(record: Record, outcome: Outcome) -> str:
        entry = {"index": record.index, "line": record.line, "error": outcome.problem, "input": record.fields}
        if outcome.status != OK:
            entry["status"] = outcome.status
        if id_field:
            entry["id"] = record.fields.get(id_field)
        return json.dumps(entry, ensure_ascii=False).encode("utf-8", "backslashreplace").decode() + "\n"

    return line


def open_files(options: Options, source: Input, file_format: FileFormat, settings: dict[str, str]) -> RunFiles:
    """The run's files, cut back to what an earlier run is known to have done. Raises RunError and holds none then."""
    with ExitStack() as opened:
        files = _to_pipe(options, file_format, settings, opened) if options.output == STDOUT else None
        files = files or _to_files(options, source, file_format, settings, opened)
        opened.pop_all()
        return files


def _to_pipe(options: Options, file_format: FileFormat, settings: dict[str, str], opened: ExitStack) -> RunFiles:
    errors: OutputFile | StandardOutput = StandardError()
    if options.errors:
        _check_paths(options, [Path(options.errors)])
        errors = OutputFile(Path(options.errors), "")
        opened.callback(errors.close)
        errors.cut(0)
    sidecar = Sidecar(None)
    return RunFiles(
        StandardOutput(), errors, sidecar, file_format, sidecar.begin(settings, ""), _error_line(options.id_field)
    )


def _to_files(
    options: Options, source: Input, file_format: FileFormat, settings: dict[str, str], opened: ExitStack
) -> RunFiles:
    path, errors_file = Path(options.output), Path(errors_path(options))
    sidecar_path, compression = Path(options.output + SUFFIX), compression_of(options.output)
    _check_paths(options, [path, errors_file, sidecar_path])
    output = OutputFile(path, compression)
    opened.callback(output.close)
    errors = OutputFile(errors_file, "")
    opened.callback(errors.close)
    if options.fresh:
        sidecar_path.unlink(missing_ok=True)
        output.cut(0)
        errors.cut(0)
    sidecar = Sidecar(sidecar_path)
    opened.callback(sidecar.close)
    if sidecar.is_new and (output.length or errors.length):
        sidecar_path.unlink()
        raise RunError(f"{path} or {errors_file} is there and was not begun by this command; give --fresh to overwrite")
    if not sidecar.is_new and is_stream(options.input):
        name = "standard input" if options.input == STDIN else f"the pipe {options.input}"
        raise RunError(f"{name} cannot be read again to go on with this output; give --fresh to begin anew")
    progress = sidecar.begin(settings, source.digest())
    sync_folder(path.parent)
    output.cut(progress.output_bytes)
    errors.cut(progress.errors_bytes)
    return RunFiles(output, errors, sidecar, file_format, progress, _error_line(options.id_field), bool(compression))


def _check_paths(options: Options, outputs: list[Path]) -> None:
    """Raises RunError if two of the files are one."""
    files = [*outputs, *([] if options.input == STDIN else [Path(options.input)])]
    there = [file.stat() for file in files if file.exists()]
    is_one = len({(file.st_dev, file.st_ino) for file in there}) < len(there)  # by two names perhaps
    if is_one or len({file.resolve() for file in files}) < len(files):
        raise RunError("the input, the output and the file of errors must be different files")
