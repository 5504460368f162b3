"""The batch runner with a store alone: internal faults, an unusable store, wrong clocks."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from programs.batch.inputs import Input
from programs.batch.sidecar import Progress, Sidecar
from programs.record import RunError
from programs.serve.batches import process as runner_process
from programs.serve.batches import retention
from programs.serve.batches.job import BatchJob
from programs.serve.batches.process import BatchRunner
from programs.serve.batches.retention import RETENTION_S, delete_ended
from routes.config import HttpConfig
from routes.file_store import ACTIVE_STATUSES, Batch, Purpose, Result, Status, Store, StoredFile
from routes.fine_tuning.store import Job, JobStatus, JobStore, make_event
from test.programs.batch.runs import batch_record


class FullDisk(Store):
    """Rejects the record of a failed batch a number of times."""

    refusals = 1

    def update(self, batch_id: str, update: Callable[[Batch], Batch]) -> Batch:
        def checked(batch: Batch) -> Batch:
            batch = update(batch)
            if batch.status is Status.FAILED and self.refusals:
                self.refusals -= 1
                raise OSError(errno.ENOSPC, "No space left on device")
            return batch

        return super().update(batch_id, checked)


def faulty_batch(store: Store) -> Batch:
    """Return a running batch with one answered line."""
    file = StoredFile(id="file-1", owner="", bytes=3, created_at=1, filename="f.jsonl", purpose=Purpose.BATCH)
    batch = batch_record("batch_1", Status.IN_PROGRESS, 1, expires_at=int(time.time()) + 3600)
    store.add_batch(batch)
    store.add_file(file, b"{}\n")
    (store.runs / f"{batch.id}.jsonl").write_bytes(ANSWERED)
    progress = Sidecar(store.runs / f"{batch.id}.progress")
    progress.begin({}, "")
    progress.commit(Progress(output_bytes=len(ANSWERED), answered=1), {})
    progress.close()
    return batch


def runner_of(store: Store) -> BatchRunner:
    return BatchRunner(store, CONTEXT, lambda: None)


async def run_until(runner: BatchRunner, is_seen: Callable[[], object]) -> None:
    """Runs the runner until the condition holds. Only polling shows it."""
    stop = asyncio.Event()
    running = asyncio.create_task(runner.run(stop))
    while not is_seen():
        assert not running.done()
        await asyncio.sleep(0.01)
    stop.set()
    await running


CONTEXT: Any = SimpleNamespace(config=HttpConfig())
ANSWERED = b'{"custom_id": "c0"}\n'


def test_a_batch_whose_failure_was_not_recorded_fails_at_the_next_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store: Store = FullDisk(tmp_path, 1 << 30, 100)
    batch, runner = faulty_batch(store), runner_of(store)

    async def faulty(self: BatchJob) -> Status:
        raise TypeError("a fault of ours")

    with monkeypatch.context() as patch:
        patch.setattr(BatchJob, "_run_lines", faulty)
        asyncio.run(asyncio.wait_for(run_until(runner, lambda: batch.id in runner._retry_at), 20))
    found = store.batch("", batch.id)
    assert found is not None and found.status in ACTIVE_STATUSES
    asyncio.run(asyncio.wait_for(BatchJob(store, CONTEXT, found).run(), 20))
    failed = store.batch("", batch.id)
    assert failed is not None and failed.status is Status.FAILED and "a fault of ours" in failed.errors[0]["message"]
    assert failed.output_file_id and store.content(failed.output_file_id).read_bytes() == ANSWERED
    assert not list(store.runs.iterdir())


def test_a_disk_that_cannot_be_read_now_fails_no_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is there. It was reported as deleted or damaged, and the batch was lost."""
    store = Store(tmp_path, 1 << 30, 100)
    batch = msgspec.structs.replace(faulty_batch(store), id="batch_2", status=Status.VALIDATING)
    store.add_batch(batch)
    job = BatchJob(store, CONTEXT, batch)
    content = store.content(batch.input_file_id)
    moved = content.rename(tmp_path / "moved")
    content.mkdir()  # for a process without free descriptors: it exists, and opening it fails
    with pytest.raises(RunError, match="cannot be read"):
        asyncio.run(job.run())
    content.rmdir()
    moved.rename(content)

    def fail(self: Input, size: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Input, "_read_piece", fail)
        with pytest.raises(RunError, match="Input/output error"):
            asyncio.run(job.run())
    stored = store.batch("", batch.id)
    assert stored is not None and stored.status is Status.VALIDATING and not stored.errors


