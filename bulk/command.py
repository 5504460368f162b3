"""`python app.py batch INPUT -o OUTPUT`: from the command line to a run, and to an exit code."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from bulk.backends.backend import Backend
from bulk.backends.own_engine import OwnEngine
from bulk.backends.service import Service
from bulk.dry_run import Estimate
from bulk.files import errors_path, open_files
from bulk.formats.form import Form, form_of, unknown_form
from bulk.formats.registry import combined
from bulk.glossary import Glossary, load_glossary
from bulk.inputs import Input
from bulk.ledger import Ledger
from bulk.lines import LineWorker
from bulk.options import Options, check_settings, flag_of, parse_options
from bulk.outputs import STDOUT
from bulk.progress import Meter, Reporter
from bulk.records import Record, RunError
from bulk.run import Run
from bulk.sidecar import Progress
from bulk.tasks import OF_JSON, Task, make_task
from routes.request.bodies import validate
from routes.table import ROUTES
from rwkv_batch.errors import ServiceError, StartupError
from rwkv_batch.ipc.process import LogStyle, set_up_logging
from settings import Settings, SettingsError, parse_settings
from settings.model_file import with_model

ALL_ANSWERED, CANNOT_RUN, BAD_FLAG, SOME_FAILED, INTERRUPTED = 0, 1, 2, 3, 130
"""Exit codes."""
_SUBTITLES = ("srt", "vtt")


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    try:
        options, rest = parse_options(arguments)
        settings = parse_settings(rest, os.environ)
        check_settings(options.url, rest)
        check_body(options)
        set_up_logging("batch", LogStyle(settings.service.log_format, settings.service.log_level))
        backend: Backend = _service(options, settings) if options.url else OwnEngine(with_model(settings))
        return asyncio.run(_interruptible(_Command(options, backend).run()))
    except SettingsError as error:
        return _said(str(error), BAD_FLAG)
    except (RunError, StartupError) as error:
        return _said(str(error), CANNOT_RUN)
    except (KeyboardInterrupt, asyncio.CancelledError):
        return _said("stopped; the same command goes on from here", INTERRUPTED)


def _said(error: str, code: int) -> int:
    sys.stderr.write(f"error: {error}\n")
    return code


def _service(options: Options, settings: Settings) -> Service:
    return Service(options.url, settings.http.password)


async def _interruptible(work: Any) -> int:
    """Ends orderly at SIGTERM as at SIGINT: what has ended is kept."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return int(await task)


def check_body(options: Options) -> None:
    """Whether the flags make a body that its route takes. Raises SettingsError."""
    plan = options.plan
    ask = make_task(plan).ask(Record(0, 1, _Everything()))
    route = next(route for route in ROUTES if route.path == ask.path)
    assert route.body is not None
    try:
        validate(route.body, ask.body)
    except ServiceError as error:
        raise SettingsError(str(error)) from None


class _Everything(dict[str, Any]):
    """A record that has every field."""

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

    async def run(self) -> int:
        """Do it; returns the exit code. Raises RunError."""
        try:
            return await self._run()
        finally:
            await self.backend.close()

    async def _run(self) -> int:
        options = self.options
        form = _form(options)
        glossary = load_glossary(options.glossary) if options.glossary else None
        source = Input(options.input)
        records = _chosen(form.read(source.lines()), options)
        task = make_task(options.plan)
        if options.dry_run:
            return await self._estimate(records, task, glossary)
        settings = self._settings(glossary, await self.backend.model())
        files = await asyncio.to_thread(open_files, options, source, form, settings)
        try:
            ledger = Ledger(options.order == "keep", files.progress)
            meter = Meter(source.fraction)
            answers = files.sidecar if options.dedupe else None
            worker = LineWorker(self.backend, task, options.retry, glossary, answers=answers)
            with Reporter(meter, options.progress):
                await Run(records, worker, files, ledger, meter, options.max_in_flight).run()
        finally:
            files.close()
            source.close()
        return self._told(files.progress)

    async def _estimate(self, records: Iterator[Record], task: Task, glossary: Glossary | None) -> int:
        estimate = Estimate(task)
        await asyncio.to_thread(estimate.count, records)
        await self.backend.open()
        figures = await estimate.figures(LineWorker(self.backend, task, self.options.retry, glossary))
        sys.stdout.write(json.dumps(figures) + "\n")
        return ALL_ANSWERED

    def _told(self, progress: Progress) -> int:
        if progress.failed:
            where = errors_path(self.options) or "above"
            sys.stderr.write(f"{progress.failed} of {progress.answered + progress.failed} lines failed: see {where}\n")
        return SOME_FAILED if progress.failed else ALL_ANSWERED

    def _settings(self, glossary: Glossary | None, model: str) -> dict[str, str]:
        """What decides over the answers, by the names of its flags."""
        options, plan = self.options, self.options.plan
        decode = {flag_of(name): repr(value) for name, value in plan.decode.items()}
        terms = Path(options.glossary).read_bytes() if glossary is not None else b""
        return decode | {
            "--task": plan.task,
            "--field": plan.field,
            "--template": plan.template,
            "--source-lang": plan.source_lang,
            "--target-lang": plan.target_lang,
            "--out-field": options.out_field,
            "--order": options.order,
            "--shard": "/".join(map(str, options.shard)),
            "--dedupe": "given" if options.dedupe else "",
            "--glossary": hashlib.sha256(terms).hexdigest() if terms else "",
            "--format": options.form,
            "--url": "given" if options.url else "",
            "the model": model,
        }


def _form(options: Options) -> Form:
    """Raises RunError where a name does not tell it, or the two do not go together."""
    source = options.form or form_of(options.input)
    if source is None:
        raise unknown_form(options.input, "name it by --format")
    target = source if options.output == STDOUT else form_of(options.output)
    if target is None:
        raise unknown_form(options.output, "give an --output whose name ends like one, or name it by --format")
    if target in _SUBTITLES and options.order == "done":
        raise RunError("--order done would shuffle subtitles; leave it out, or write .jsonl")
    return combined(source, target, options.plan.field, options.out_field, options.plan.task in OF_JSON)


def _chosen(records: Iterator[Record], options: Options) -> Iterator[Record]:
    """Those of the shard, within the limit."""
    part, parts = options.shard
    limited = islice(records, options.limit) if options.limit else records
    return (record for record in limited if record.index % parts == part - 1)
