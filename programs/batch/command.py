"""The `batch` command: from the command line to a run and an exit code."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import json
import os
import sys
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from programs.backends.backend import Backend
from programs.batch.exit_codes import ALL_ANSWERED, SOME_FAILED, run_command
from programs.batch.files import errors_path, open_files
from programs.batch.formats import FileFormat, combine_formats, format_of, unknown_format
from programs.batch.glossary import load_glossary
from programs.batch.inputs import STDIN, Input
from programs.batch.lines import LineWorker
from programs.batch.options import Options, RunOptions, check_settings, flag_of, parse_options
from programs.batch.outputs import STDOUT, ReorderBuffer
from programs.batch.progress import Reporter, RunStats
from programs.batch.run import Run
from programs.batch.sidecar import Progress
from programs.batch.tasks import FIM, JSON_TASKS, SCORE, TRANSLATE, Task, TaskRequest, make_task
from programs.batch.translate import DocumentJob, TranslateOptions, make_backend
from programs.record import LineError, Record
from programs.settings import SettingsError, parse_settings
from routes.request import prompts
from routes.request.bodies import PromptBody
from routes.request.jobs import prompts_and_stops
from routes.request.json_body import validate
from rwkv_batch.errors import ServiceError
from rwkv_batch.ipc.process import LogConfig, set_up_logging
from rwkv_batch.tokenizer import Tokenizer
from rwkv_batch.translation.documents.formats import format_of as document_format
from rwkv_batch.translation.glossary import Glossary
from rwkv_batch.translation.plan import Query
from rwkv_batch.translation.prompts import translation_prompt

__all__ = ["Selection", "main"]

_ROUTES_OF = {TRANSLATE: "routes.translation.batch_translate", SCORE: "routes.score"}
"""Modules of the paths' routes. All routes would take half a second."""
SAMPLE = 64
"""Lines that are answered, spread over the input."""


class Estimate:
    """Counts records and keeps a sample."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._tokenizer = Tokenizer()
        self._stride = 1
        self.lines = self.unreadable = self.prompt_tokens = 0
        self.sample: list[Record] = []
        self._sample_tokens: list[int] = []

    def count(self, records: Iterator[Record]) -> None:
        for record in records:
            if record.verbatim is not None:
                continue
            self.lines += 1
            tokens = self._tokens(record)
            if tokens is None:
                self.unreadable += 1
            else:
                self.prompt_tokens += tokens
                self._keep(record, tokens)

    def _tokens(self, record: Record) -> int | None:
        """Returns the approximate number of prompt tokens, or None without a prompt."""
        try:
            return None if record.problem else len(self._tokenizer.encode(_prompt(self._task.request(record))))
        except (LineError, ServiceError):
            return None

    def _keep(self, record: Record, tokens: int) -> None:
        """Keeps every `stride`-th record. Doubles the stride when the sample is full."""
        if self.lines % self._stride:
            return
        self.sample.append(record)
        self._sample_tokens.append(tokens)
        if len(self.sample) > SAMPLE:
            self.sample, self._sample_tokens = self.sample[1::2], self._sample_tokens[1::2]
            self._stride *= 2

    async def figures(self, worker: LineWorker) -> dict[str, Any]:
        """Answers the sample and returns the estimate."""
        figures: dict[str, Any] = {
            "lines": self.lines,
            "unreadable": self.unreadable,
            "prompt_tokens": self.prompt_tokens,
        }
        if not self.sample:
            return figures
        started = time.monotonic()
        outcomes = await asyncio.gather(*(asyncio.create_task(worker.outcome(record)) for record in self.sample))
        seconds = time.monotonic() - started
        ratio = self.prompt_tokens / max(1, sum(self._sample_tokens))
        return figures | {
            "sampled_lines": len(self.sample),
            "sample_failed": sum(bool(outcome.problem) for outcome in outcomes),
            "completion_tokens": round(ratio * sum(outcome.completion_tokens for outcome in outcomes)),
            "seconds": round(ratio * seconds, 1),
        }


def _prompt(request: TaskRequest) -> str:
    """Returns the approximate prompt. Raises ServiceError if the body is invalid."""
    if request.path == TRANSLATE:
        body = request.body
        return translation_prompt(Query(body["source_lang"], body["target_lang"], body["text_list"][0]))
    if request.path == SCORE:
        return str(request.body["contents"][0]) + "".join(map(str, request.body["candidates"]))
    if request.path == FIM:
        return prompts.fill_in_the_middle(request.body["prefix"][0], request.body["suffix"][0])
    return prompts_and_stops(validate(PromptBody, request.body))[0][0]


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns the exit code."""

    def make() -> Coroutine[Any, Any, int]:
        options, rest = parse_options(arguments)
        settings = parse_settings(rest, os.environ)
        check_settings(options.url, rest)
        check_body(options)
        document = _document_job(options)
        set_up_logging("batch", LogConfig(settings.service.log_format, settings.service.log_level))
        return _Command(options, make_backend(options.url, settings), document).run()

    return run_command(make)


