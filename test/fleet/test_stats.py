"""Merged statistics of several engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from rwkv_batch.calls import CountJobs, ListRequests
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.fleet.gather import gather, merged_metrics

MEMBERS: list[Any] = [SimpleNamespace(name=name) for name in ("engine-0", "engine-1")]


def test_engine_metrics_are_labelled_and_request_metrics_are_summed() -> None:
    text = '# HELP rwkv_x X.\n# TYPE rwkv_x gauge\nrwkv_x 1.0\n# HELP rwkv_http_n N.\nrwkv_http_n{a="b"} 2.0\n'
    merged = merged_metrics([(one, text) for one in MEMBERS]).splitlines()
    assert merged == [
        "# HELP rwkv_x X.",
        "# TYPE rwkv_x gauge",
        'rwkv_x{engine="engine-0"} 1.0',
        'rwkv_x{engine="engine-1"} 1.0',
        "# HELP rwkv_http_n N.",
        'rwkv_http_n{a="b"} 4.0',
    ]


def test_families_without_samples_do_not_split_others() -> None:
    """One of the engines has served no request yet."""
    registry = CollectorRegistry()
    counter = Counter("rwkv_answers", "Answers.", ["kind"], registry=registry)
    Gauge("rwkv_rows", "Rows.", registry=registry).set(1)
    idle = generate_latest(registry).decode()
    counter.labels("chat").inc()
    busy = generate_latest(registry).decode()
    for texts in ((idle, busy), (busy, idle)):
        merged = merged_metrics(list(zip(MEMBERS, texts, strict=True)))
        assert merged.count("# HELP rwkv_rows") == merged.count("# TYPE rwkv_answers_total") == 1
        families = {one.name: one for one in text_string_to_metric_families(merged)}
        assert [sample.labels["engine"] for sample in families["rwkv_rows"].samples] == ["engine-0", "engine-1"]
        assert {one.name for one in families["rwkv_answers"].samples} == {"rwkv_answers_total"}


def member(answer: Any) -> Any:
    return SimpleNamespace(client=SimpleNamespace(call=lambda call, reply: reply(answer)))


@pytest.mark.parametrize("away", [ErrorKind.ENGINE_LOST, ErrorKind.DRAINING])
def test_a_lost_or_draining_engine_does_not_decide_the_answer(away: ErrorKind) -> None:
    gone, other = ServiceError(away, "it ends"), ServiceError(ErrorKind.INTERNAL, "it fails")
    for answers, right in (((2, gone, 3), 5), ((gone,), gone), ((2, gone, other), other)):
        replies: list[Any] = []
        members = [member(answer) for answer in answers]
        gather(CountJobs("v1"), replies.append, members, members.copy, lambda session: None, True)
        assert replies == [right]


def test_requests_of_all_engines_are_one_list_newest_first() -> None:
    replies: list[Any] = []
    members = [member([{"at": at} for at in times]) for times in ((5.0, 1.0), (7.0, 2.0))]
    gather(ListRequests(), replies.append, members, members.copy, lambda session: None, True)
    assert replies == [[{"at": 7.0}, {"at": 5.0}, {"at": 2.0}, {"at": 1.0}]]
