"""Records of ended work are deleted after 30 days, or if a key has too many."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from programs.serve.batches import retention
from programs.serve.batches.retention import RETENTION_S, delete_ended
from routes.file_store import Batch, Status, Store
from routes.fine_tuning.store import Job, JobStatus, JobStore, make_event

NOW = 2_000_000_000
OLD, FRESH = NOW - RETENTION_S - 1, NOW - 100


def batch(name: str, status: Status, created: int, owner: str = "") -> Batch:
    return Batch(
        id=name, owner=owner, client="", endpoint="/x", input_file_id="f", completion_window="24h", status=status,
        created_at=created, expires_at=created,
    )  # fmt: skip


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
        batch("batch_runs", Status.IN_PROGRESS, OLD),
        batch("batch_new", Status.COMPLETED, FRESH),
        batch("doc_new", Status.FAILED, FRESH),
    ]
    gone = [batch("batch_old", Status.COMPLETED, OLD), batch("doc_old", Status.CANCELLED, OLD)]
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
        store.add_batch(batch(f"batch_{number}", Status.COMPLETED, FRESH + number, "anna"))
    store.add_batch(batch("batch_bert", Status.COMPLETED, FRESH, "bert"))
    assert delete_ended(store, NOW) == 2
    assert [one.id for one in store.batches("anna", "", 9)] == ["batch_3", "batch_2"]
    assert len(store.batches("bert", "", 9)) == 1
