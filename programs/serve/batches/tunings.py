"""Runs fine-tuning jobs, one at a time.

Each is a process of `rwkv-batch tune`. Its result is loaded into the engine.

The process has low priority and half of the cores. Its checkpoints are in the store's folder of runs, so a job that was
paused, or lost its process or its service, continues from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from native.files import write_private
from programs.serve.batches.tuning_process import delete_results, last_lines, link_result, store_results
from routes.context import Context
from routes.file_store import Store
from routes.fine_tuning.jobs import full_places, unload_model
from routes.fine_tuning.store import ENDED, Job, JobStatus, JobStore, make_event
from routes.request.model_names import parse_model_id
from routes.response.generate import call_engine
from rwkv_batch.calls import AddAdapter, AddState, EngineCall, GetStatus
from rwkv_batch.config import EngineConfig
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.tuning import COMPACT_DTYPES, paced_path

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_PACE_S = 0.1
_RETRY_S = 10.0
_MAX_TRIES = 30
"""A job fails after so many errors of the engine or the disk. Others run between its tries."""
_MAX_KILLS = 3
"""A job whose process was killed more often fails: it needs too much memory."""
_MAX_METRICS = 200
"""Events with losses of a job, about."""
_MAX_LINE_BYTES = 1 << 20
_MODULE = "programs.tune"
_DONE = "done.json"
"""File with the last report of a process that succeeded."""
_NO_SPACE, _STOPPED = 75, 130
"""Exit codes of `tune`: for a full disk, and after a signal."""


class TuningRunner:
    """Starts the next job's process and follows it. One event loop."""

    def __init__(self, store: Store, context: Context, engine: EngineConfig) -> None:
        self._store, self._jobs, self._context, self._engine = store, JobStore(store), context, engine
        self._key_names: frozenset[str] | None = None
        self._kills: dict[str, int] = {}
        self._tries: dict[str, int] = {}
        self._retry_at: dict[str, float] = {}
        """by job: when it may be tried again, by the monotonic clock"""
        self._waits: dict[str, str] = {}
        """Job -> why it waits, without numbers. Each reason is one event."""
        self._last_run: dict[str, float] = {}
        """by key: when its last job began"""

    def set_key_names(self, names: frozenset[str] | None) -> None:
        """Set the names of the valid API keys. None: not known. Jobs of other keys fail."""
        self._key_names = names

    async def run(self, stop: asyncio.Event) -> None:
        """Run jobs until `stop`. The current one continues at the next start."""
        while not stop.is_set():
            wait_s = _POLL_S
            try:
                await self._remove_ended()
                job = self._next(await asyncio.to_thread(self._active_jobs))
                if job is not None:
                    self._last_run[job.owner] = time.monotonic()
                    await self._run_or_fail(job, stop)
            except OSError as error:  # the disk is full: no job can run
                logger.error("fine-tuning jobs wait: %s", error)
                wait_s = _RETRY_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), wait_s)

    async def _remove_ended(self) -> None:
        """Remove the folders of ended jobs, and what failed or cancelled ones have loaded.

        Result files stay with their model, those of a failed job until they expire.
        """
        for folder in await asyncio.to_thread(lambda: [*self._store.runs.glob("ftjob-*")]):
            job = await asyncio.to_thread(self._jobs.job, "", folder.name)
            if job is not None and job.status not in ENDED:
                continue
            if job is not None and job.status is not JobStatus.SUCCEEDED and (folder / _DONE).exists():
                tuned = parse_model_id(job.model_id)
                assert tuned is not None, "a job's model has a valid name"
                if job.status is JobStatus.CANCELLED:
                    await asyncio.to_thread(delete_results, self._store, job)
                try:
                    await unload_model(self._context, tuned)
                except ServiceError:  # the engine is away: again at the next poll
                    continue
            if job is not None and job.status is JobStatus.SUCCEEDED and not job.is_deleted:
                await asyncio.to_thread(self._jobs.expire_results, job, None)
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _active_jobs(self) -> list[Job]:
        return self._jobs.active() if self._store.runs.exists() else []  # else no file was uploaded yet

    def _next(self, active: list[Job]) -> Job | None:
        """Return the job to run: the one that was interrupted, else one of the key that waited longest."""
        now = time.monotonic()
        self._retry_at = {job.id: self._retry_at[job.id] for job in active if self._retry_at.get(job.id, now) > now}
        self._waits = {job.id: self._waits[job.id] for job in active if job.id in self._waits}
        due = [job for job in active if job.id not in self._retry_at]
        return min(
            due,
            key=lambda job: (job.status is not JobStatus.RUNNING, self._last_run.get(job.owner, 0.0), job.created_at),
            default=None,
        )

    def _folder(self, job: Job) -> Path:
        return self._store.runs / job.id

    async def _update(self, job: Job, *events: dict[str, Any], **changes: Any) -> Job:
        """Change a job that is still active, and add events."""

        def changed(one: Job) -> Job:
            is_active = one.status in (JobStatus.QUEUED, JobStatus.RUNNING)
            return msgspec.structs.replace(one, **changes) if is_active else one

        return await asyncio.to_thread(self._jobs.update, job.id, changed, *events)

    async def _fail(self, job: Job, code: str, message: str, param: str | None = None) -> None:
        error = {"code": code, "message": message, "param": param}
        now = int(time.time())
        await self._update(
            job, make_event(message, "error"), status=JobStatus.FAILED, error=error, finished_at=now,
            estimated_finish=None,
        )  # fmt: skip

    async def _run_or_fail(self, job: Job, stop: asyncio.Event) -> None:
        """Run a job until it ends, is stopped, or must be tried again later. Raises OSError."""
        try:
            await self._run_job(job, stop)
        except (OSError, ServiceError) as error:
            is_full = getattr(error, "errno", None) == errno.ENOSPC  # it waits for as long as it takes
            tries = self._tries[job.id] = self._tries.get(job.id, 0) + (not is_full)
            if tries < _MAX_TRIES:
                logger.error("fine-tuning job %s waits: %s", job.id, error)
                self._retry_at[job.id] = time.monotonic() + _RETRY_S
                reason = re.sub(r"\d+", "", str(error))
                if self._waits.get(job.id) != reason:
                    with contextlib.suppress(OSError):
                        await self._update(job, make_event(f"The job waits and is tried again: {error}", "warn"))
                        self._waits[job.id] = reason
                return
            current = await asyncio.to_thread(self._jobs.job, "", job.id)
            files = ", ".join(current.result_files) if current is not None else ""
            kept = f"; it is kept as {files}: POST /v1/states and /v1/adapters (scale 1) load them" if files else ""
            await self._fail(job, "not_loaded", f"the result could not be loaded: {error}{kept}")
        except Exception as error:  # a bug: its owner gets the error, other jobs continue
            logger.exception("fine-tuning job %s failed", job.id)
            await self._fail(job, "internal", f"the job failed: {type(error).__name__}: {error}")

    async def _run_job(self, job: Job, stop: asyncio.Event) -> None:
        """Run a job until it ends or is stopped. Raises OSError or ServiceError for a later try."""
        if job.owner and self._key_names is not None and job.owner not in self._key_names:
            await self._fail(job, "api_key_removed", f"the API key {job.owner} was removed from --keys-file")
            return
        done = self._folder(job) / _DONE
        if done.exists():  # the engine was away when the training ended
            await self._succeed(job, msgspec.json.decode(await asyncio.to_thread(done.read_bytes)))
            return
        command = [sys.executable, "-P", "-m", _MODULE]
        for option, file_id in (("", job.training_file), ("--validation", job.validation_file)):
            if file_id is None:
                continue
            path = await asyncio.to_thread(self._as_named_file, job, file_id)
            if path is None:
                param = "validation_file" if option else "training_file"
                await self._fail(job, f"invalid_{param}", f"the file {file_id} was deleted", param)
                return
            command += [option, str(path)] if option else [str(path)]
        command += self._options(job)
        has_begun = self._folder(job).joinpath("result.checkpoint").exists()
        if not has_begun and (reason := await full_places(self._context, job.tuning)) is not None:
            await self._fail(job, "no_place", reason)
            return
        events = [] if job.status is JobStatus.RUNNING and job.id in self._waits else [make_event("The job is running")]
        job = await self._update(job, *events, status=JobStatus.RUNNING, dtype=self._dtype(job))
        if job.status is not JobStatus.RUNNING:
            return
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES, env={**os.environ, "RWKV_SUPERVISOR": str(os.getpid())},
        )  # fmt: skip
        watcher = asyncio.create_task(_restarted(lambda: self._stop_when_asked(job, process, stop)))
        pacer = asyncio.create_task(_restarted(lambda: self._leave_time(job, process)))
        errors = asyncio.create_task(last_lines(process))
        try:
            result = await self._follow(job, process)
            code = await process.wait()
        finally:
            watcher.cancel()
            pacer.cancel()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await self._end(job, code, result, await errors)

    def _options(self, job: Job) -> list[str]:
        options = ["-o", str(self._folder(job) / "result"), "--model-path", self._engine.model_path]
        options += ["--method", job.tuning, "--rank", str(job.rank), "--seed", str(job.seed)]
        options += ["--device", self._context.config.tune_device, "--background", "--json"]
        options += ["--dtype", self._dtype(job)]
        options += ["--epochs", str(job.epochs)] if job.epochs else []
        options += ["--batch-lines", str(job.batch_size)] if job.batch_size else []
        options += ["--rate-multiplier", str(job.multiplier)] if job.multiplier else []
        return [*options, *(part for adapter in self._engine.adapters for part in ("--adapter", adapter))]

    def _dtype(self, job: Job) -> str:
        """Return the type of the weights: the service's, and after a restart with another type still that one."""
        return job.dtype or (self._engine.dtype if self._engine.dtype in COMPACT_DTYPES else "auto")

    def _as_named_file(self, job: Job, file_id: str) -> Path | None:
        """Return a link to a file's content. None if it was deleted. The link has the ending of the file's name."""
        folder = self._folder(job)
        if (kept := next(folder.glob(f"{file_id}.*"), None)) is not None:  # also if the file was deleted meanwhile
            return kept
        file = self._store.file(job.owner, file_id)
        if file is None or not self._store.content(file_id).exists():
            return None
        folder.mkdir(exist_ok=True)
        suffix = "." + file.filename.lower().rpartition(".")[2]  # as the upload decides
        path = folder / f"{file_id}{suffix if suffix in ('.csv', '.tmx') else '.jsonl'}"
        os.link(self._store.content(file_id), path)
        return path

    async def _stop_when_asked(self, job: Job, process: asyncio.subprocess.Process, stop: asyncio.Event) -> None:
        """End the process when its job must not run.

        That is if the job is cancelled or paused, its key is removed, or the service stops.
        """
        while True:  # until it ends: while it starts, it ignores signals
            await asyncio.sleep(_POLL_S)
            is_removed = bool(job.owner) and self._key_names is not None and job.owner not in self._key_names
            current = None
            with contextlib.suppress(OSError):  # tried again at the next poll
                current = await asyncio.to_thread(self._jobs.job, "", job.id)
            is_wanted = current is None or current.status is JobStatus.RUNNING
            if stop.is_set() or is_removed or not is_wanted:
                is_lost = current is not None and current.status is JobStatus.CANCELLED
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGKILL if is_lost else signal.SIGTERM)
                    process.send_signal(signal.SIGCONT)  # a paused process receives SIGTERM later

    async def _leave_time(self, job: Job, process: asyncio.subprocess.Process) -> None:
        """Stop the process while interactive requests wait for a running slot; pace it while rows run on its GPU."""
        paced, devices = paced_path(self._folder(job) / "result"), self._engine.devices
        shares_device = self._context.config.tune_device in ("auto", *devices) or "auto" in devices
        is_paused = False

        def set_paused(value: bool) -> None:
            nonlocal is_paused
            if value is not is_paused:
                is_paused = value
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGSTOP if value else signal.SIGCONT)

        try:
            while True:
                await asyncio.sleep(_PACE_S)
                status: dict[str, Any] = {}
                with contextlib.suppress(ServiceError):  # no engine: nothing waits for it
                    status = await call_engine(self._context, GetStatus())
                is_paced = shares_device and status.get("running_rows", 0) > 0
                await asyncio.to_thread(paced.touch if is_paced else partial(paced.unlink, missing_ok=True))
                set_paused(status.get("waiting_interactive_rows", 0) > 0)
        finally:  # also after an error: nobody else would continue it
            set_paused(False)

    async def _follow(self, job: Job, process: asyncio.subprocess.Process) -> dict[str, Any]:
        """Record the process's progress; return its last report, {} without one."""
        assert process.stdout is not None
        result: dict[str, Any] = {}
        steps, began, first = 1, 0.0, 0
        while line := await process.stdout.readline():
            report = msgspec.json.decode(line)
            match report.pop("event"):
                case "data":
                    steps = max(1, report["steps"])
                    warnings = [make_event(text, "warn") for text in report["warnings"]]
                    message = f"{report['lines']} lines to train on, {report['held_out_lines']} held out, " + (
                        f"{report['answer_tokens']} of {report['tokens']} tokens are in answers; {steps} steps"
                    )
                    chosen = {"n_epochs": report["epochs"], "batch_size": report["batch_lines"]}
                    chosen["learning_rate_multiplier"] = job.multiplier or 1.0
                    await self._update(job, *warnings, make_event(message), chosen=chosen)
                case "step":
                    step = report["step"]
                    if not first:
                        first, began = step, time.monotonic()
                    if step == first or step % max(1, steps // _MAX_METRICS) == 0:
                        left_s = (time.monotonic() - began) / max(1, step - first) * (steps - step)
                        event = make_event(
                            f"Step {step}/{steps}: loss {report['train_loss']:.4f}",
                            data={**report, "total_steps": steps},
                        )
                        finish = int(time.time() + left_s) if step > first else None
                        await self._update(job, event, estimated_finish=finish)
                case "evaluation":
                    message = f"Step {report['step']}: held-out loss {report['valid_loss']:.4f}"
                    await self._update(job, make_event(message, data=report))
                case "done":
                    result = report
        return result

    async def _end(self, job: Job, code: int, result: dict[str, Any], errors: str) -> None:
        """Record how a process ended. Raises OSError if it must run again later."""
        if code == 0 and result:  # also of a job that was paused just now
            await asyncio.to_thread(write_private, self._folder(job) / _DONE, msgspec.json.encode(result))
        current = await asyncio.to_thread(self._jobs.job, "", job.id)
        if current is None or current.status is not JobStatus.RUNNING:
            return
        if code == 0 and result:
            await self._succeed(job, result)
        elif code == _STOPPED:
            return  # it continues at the next start
        elif code == _NO_SPACE:  # it continues from its checkpoint, when there is space
            raise OSError(errno.ENOSPC, "the disk of --files-dir is full")
        elif code < 0:
            kills = self._kills[job.id] = self._kills.get(job.id, 0) + 1
            text = f"the training process was killed by {signal.Signals(-code).name}"
            if kills > _MAX_KILLS:
                await self._fail(job, "process_killed", f"{text} {kills} times; the memory may be too small")
            else:
                await self._update(job, make_event(f"{text}; it continues from its checkpoint", "warn"))
        else:
            errors = errors.replace(f"{self._folder(job)}/", "")
            is_bad_file = "has errors; correct" in errors
            await self._fail(job, "invalid_training_file" if is_bad_file else "training_failed", errors)

    async def _succeed(self, job: Job, result: dict[str, Any]) -> None:
        """Keep the results as files, load them, name the model. Raises OSError or ServiceError."""
        tuned = parse_model_id(job.model_id)
        assert tuned is not None, "a job's model has a valid name"
        path = self._folder(job) / "result"
        if not job.result_files:  # else an earlier try has stored them
            await self._update(job, result_files=await asyncio.to_thread(store_results, self._store, job, path))
        if tuned.has_state:
            content = await asyncio.to_thread(path.with_name("result.state.pth").read_bytes)
            await self._load(AddState(tuned.name, content=content))
        if tuned.has_adapter:
            adapter = self._store.adapter_path(tuned.name)
            await asyncio.to_thread(link_result, path.with_name("result.lora.pth"), adapter)
            await self._load(AddAdapter(tuned.name, str(adapter), 1.0, is_own=True))
        metrics = {"step": result.get("best_step", result["steps"])}
        for name, when in (("valid_loss_before", "before"), ("valid_loss", "after")):
            metrics |= {name: result[when]["loss"]} if when in result else {}
        events = [make_event(text, "warn") for text in result["warnings"]]
        if "after" in result:
            before, after = result["before"]["loss"], result["after"]["loss"]
            events.append(make_event(f"The held-out loss went from {before} to {after}", data=metrics))
        events.append(make_event(f"The job has succeeded; the model is {job.model_id}"))
        await self._update(  # a job that was cancelled meanwhile stays so
            job, *events, status=JobStatus.SUCCEEDED, fine_tuned_model=job.model_id, finished_at=int(time.time()),
            estimated_finish=None, trained_tokens=result["trained_tokens"], metrics=metrics,
        )  # fmt: skip

    async def _load(self, call: EngineCall[Any]) -> None:
        """Load a result into the engine, if it is not there. Raises ServiceError."""
        try:
            await call_engine(self._context, call)
        except ServiceError as error:  # an earlier process may have loaded it, and then ended
            if error.info.kind is not ErrorKind.NAME_TAKEN:
                raise


async def _restarted(work: Callable[[], Awaitable[None]]) -> None:
    """Run work that never ends. Log an error of it, and run it again."""
    while True:
        try:
            await work()
        except Exception:  # a bug: the training must neither outlive its job nor stay paused
            logger.exception("a watch of a training process failed; it starts again in %g s", _RETRY_S)
        await asyncio.sleep(_RETRY_S)
