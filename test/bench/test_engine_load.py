"""Streams that fail are no figures."""

from __future__ import annotations

from typing import Any

import pytest

from bench.tools.engine_load import Streams, run_streams
from rwkv_batch.errors import ErrorInfo, ErrorKind
from rwkv_batch.request import Delta, Finish, FinishReason, Job, JobEvents

LOST = ErrorInfo(kind=ErrorKind.ENGINE_LOST, message="the engine is lost")


def finish(reason: FinishReason, error: ErrorInfo | None = None) -> list[Delta]:
    return [Delta(0, b"", 1, Finish(reason=reason, prompt_tokens=1, completion_tokens=1, error=error))]


class Ends:
    """An engine whose first job ends so, and all others as asked for."""

    def __init__(self, deltas: list[Delta], error: ErrorInfo | None = None) -> None:
        self.deltas, self.error = deltas, error

    def submit(self, job: Job, sink: Any, admitted: Any) -> None:
        admitted(None)
        sink(JobEvents(job_id=job.job_id, deltas=self.deltas, done=True, error=self.error))
        self.deltas, self.error = finish(FinishReason.LENGTH), None


@pytest.mark.parametrize(
    ("deltas", "error", "says"),
    [
        ([], LOST, "the engine is lost"),
        (finish(FinishReason.ERROR, LOST), None, "the engine is lost"),
        (finish(FinishReason.TIMEOUT), None, "timeout"),
    ],
)
def test_a_run_of_which_a_stream_failed_has_no_figures(deltas: list[Delta], error: ErrorInfo | None, says: str) -> None:
    engine: Any = Ends(deltas, error)
    with pytest.raises(SystemExit, match=f"1 streams did not draw all of their tokens: {says}"):
        run_streams(engine, Streams(count=3, max_tokens=8, chunk_size=8), "one")


def test_a_whole_run_has_the_time_of_each_first_token() -> None:
    engine: Any = Ends(finish(FinishReason.LENGTH))
    assert len(run_streams(engine, Streams(count=3, max_tokens=8, chunk_size=8), "two").first_s) == 3
