"""Limits of API keys: rows at once, requests and tokens per minute, with a clock that the test sets."""

from __future__ import annotations

import pytest

from rwkv_batch.errors import ErrorInfo, ErrorKind
from rwkv_batch.ipc.quotas import Balance, CountedJob, Quotas
from rwkv_batch.request import ClientLimits, Usage

LIMITS = ClientLimits(rows=5, requests_per_minute=3, tokens_per_minute=120)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def quotas(clock: Clock) -> Quotas:
    return Quotas(clock)


def usage(job_id: str, rows: int = 1, prompt: int = 0, limits: ClientLimits = LIMITS, states: int = 1) -> Usage:
    return Usage(job_id, "key", limits, rows, prompt, states)


def refusal(error: ErrorInfo | None) -> tuple[ErrorKind, float | None]:
    assert error is not None
    return error.kind, error.retry_after_s


def test_a_key_may_have_exactly_its_rows_at_once(quotas: Quotas) -> None:
    assert quotas.count(usage("a", rows=3)) is None
    error = quotas.count(usage("b", rows=3))
    assert refusal(error) == (ErrorKind.OVERLOADED, 1.0) and error is not None
    assert error.message == (
        "the key key has 3 rows in progress and may have 5 at once, this request has 3; retry in 1.0 s"
    )
    assert quotas.count(usage("c", rows=2)) is None
    quotas.end("a")
    assert quotas.count(usage("d", rows=3)) is None
    assert sorted(job.usage.job_id for job in quotas.jobs()) == ["c", "d"]


def test_a_request_with_more_rows_than_the_key_may_ever_have_is_wrong(quotas: Quotas) -> None:
    error = quotas.count(usage("a", rows=6, states=2))
    assert error is not None and (error.kind, error.field, error.given) == (ErrorKind.INVALID_FIELD, "rows", 6)
    assert "6 rows, one per state of its mixture" in error.message
    assert not quotas.has_jobs and "a" not in quotas


def test_requests_per_minute_are_a_bucket_that_refills(quotas: Quotas, clock: Clock) -> None:
    """Three at once, then one each 20 seconds."""
    for name in "abc":
        assert quotas.count(usage(name, rows=0)) is None
    error = quotas.count(usage("d", rows=0))
    assert refusal(error) == (ErrorKind.OVERLOADED, 20.0) and error is not None
    assert error.message == "the key key may send 3 requests a minute; retry in 20.0 s"
    clock.now += 15
    assert refusal(quotas.count(usage("d", rows=0)))[1] == pytest.approx(5)
    clock.now += 5
    assert quotas.count(usage("d", rows=0)) is None and "d" in quotas
    clock.now += 3600
    for name in "efg":
        assert quotas.count(usage(name, rows=0)) is None, "an hour saves up no more than a minute's requests"
    assert quotas.count(usage("h", rows=0)) is not None


def test_a_bucket_with_one_token_admits_a_request_of_any_size(quotas: Quotas, clock: Clock) -> None:
    assert quotas.count(usage("a", prompt=119)) is None
    assert quotas.count(usage("b", prompt=101)) is None
    error = quotas.count(usage("c"))
    assert refusal(error) == (ErrorKind.OVERLOADED, 101 / 2) and error is not None
    assert error.message == "the key key may use 120 tokens a minute; retry in 50.5 s"
    clock.now += 50
    assert refusal(quotas.count(usage("c")))[1] == 0.5, "an empty bucket admits none"
    clock.now += 0.5
    assert quotas.count(usage("c")) is None


def test_a_job_is_charged_once_whoever_reports_it(quotas: Quotas) -> None:
    quotas.count(usage("a", prompt=10, states=2))
    assert quotas.count(usage("a", prompt=10, states=2)) is None
    quotas.add(usage("a", prompt=10, states=2))
    assert quotas.charge("a", 0) is None and quotas.charge("other", 5) is None
    assert quotas.charge("a", 3, 4) == CountedJob(usage("a", prompt=10, states=2), 3, 4)
    assert quotas.charge("a", 5, 4, is_total=True) == CountedJob(usage("a", prompt=10, states=2), 2, 0)
    assert quotas.charge("a", 5, 6, is_total=True) == CountedJob(usage("a", prompt=10, states=2), 0, 2)
    assert quotas.charge("a", 4, 6, is_total=True) is None, "an older report"
    assert quotas.balances() == [Balance("key", LIMITS, 2.0, 120.0 - 10 - 2 * (5 + 6))]
    assert quotas.jobs() == [CountedJob(usage("a", prompt=10, states=2), 5, 6)]
    ended = quotas.end("a")
    assert ended is not None and (ended.sampled, ended.replayed) == (5, 6)
    assert quotas.end("a") is None and not quotas.has_jobs
    assert quotas.balances() == [Balance("key", LIMITS, 2.0, 88.0)], "a job that has ended stays paid"


def test_a_job_that_no_engine_admitted_costs_nothing(quotas: Quotas) -> None:
    quotas.count(usage("a", rows=5, prompt=30))
    quotas.end("a", refund=True)
    assert quotas.balances() == []
    assert quotas.count(usage("b", rows=5)) is None


def test_changed_limits_apply_to_the_next_request(quotas: Quotas, clock: Clock) -> None:
    quotas.count(usage("a", prompt=100))
    less = ClientLimits(tokens_per_minute=10)
    assert quotas.count(usage("b", rows=99, limits=less)) is None, "rows are no longer limited"
    assert quotas.balances() == [], "the bucket is cut to the new size, and full"
    more = ClientLimits(tokens_per_minute=60)
    clock.now += 10
    quotas.count(usage("c", prompt=5, limits=more))
    assert quotas.balances() == [Balance("key", more, None, 15.0)]


def test_keys_that_used_nothing_for_a_minute_take_no_memory(quotas: Quotas, clock: Clock) -> None:
    """Keys are renamed and removed while the service runs."""
    copy = Quotas(clock)
    for number in range(9):
        key = Usage(str(number), f"key-{number}", LIMITS, 1, 100, 1)
        assert quotas.count(key) is None
        copy.add(key)
        if number:
            quotas.end(str(number))
            copy.end(str(number))
    copy.replace(quotas.balances())
    assert len(quotas._clients) == len(copy._clients) == 9
    clock.now += 60
    copy.replace(quotas.balances())
    assert list(quotas._clients) == list(copy._clients) == ["key-0"], "it has a job"


def test_a_copy_takes_over_the_lower_levels(quotas: Quotas) -> None:
    quotas.add(usage("mine", rows=2, prompt=20))
    known = Balance("key", LIMITS, 3.0, 50.0)
    theirs = [CountedJob(usage("theirs", rows=2), 7), CountedJob(usage("mine", rows=2), 7)]
    for _ in range(2):
        quotas.merge([known], theirs)
    assert quotas.balances() == [Balance("key", LIMITS, 2.0, 50.0)]
    assert {job.usage.job_id: job.sampled for job in quotas.jobs()} == {"mine": 0, "theirs": 7}
    assert quotas.count(usage("more", rows=2)) is not None and quotas.count(usage("fits", rows=1)) is None
    quotas.replace([])
    assert quotas.balances() == [], "the ledger says that nothing is used"
    quotas.replace([Balance("key", LIMITS, 1.5, None)])
    assert quotas.balances() == [Balance("key", LIMITS, 1.5, 120.0)]
