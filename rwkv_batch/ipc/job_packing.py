"""Sends a request's common fields once per job.

A request gives them once for all its rows: a constraint, stops, biases, states. They may be large. With a copy in each
of 4,096 rows, one request would fill the link to the engine.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import msgspec

from rwkv_batch.ipc.wire import Submit
from rwkv_batch.request import GenerateRequest, Job
from sampling.grammar.constraint import Constraint
from sampling.params import Filters


class _Common(NamedTuple):
    stop_ids: list[int]
    stop_strings: list[bytes]
    mixture: list[tuple[str, float]]
    constraint: Constraint | None
    logit_bias: dict[int, float]
    filters: Filters | None


_NOTHING = _Common([], [], [], None, {}, None)


def pack(job: Job) -> Submit:
    """Return a job's message. A row's fields are left out if they equal those of the row before it."""
    repeats = [i for i, (before, row) in enumerate(pairwise(job.rows), 1) if _common(before) == _common(row)]
    if not repeats:
        return Submit(job)
    rows = list(job.rows)
    for i in repeats:
        rows[i] = _with_common(rows[i], _NOTHING)
    return Submit(msgspec.structs.replace(job, rows=rows), repeats)


def unpack(message: Submit) -> Job:
    """Return the packed job. Rows share what they have in common."""
    rows = message.job.rows
    for i in message.repeats:
        rows[i] = _with_common(rows[i], _common(rows[i - 1]))
    return message.job


def _common(row: GenerateRequest) -> _Common:
    sampling = row.sampling
    return _Common(row.stop_ids, row.stop_strings, row.mixture, row.constraint, sampling.logit_bias, sampling.filters)


def _with_common(row: GenerateRequest, common: _Common) -> GenerateRequest:
    return msgspec.structs.replace(
        row,
        stop_ids=common.stop_ids,
        stop_strings=common.stop_strings,
        mixture=common.mixture,
        constraint=common.constraint,
        sampling=msgspec.structs.replace(row.sampling, logit_bias=common.logit_bias, filters=common.filters),
    )
