"""Uploads states to the checkpoint store while turns and other states are written. Then their rows are written."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from state_pool.crash_points import reach
from state_pool.disk.checkpoint_objects import ORPHAN_AGE_S, CheckpointObjects
from state_pool.disk.operations import StagedState, StagingQueue, StoredObject
from state_pool.errors import TurnNotStored
from state_pool.layout import Layout, part_sizes


class Uploads:
    """Started by the writer thread; callbacks run on the object threads."""

    def __init__(
        self,
        objects: CheckpointObjects,
        layout: Layout,
        staged: StagingQueue,
        changed: threading.Condition,
        failed: Callable[[StagedState, Exception], None],
    ) -> None:
        """`changed`: the writer's lock, which guards `staged`. `failed`: called for a failed upload."""
        self._objects = objects
        self._order = list(layout)
        self._num_bytes = sum(part_sizes(layout).values())
        self._staged = staged
        self._changed = changed
        self._failed = failed

    def begin(self, staging: StagedState, state: int) -> None:
        """Start to put the state's object under this state number."""
        reach("before_checkpoint")
        staging.state, staging.num_bytes, staging.upload_started_at = state, self._num_bytes, time.time()
        with self._changed:
            if self._staged.start_upload(staging):
                job = staging.job
                self._objects.put(
                    state, job.session.row, job.host, self._order, lambda outcome: self._put(staging, outcome)
                )

    def _put(self, staging: StagedState, outcome: StoredObject | Exception) -> None:
        reach("within_checkpoint")
        if isinstance(outcome, Exception):
            self._failed(staging, outcome)
            return
        with self._changed:
            staging.stored = outcome
            if not self._staged.finish_upload(staging):
                self._objects.delete(outcome.key)
            self._changed.notify()


def check_age(staging: StagedState) -> None:
    """Raises TurnNotStored if a sweep might already treat the object as an orphan."""
    if time.time() > staging.upload_started_at + ORPHAN_AGE_S / 2:
        raise TurnNotStored("the upload of its state took too long, a sweep may delete the object; it is stored again")
