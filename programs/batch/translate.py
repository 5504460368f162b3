"""The `translate` command: a file in, the same file in another language out.

Each finished text is in the sidecar, by its content. So a stopped run resumes, and a changed file needs only its new
texts.
"""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import sys
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from native.files import write_synced
from programs.backends.backend import Backend
from programs.backends.remote_service import RemoteService
from programs.batch.exit_codes import ALL_ANSWERED, SOME_FAILED, run_command
from programs.batch.files import RunFiles, check_different, error_line
from programs.batch.formats import FileFormat
from programs.batch.glossary import load_glossary
from programs.batch.inputs import STDIN, Line
from programs.batch.lines import LineWorker
from programs.batch.options import ERRORS_SUFFIX, RunOptions, build_translate_parser, check_settings
from programs.batch.outputs import STDOUT, OutputFile, ReorderBuffer, StandardError, StandardOutput
from programs.batch.progress import Reporter, RunStats
from programs.batch.run import Run
from programs.batch.sidecar import SUFFIX, Progress, Sidecar
from programs.batch.tasks import TaskRequest, with_terms
from programs.record import Record, RunError
from programs.settings import Settings, SettingsError, parse_settings
from programs.settings.model_file import with_default_model
from routes.translation.translator import UNCHANGED, unknown_language
from rwkv_batch.ipc.process import LogConfig, set_up_logging
from rwkv_batch.translation.checks import least_certain
from rwkv_batch.translation.documents.document import (
    MAX_BYTES,
    Document,
    DocumentError,
    DocumentOptions,
    requests,
    unit_key,
)
from rwkv_batch.translation.documents.formats import check_name, read_document, translated_name
from rwkv_batch.translation.glossary import Glossary
from rwkv_batch.translation.plan import AUTO
from rwkv_batch.translation.prompts import default_style


