"""Splits a step's events into frames."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from rwkv_batch.request import Delta, JobEvents

FRAME_BYTES = 1 << 22
"""Approximate size of a frame of events. A step with many long rows is split into several."""
_DELTA_BYTES = 64
"""Approximate bytes of a delta without its text, and of a log-probability without its token."""


def split_frames(events: list[JobEvents], frame_bytes: int = FRAME_BYTES) -> Iterator[list[JobEvents]]:
    """Split events into frames of at most `frame_bytes` or one delta. A job's end comes in its last frame."""
    frame: list[JobEvents] = []
    size = 0
    for event in events:
        first = 0
        for i, delta in enumerate(event.deltas):
            more = _DELTA_BYTES + len(delta.text)
            if delta.logprobs is not None or delta.prompt_logprobs is not None:
                more += _size_of_logprobs(delta)
            if size and size + more > frame_bytes:
                if i > first:
                    frame.append(JobEvents(job_id=event.job_id, deltas=event.deltas[first:i]))
                yield frame
                frame, size, first = [], 0, i
            size += more
        rest = event if first == 0 else msgspec.structs.replace(event, deltas=event.deltas[first:])
        frame.append(rest)
        size += _DELTA_BYTES
    if frame:
        yield frame


def _size_of_logprobs(delta: Delta) -> int:
    size = 0
    for entry in (*(delta.logprobs or ()), *(delta.prompt_logprobs or ())):
        size += _DELTA_BYTES + len(entry.token) + _DELTA_BYTES * len(entry.top)
    return size