@pytest.mark.parametrize("has_results", [True, False])
def test_a_batch_whose_disk_fails_for_good_ends_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_results: bool
) -> None:
    """It was tried again for ever."""

    async def broken(self: BatchJob) -> Status:
        raise OSError(errno.EIO, "Input/output error", str(self._path(".jsonl")))

    monkeypatch.setattr(BatchJob, "_run_lines", broken)
    monkeypatch.setattr(runner_process, "_POLL_S", 0.001)
    monkeypatch.setattr(runner_process, "_RETRY_S", 0.001)
    monkeypatch.setattr(runner_process, "_GIVE_UP_S", 0.02)
    store = Store(tmp_path, 1 << 30, 100)
    batch = faulty_batch(store)
    if not has_results:
        store.content(batch.result_id(Result.OUTPUT)).mkdir()  # renaming the results fails

    def is_failed() -> bool:
        found = store.batch("", batch.id)
        return found is not None and found.status is Status.FAILED

    asyncio.run(asyncio.wait_for(run_until(runner_of(store), is_failed), 60))
    failed = store.batch("", batch.id)
    assert failed is not None and failed.errors[0]["code"] == "storage_failed"
    assert failed.errors[0]["message"].endswith(": Input/output error"), "clients do not learn the path"
    assert (failed.output_file_id is not None) == has_results


def test_a_failed_try_leaves_no_lock_on_the_results(tmp_path: Path) -> None:
    """Every later try was refused: "is being written by another run"."""
    store = Store(tmp_path, 1 << 30, 100)
    job = BatchJob(store, CONTEXT, faulty_batch(store))
    progress = store.runs / "batch_1.progress"
    moved = progress.rename(tmp_path / "moved")
    progress.mkdir()
    with pytest.raises(RunError, match="cannot be used now"):
        job._open_outputs()
    progress.rmdir()
    moved.rename(progress)
    files = job._open_outputs()
    assert files.progress.answered == 1
    files.close()


def test_a_cancelled_batch_whose_file_was_deleted_is_cancelled(tmp_path: Path) -> None:
    """It failed: the file was deleted."""
    store = Store(tmp_path, 1 << 30, 100)
    batch = store.update(faulty_batch(store).id, lambda one: one.with_status(Status.CANCELLING, 5))
    store.content(batch.input_file_id).unlink()
    asyncio.run(BatchJob(store, CONTEXT, batch).run())
    ended = store.batch("", batch.id)
    assert ended is not None and ended.status is Status.CANCELLED and ended.output_file_id


class Unusable(Store):
    """Fails the first reads, for two different reasons."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 1 << 30, 100)
        self.reasons = ["is full"] * 3 + ["is locked"] * 3
        self.was_looked_at = threading.Event()

    def active_batches(self) -> list[Batch]:
        if self.reasons:
            raise OSError(self.reasons.pop(0))
        self.was_looked_at.set()
        return []


def test_an_unusable_store_is_logged_once_and_its_recovery_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner_process, "_POLL_S", 0.001)
    store = Unusable(tmp_path)

    with caplog.at_level("INFO", runner_process.logger.name):
        asyncio.run(asyncio.wait_for(run_until(runner_of(store), store.was_looked_at.is_set), 20))
    assert [record.getMessage() for record in caplog.records] == [
        *(
            f"batches wait: {reason}; if the disk of --files-dir is full, make room there"
            for reason in ("is full", "is locked")
        ),
        "the store of batches can be used again",
    ]


def test_free_memory_returns_to_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The soak took a heap's free pages for a leak."""
    releases: list[int] = []
    monkeypatch.setattr(runner_process, "release_free_pages", lambda: releases.append(1))
    asyncio.run(runner_of(Store(tmp_path, 1 << 30, 100))._poll())
    assert releases


def test_a_clock_set_ahead_deletes_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, 1 << 30, 100)
    wall, running = 1e9, 50.0
    clock = SimpleNamespace(time=lambda: wall, monotonic=lambda: running)
    monkeypatch.setattr(runner_process, "time", clock)
    for name, expires in (("file-a", wall + 2000), ("file-b", wall + 900)):
        file = StoredFile(
            id=name,
            owner="",
            bytes=1,
            created_at=int(wall),
            filename="a",
            purpose=Purpose.BATCH,
            expires_at=int(expires),
        )
        store.add_file(file, b"a")
    runner = runner_of(store)
    wall, running = wall + 1e8 + 1000, running + 1000
    asyncio.run(runner._poll())
    assert [file.id for file in store.files("", "", "", 10, True)] == ["file-a"]