class TranslateOptions(RunOptions, frozen=True, kw_only=True):
    """Options of a run. `output` "": the input's name with the language."""

    target_lang: str
    source_lang: str = AUTO
    column: str = ""
    encoding: str = ""
    bilingual: bool = False
    instruction: str = ""
    formality: str = "default"
    review: str = ""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return the exit code."""

    def make() -> Coroutine[Any, Any, int]:
        given, rest = build_translate_parser().parse(arguments)
        options = TranslateOptions(**vars(given))
        settings = parse_settings(rest, os.environ)
        check_settings(options.url, rest)
        if not options.instruction and options.formality == "default":  # in the bodies, so its change asks again
            style = default_style(settings.http.translation_style, options.target_lang)
            options = msgspec.structs.replace(options, instruction=style)
        job = DocumentJob(options)
        set_up_logging("translate", LogConfig(settings.service.log_format, settings.service.log_level))
        return job.run(make_backend(options.url, settings))

    return run_command(make)


def make_backend(url: str, settings: Settings) -> Backend:
    """Return the service at a URL, or an engine of the settings. Raises SettingsError."""
    if url:
        return RemoteService(url, settings.http.password)
    from programs.backends.local_engine import LocalEngine  # and all routes: half a second

    return LocalEngine(with_default_model(settings))


class DocumentJob:
    """The translation of one file."""

    def __init__(self, options: TranslateOptions) -> None:
        """Read the file. Raises SettingsError for what a flag can mend, else RunError."""
        self._options = options
        name = f"x.{'xml' if options.form == 'android' else options.form}" if options.form else options.input
        if name == STDIN:
            raise SettingsError("--format must be given for standard input")
        default = STDOUT if options.input == STDIN else translated_name(options.input, options.target_lang)
        self._output = options.output or default
        try:
            check_name(name)
            self.document = read_document(_read(options.input, MAX_BYTES + 1), name, self._document_options)
        except DocumentError as error:
            raise SettingsError(f"{options.input}: {error}") from None
        terms = load_glossary(options.glossary) if options.glossary else None
        self.task = SegmentTask(options.target_lang, terms)
        num_units, num_different = len(self.document.units), len({unit_key(unit) for unit in self.document.units})
        different = [f"{num_different} of them different"] if num_different < num_units else []
        notes = [f"{num_units} texts", *different, *self.document.notes]
        sys.stderr.write(f"{options.input}: {', '.join(notes)}\n")
        for flag, language in (("--target-lang", options.target_lang), ("--source-lang", options.source_lang)):
            if problem := unknown_language(language):
                sys.stderr.write(f"warning: {flag}: {problem}; {UNCHANGED}\n")

    @property
    def _document_options(self) -> DocumentOptions:
        options = self._options
        return DocumentOptions(
            target=options.target_lang,
            source=options.source_lang,
            column=options.column,
            encoding=options.encoding,
            is_bilingual=options.bilingual,
        )

    def records(self) -> Iterator[Record]:
        """Yield a record per different text, up to the limit."""
        options = self._options
        fields: dict[str, Any] = {"target_lang": options.target_lang} | ({"scores": True} if options.review else {})
        if options.instruction or options.formality != "default":
            fields |= {"instruction": options.instruction, "formality": options.formality}
        bodies = requests(self.document, options.source_lang, fields)
        for index, (key, body) in enumerate(bodies):
            if options.limit and index >= options.limit:
                return
            text = body["text_list"][0]
            yield Record(index, index + 1, {"key": key, "text": text, "body": body}, size=len(text))

    async def run(self, backend: Backend) -> int:
        """Translate the file and write it. Returns the exit code. Raises RunError."""
        try:
            return await self._run(backend)
        finally:
            await backend.close()

    async def _run(self, backend: Backend) -> int:
        options, texts = self._options, _Texts()
        files = self._open(texts, await backend.model())
        try:
            total = len({unit_key(unit) for unit in self.document.units})
            total = min(total, options.limit or total)
            stats = RunStats(lambda: (stats.answered + stats.failed) / max(1, total), noun="texts")
            worker = LineWorker(backend, self.task, options.retry, answers=files.sidecar)
            with Reporter(stats, options.progress):
                buffer = ReorderBuffer(keeps_order=False, previous=Progress())
                await Run(self.records(), worker, files, buffer, stats, options.max_in_flight).run()
        finally:
            files.close()
        await asyncio.to_thread(self._write, texts.answers)
        return await asyncio.to_thread(self._report, files.progress.failed, total)

    def _report(self, failed: int, total: int) -> int:
        """Print how many texts failed. Returns the exit code."""
        errors = Path(self._output + ERRORS_SUFFIX)
        if not failed:
            errors.unlink(missing_ok=True)
            return ALL_ANSWERED
        where = "above" if self._output == STDOUT else errors
        sys.stderr.write(f"{failed} of {total} texts failed and stay as they were: see {where}\n")
        return SOME_FAILED

    def _open(self, texts: _Texts, model: str) -> RunFiles:
        """Open the sidecar and the error file. Raises RunError."""
        self._check_review()
        if self._output == STDOUT:
            sidecar, errors = Sidecar(None), StandardError()
            sidecar.begin({}, "")
            return RunFiles(_NoOutput(), errors, sidecar, texts, Progress(), error_line(""))
        output, path = Path(self._output), Path(self._output + SUFFIX)
        if not output.parent.is_dir():
            raise RunError(f"the folder of {output} does not exist; create it, or give another --output")
        if self._options.fresh:
            path.unlink(missing_ok=True)
        elif output.exists() and not path.exists():
            raise RunError(f"{output} exists and is not from this command; give --fresh to overwrite it")
        with ExitStack() as opened:
            error_file = opened.enter_context(closing(OutputFile(Path(self._output + ERRORS_SUFFIX), "")))
            error_file.cut(0)
            sidecar = opened.enter_context(closing(Sidecar(path)))
            sidecar.begin({"the model": model}, "")
            opened.pop_all()
        return RunFiles(_NoOutput(), error_file, sidecar, texts, Progress(), error_line(""))

    def _check_review(self) -> None:
        """Check that no file is overwritten but those of an earlier run. Raises RunError."""
        options, output = self._options, self._output
        outputs = [] if output == STDOUT else [output, output + SUFFIX, output + ERRORS_SUFFIX]
        check_different([options.input, options.glossary, *outputs, options.review])
        path = Path(options.review)
        if not options.review or options.fresh or not (path.is_file() or path.is_dir()):
            return
        if _read(options.review, len(_REVIEW_START)) not in (b"", _REVIEW_START):
            raise RunError(f"{path} exists and is no review of this command; give --fresh to overwrite it")

    def _write(self, answers: dict[str, str]) -> None:
        """Write the translated file. Raises RunError."""
        units = self.document.units
        found = {key: msgspec.json.decode(one, type=Result) for key, one in answers.items()}
        results = [found.get(unit_key(unit)) for unit in units]
        if self._options.review:
            _write_file(Path(self._options.review), review(self.document, results))
        notes = len(self.document.notes)
        texts = [None if one is None else one.text for one in results]
        try:
            data = self.document.write(texts, is_bilingual=self._options.bilingual)
        except DocumentError as error:
            raise RunError(f"{self._output} {error}") from None
        for note in self.document.notes[notes:]:
            sys.stderr.write(f"{note}\n")
        num_warnings = sum(bool(one and one.warnings) for one in results)
        if num_warnings:
            hint = "" if self._options.review else "; --review FILE lists them"
            sys.stderr.write(f"{num_warnings} of {len(units)} translations may be wrong{hint}\n")
        if self._output == STDOUT:
            StandardOutput().append(data)
        else:
            _write_file(Path(self._output), data)
            sys.stderr.write(f"the translation is in {self._output}\n")


def _read(path: str, size: int) -> bytes:
    try:
        with sys.stdin.buffer if path == STDIN else open(path, "rb") as file:
            return file.read(size)
    except OSError as error:
        raise RunError(f"{path} cannot be read ({error.strerror}); check its name") from None


def _write_file(path: Path, data: bytes) -> None:
    """Replace a file at once: a stopped run leaves the old one. Pipes are written to. Raises RunError."""
    path = path.resolve() if path.is_file() else path
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        write_synced(path, data)
    except OSError as error:
        remedy = "make room and give the same command again: the texts are safe"
        raise RunError(f"{path} cannot be written ({error.strerror}); {remedy}") from None


class Result(NamedTuple):
    """A text's translation, in the progress file."""

    text: str
    warnings: list[str]
    score: float | None = None
    confidence: float | None = None