def _document_job(options: Options) -> DocumentJob | None:
    """Returns the translation of a document, None for lines. Raises SettingsError."""
    task = options.task_options
    if options.form or format_of(options.input) or options.input == STDIN or document_format(options.input) is None:
        return None
    if task.task != "translate":
        raise SettingsError(f"{options.input} is a document: only --task translate reads it, not {task.task}")
    for flag, is_given in (
        ("--template", task.template),
        ("--shard", options.shard != (1, 1)),
        ("--order", options.order == "done"),
        ("--errors", options.errors),
    ):
        if is_given:
            raise SettingsError(f"{flag} is for files of lines, and {options.input} is a document; leave it out")
    given = {name: getattr(options, name) for name in RunOptions.__struct_fields__}
    return DocumentJob(TranslateOptions(target_lang=task.target_lang, source_lang=task.source_lang, **given))


def check_body(options: Options) -> None:
    """Checks that the flags make a valid request body. Raises SettingsError."""
    task_options = options.task_options
    request = make_task(task_options).request(Record(0, 1, _AnyFields()))
    module = importlib.import_module(_ROUTES_OF.get(request.path, "routes.native_completions"))
    route = next(route for route in module.ROUTES if route.path == request.path)
    assert route.body is not None
    try:
        validate(route.body, request.body)
    except ServiceError as error:
        raise SettingsError(str(error)) from None


class _AnyFields(dict[str, Any]):
    """A record in which every field exists."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> str:
        return "x"

    def get(self, name: str, default: Any = None) -> Any:
        return self[name]


@dataclass(slots=True)
class _Command:
    options: Options
    backend: Backend
    document: DocumentJob | None = None

    async def run(self) -> int:
        """Runs the job and returns the exit code. Raises RunError."""
        try:
            return await self._run()
        finally:
            await self.backend.close()

    async def _run(self) -> int:
        options = self.options
        if self.document is not None:
            if options.dry_run:
                return await self._estimate(self.document.records(), self.document.task)
            return await self.document.run(self.backend)
        form = _file_format(options)
        glossary = load_glossary(options.glossary) if options.glossary else None
        source = Input(options.input)
        records = Selection(form.read(source.lines()), options.limit, options.shard)
        task = make_task(options.task_options, glossary)
        if options.dry_run:
            return await self._estimate(records, task)
        settings = self._settings(glossary, await self.backend.model())
        files = await asyncio.to_thread(open_files, options, source, form, settings)
        try:
            reorder_buffer = ReorderBuffer(options.order == "keep", files.progress)
            stats = RunStats(lambda: records.fraction(source.fraction()))
            answers = files.sidecar if options.dedupe else None
            worker = LineWorker(self.backend, task, options.retry, answers=answers, fails_missing_terms=True)
            with Reporter(stats, options.progress):
                await Run(records, worker, files, reorder_buffer, stats, options.max_in_flight).run()
        finally:
            files.close()
            source.close()
        return self._print_failures(files.progress)

    async def _estimate(self, records: Iterator[Record], task: Task) -> int:
        estimate = Estimate(task)
        await asyncio.to_thread(estimate.count, records)
        await self.backend.open()
        figures = await estimate.figures(LineWorker(self.backend, task, self.options.retry))
        sys.stdout.write(json.dumps(figures) + "\n")
        return ALL_ANSWERED

    def _print_failures(self, progress: Progress) -> int:
        if progress.failed:
            where = errors_path(self.options) or "above"
            sys.stderr.write(f"{progress.failed} of {progress.answered + progress.failed} lines failed: see {where}\n")
        return SOME_FAILED if progress.failed else ALL_ANSWERED

    def _settings(self, glossary: Glossary | None, model: str) -> dict[str, str]:
        """Returns the settings that determine the answers, by flag name."""
        options, task_options = self.options, self.options.task_options
        decode = {flag_of(name): repr(value) for name, value in task_options.decode.items()}
        terms = Path(options.glossary).read_bytes() if glossary is not None else b""
        return decode | {
            "--task": task_options.task,
            "--field": task_options.field,
            "--template": task_options.template,
            "--source-lang": task_options.source_lang,
            "--target-lang": task_options.target_lang,
            "--out-field": options.out_field,
            "--order": options.order,
            "--shard": "/".join(map(str, options.shard)),
            "--glossary": hashlib.sha256(terms).hexdigest() if terms else "",
            "--format": options.form,
            "--url": "given" if options.url else "",
            "the model": model,
        }


def _file_format(options: Options) -> FileFormat:
    """Chooses the file format. Raises RunError if the name is ambiguous or input and output disagree."""
    source = options.form or format_of(options.input)
    if source is None:
        raise unknown_format(options.input, "name it by --format")
    target = source if options.output == STDOUT else format_of(options.output)
    if target is None:
        raise unknown_format(options.output, "give an --output whose name ends like one, or name it by --format")
    return combine_formats(
        source, target, options.task_options.field, options.out_field, options.task_options.task in JSON_TASKS
    )


class Selection:
    """The records of a shard, up to a limit. An iterator."""

    def __init__(self, records: Iterator[Record], limit: int, shard: tuple[int, int]) -> None:
        """limit: 0 for none"""
        self._limit, self._taken = limit, 0
        part, parts = shard
        limited = islice(records, limit) if limit else records
        self._records = (record for record in self._counted(limited) if record.index % parts == part - 1)

    def _counted(self, records: Iterator[Record]) -> Iterator[Record]:
        for record in records:
            self._taken += 1
            yield record

    def __iter__(self) -> Iterator[Record]:
        return self._records

    def __next__(self) -> Record:
        return next(self._records)

    def fraction(self, of_input: float | None) -> float | None:
        """Return the share of the selected records that were read. of_input: the share of the input's bytes."""
        return max(of_input or 0.0, self._taken / self._limit) if self._limit else of_input