def test_a_clock_set_ahead_ends_no_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock set back does not delay a batch's end for long. The delay is at most the time it was set back."""
    store = Store(tmp_path, 1 << 30, 100)
    batch = faulty_batch(store)
    wall, running = float(batch.expires_at - 3600), 50.0
    monkeypatch.setattr(runner_process, "time", SimpleNamespace(time=lambda: wall, monotonic=lambda: running))
    found: list[BatchJob] = []

    async def run(self: BatchJob) -> None:
        found.append(self)

    monkeypatch.setattr(BatchJob, "run", run)

    async def polled() -> None:
        await runner_of(store)._poll()
        await asyncio.sleep(0)

    asyncio.run(polled())
    wall, running = wall + 86_400, running + 10
    assert found[0]._status_now() is Status.COMPLETED, "it may continue"
    wall, running = wall - 86_400, running + 3600
    assert found[0]._status_now() is Status.COMPLETED
    wall += 3601
    assert found[0]._status_now() is Status.EXPIRED


class LooksLate(Store):
    """Returns running batches some time after reading them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 1 << 30, 100)
        self.has_read, self.may_tell = threading.Event(), threading.Event()

    def active_batches(self) -> list[Batch]:
        found = super().active_batches()
        self.has_read.set()
        self.may_tell.wait(60)
        return found


def test_a_batch_that_ends_during_the_search_is_not_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, begun = LooksLate(tmp_path), []
    faulty_batch(store)

    async def looked() -> None:
        runner, ends = runner_of(store), asyncio.Event()

        async def run(self: BatchJob) -> None:
            begun.append(self.batch.id)
            await ends.wait()
            await self._set_status(Status.COMPLETED)

        monkeypatch.setattr(BatchJob, "run", run)
        store.may_tell.set()
        await runner._poll()
        store.has_read.clear()
        store.may_tell.clear()
        looking = asyncio.create_task(runner._poll())
        await asyncio.to_thread(store.has_read.wait, 60)
        ends.set()
        await asyncio.gather(*runner._tasks.values())
        store.may_tell.set()
        await looking
        await asyncio.gather(*runner._tasks.values())

    asyncio.run(asyncio.wait_for(looked(), 60))
    assert begun == ["batch_1"]


NOW = 2_000_000_000
OLD, FRESH = NOW - RETENTION_S - 1, NOW - 100


def job(name: str, status: JobStatus, created: int, is_deleted: bool = False) -> Job:
    return Job(
        id=f"ftjob-{name}", owner="", model="m", training_file="f", tuning="state", rank=1, epochs=1, batch_size=1,
        multiplier=1.0, seed=1, status=status, created_at=created, is_deleted=is_deleted,
    )  # fmt: skip


def test_old_records_of_ended_work_are_deleted(tmp_path: Path) -> None:
    """They stayed for ever."""
    store = Store(tmp_path / "files", 1 << 20, 10)
    assert delete_ended(store, NOW) == 0 and not (tmp_path / "files").exists()
    kept = [
        batch_record("batch_runs", Status.IN_PROGRESS, OLD),
        batch_record("batch_new", Status.COMPLETED, FRESH),
        batch_record("doc_new", Status.FAILED, FRESH),
    ]
    gone = [batch_record("batch_old", Status.COMPLETED, OLD), batch_record("doc_old", Status.CANCELLED, OLD)]
    for one in (*kept, *gone):
        store.add_batch(one)
    jobs = JobStore(store)
    tunings = [
        job("failed", JobStatus.FAILED, OLD),
        job("model", JobStatus.SUCCEEDED, OLD),
        job("deleted", JobStatus.SUCCEEDED, OLD, is_deleted=True),
        job("runs", JobStatus.RUNNING, OLD),
        job("new", JobStatus.CANCELLED, FRESH),
    ]
    for tuning in tunings:
        jobs.add(msgspec.structs.replace(tuning, status=JobStatus.RUNNING))

        def end(_: Job, ended: Job = tuning) -> Job:
            return ended

        jobs.update(tuning.id, end, make_event("Created"))
    assert delete_ended(store, NOW) == 4
    assert {one.id for one in (*kept, *gone) if store.batch("", one.id)} == {one.id for one in kept}
    assert {one.id for one in jobs.jobs("")} == {"ftjob-model", "ftjob-runs", "ftjob-new"}
    assert [len(jobs.events(one.id, "", 9)) for one in tunings] == [0, 1, 0, 1, 1]


def test_a_key_keeps_its_newest_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "MAX_BATCHES", 2)
    store = Store(tmp_path / "files", 1 << 20, 100)
    for number in range(4):
        store.add_batch(batch_record(f"batch_{number}", Status.COMPLETED, FRESH + number, owner="anna"))
    store.add_batch(batch_record("batch_bert", Status.COMPLETED, FRESH, owner="bert"))
    assert delete_ended(store, NOW) == 2
    assert [one.id for one in store.batches("anna", "", 9)] == ["batch_3", "batch_2"]
    assert len(store.batches("bert", "", 9)) == 1
