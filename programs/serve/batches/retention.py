"""Deletes the records of what ended long ago: batches, documents and fine-tuning jobs."""

from __future__ import annotations

from routes.file_store import ACTIVE_STATUSES, Store
from routes.fine_tuning.store import JobStatus

RETENTION_S = 30 * 86_400
"""Age of a record that is deleted."""
MAX_BATCHES, MAX_TUNINGS = 10_000, 1_000
"""Ended batches and documents, and fine-tuning jobs, of a key. A job has some hundred events."""
_ENDED_BATCH = f"status NOT IN ({', '.join(repr(str(one)) for one in ACTIVE_STATUSES)})"
_ENDED_TUNING = (
    f"(status IN ('{JobStatus.FAILED}', '{JobStatus.CANCELLED}') "
    f"OR (status = '{JobStatus.SUCCEEDED}' AND json_extract(record, '$.is_deleted')))"
)
"""The job of a model stays with it."""


def delete_ended(store: Store, now: float) -> int:
    """Delete the records of ended work that are old, or that a key has too many of. Return how many.

    now: Unix time in seconds. The files expire by themselves.
    """
    if not store.runs.exists():  # nothing was stored yet
        return 0
    with store.open() as database:
        count = 0
        for table, ended, limit in (("batches", _ENDED_BATCH, MAX_BATCHES), ("tunings", _ENDED_TUNING, MAX_TUNINGS)):
            ranked = (
                "SELECT id, created, ROW_NUMBER() OVER (PARTITION BY owner ORDER BY created DESC, id DESC) AS number "
                f"FROM {table} WHERE {ended}"
            )
            old = f"SELECT id FROM ({ranked}) WHERE created < ? OR number > ?"
            count += database.execute(
                f"DELETE FROM {table} WHERE id IN ({old})", (int(now) - RETENTION_S, limit)
            ).rowcount
        database.execute("DELETE FROM tuning_events WHERE job NOT IN (SELECT id FROM tunings)")
    return count
