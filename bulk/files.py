"""Where a run writes: the output, the file of errors and the sidecar, opened together and made durable in order."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bulk.formats.form import Form, compression_of
from bulk.inputs import STDIN, Input, is_stream
from bulk.ledger import Batch, Ended
from bulk.lines import GOOD, Outcome
from bulk.options import ERRORS_SUFFIX, Options
from bulk.outputs import STDOUT, OutputFile, StandardError, StandardOutput, sync_folder
from bulk.records import Record, RunError
from bulk.sidecar import SUFFIX, Progress, Sidecar


@dataclass(slots=True)
class Files:
    """All of them. What the sidecar calls done has been synced."""

    output: OutputFile | StandardOutput
    errors: OutputFile | StandardOutput
    sidecar: Sidecar
    form: Form
    progress: Progress
    """True of the disk."""
    error_line: Callable[[Record, Outcome], str]
    is_compressed: bool = False

    def ended(self, record: Record, outcome: Outcome) -> Ended:
        """What the files say of a record."""
        output = self.form.write(record, outcome.answer)
        return Ended(output, self.error_line(record, outcome) if outcome.problem else "", outcome.key, outcome.answer)

    def close(self) -> None:
        """Let go of all of them."""
        self.sidecar.close()
        self.errors.close()
        self.output.close()

    def keep(self, batch: Batch, is_last: bool) -> None:
        """Make a batch durable: first the lines, then that they are done. Raises RunError."""
        before = self.progress
        if not before.has_begun and (batch.output or is_last):
            batch.output = self.form.opening().encode() + batch.output
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
            raise RunError(self._unwritten(error, before.answered + before.failed)) from None
        self.progress = progress

    def _unwritten(self, error: OSError, lines: int) -> str:
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
        if outcome.status != GOOD:
            entry["status"] = outcome.status
        if id_field:
            entry["id"] = record.fields.get(id_field)
        return json.dumps(entry, ensure_ascii=False).encode("utf-8", "backslashreplace").decode() + "\n"

    return line


def open_files(options: Options, source: Input, form: Form, settings: dict[str, str]) -> Files:
    """The run's files, cut back to what an earlier run is known to have done. Raises RunError and holds none then."""
    with ExitStack() as opened:
        files = _to_pipe(options, form, settings, opened) if options.output == STDOUT else None
        files = files or _to_files(options, source, form, settings, opened)
        opened.pop_all()
        return files


def _to_pipe(options: Options, form: Form, settings: dict[str, str], opened: ExitStack) -> Files:
    errors: OutputFile | StandardOutput = StandardError()
    if options.errors:
        _check_paths(options, [Path(options.errors)])
        errors = OutputFile(Path(options.errors), "")
        opened.callback(errors.close)
        errors.cut(0)
    sidecar = Sidecar(None)
    return Files(StandardOutput(), errors, sidecar, form, sidecar.begin(settings, ""), _error_line(options.id_field))


def _to_files(options: Options, source: Input, form: Form, settings: dict[str, str], opened: ExitStack) -> Files:
    path, errors_file = Path(options.output), Path(errors_path(options))
    memory, compression = Path(options.output + SUFFIX), compression_of(options.output)
    _check_paths(options, [path, errors_file, memory])
    output = OutputFile(path, compression)
    opened.callback(output.close)
    errors = OutputFile(errors_file, "")
    opened.callback(errors.close)
    if options.fresh:
        memory.unlink(missing_ok=True)
        output.cut(0)
        errors.cut(0)
    sidecar = Sidecar(memory)
    opened.callback(sidecar.close)
    if sidecar.is_new and (output.length or errors.length):
        memory.unlink()
        raise RunError(f"{path} or {errors_file} is there and was not begun by this command; give --fresh to overwrite")
    if not sidecar.is_new and is_stream(options.input):
        name = "standard input" if options.input == STDIN else f"the pipe {options.input}"
        raise RunError(f"{name} cannot be read again to go on with this output; give --fresh to begin anew")
    progress = sidecar.begin(settings, source.digest())
    sync_folder(path.parent)
    output.cut(progress.output_bytes)
    errors.cut(progress.errors_bytes)
    return Files(output, errors, sidecar, form, progress, _error_line(options.id_field), bool(compression))


def _check_paths(options: Options, outputs: list[Path]) -> None:
    """Raises RunError if two of the files are one."""
    files = [*outputs, *([] if options.input == STDIN else [Path(options.input)])]
    there = [file.stat() for file in files if file.exists()]
    is_one = len({(file.st_dev, file.st_ino) for file in there}) < len(there)  # by two names perhaps
    if is_one or len({file.resolve() for file in files}) < len(files):
        raise RunError("the input, the output and the file of errors must be different files")