_REVIEW_COLUMNS = ("source", "translation", "warnings", "note", "score", "confidence", "review")
_REVIEW_START = ",".join(_REVIEW_COLUMNS).encode("utf-8-sig")
"""First bytes of a file of --review."""


def review(document: Document, results: Sequence[Result | None]) -> bytes:
    """Return the table of --review, as CSV."""
    out = io.StringIO(newline="")
    table = csv.writer(out)
    table.writerow(_REVIEW_COLUMNS)
    pairs = zip(document.units, results, strict=True)
    rows = {(unit_key(unit), unit.note): (unit, result) for unit, result in pairs}.values()  # a plural has equal forms
    lowest = least_certain(result and result.confidence for _, result in rows)
    for index, (unit, result) in enumerate(rows):
        text, warnings, score, confidence = result or Result("", ["was not translated"])
        mark = "yes" if index in lowest or warnings else ""
        table.writerow([unit.text, text, "; ".join(warnings), unit.note, score, confidence, mark])
    return out.getvalue().encode("utf-8-sig", "replace")


class _NoOutput(StandardOutput):
    """The output of a run whose file is written at its end."""

    def append(self, data: bytes) -> None:
        """Do nothing."""


@dataclass
class _Texts(FileFormat):
    """Keeps the answers, by the keys of their texts."""

    answers: dict[str, str] = field(default_factory=dict)

    def read(self, lines: Iterable[Line]) -> Iterator[Record]:
        """See FileFormat. The document has the records."""
        return iter(())

    def write(self, record: Record, answer: str | None) -> str:
        """Keep an answer."""
        if answer is not None:
            self.answers[record.fields["key"]] = answer
        return ""


@dataclass(frozen=True, slots=True)
class SegmentTask:
    """A Task: translates a text of a document."""

    target: str
    glossary: Glossary | None = None

    def request(self, record: Record) -> TaskRequest:
        """See Task. The request has the glossary's terms of its text, so only their change asks again."""
        return with_terms(record.fields["body"], self.glossary)

    def text(self, answer: Any) -> str:
        """Return the translation and its warnings as JSON."""
        warnings = [
            one["message"].partition(": the translation ")[2] or one["message"] for one in answer.get("warnings", ())
        ]
        (one,) = answer["translations"]
        scores = [one["score"], one["confidence"]] if "score" in one else []
        return json.dumps([one["text"], warnings, *scores], ensure_ascii=False)
