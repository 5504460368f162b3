"""Counts jobs in the ledger of API keys' limits. One engine holds it for all processes.

The engine that has run longest holds it, so a joining engine takes nothing over. An engine that joins may have run
longer than was known, so requests wait until this process has connected to it. An engine that is seen as loading may
be ready already, so requests also wait for a moment after the first connection to another. If the holder is lost, the
next one gets this process's own jobs. It also gets the balances that the old holder reported. Other processes may know
of more usage, so the next holder counts no request before all of them have sent theirs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from rwkv_batch.calls import AcquireQuota
from rwkv_batch.errors import ServiceError
from rwkv_batch.fleet.member import Member
from rwkv_batch.ipc.quotas import Balance, CountedJob, Quotas
from rwkv_batch.ipc.served_model import ModelStatus
from rwkv_batch.ipc.wire import ReleaseQuotas, RestoreQuotas, UsageReport
from rwkv_batch.request import JobEvents, Usage

Members = Callable[[], Sequence[Member]]


class QuotaLedger:
    """The ledger as one process sees it. The fleets of all models share it. Any thread may call."""

    def __init__(self) -> None:
        self._sources: dict[Members, None] = {}
        self._copy = Quotas()
        self._balances: list[Balance] = []
        """as last reported by the holder"""
        self._has_changed = False
        """whether this process changed the ledger after that report"""
        self._unreported: dict[str, None] = {}
        """jobs with tokens that the holder does not know yet"""
        self._lock = threading.RLock()
        """held while a message is sent: a new holder first gets the known jobs"""
        self._holder: Member | None = None
        self._holder_started = 0.0
        """its `EngineClient.engine_started`: a restarted engine knows nothing"""
        self._connection = 0

    def add_members(self, members: Members) -> None:
        self._sources[members] = None

    def remove_members(self, members: Members) -> None:
        self._sources.pop(members, None)

    def acquire(self, usage: Usage, on_answer: Callable[[bool | ServiceError], None]) -> bool:
        """Count a job. Returns False if the holder is not known yet; then `on_answer` is not called.

        on_answer: gets True, or False if the holder lacks other processes' jobs. It gets an error if a limit is
        reached or the holder lost.
        """
        with self._lock:
            holder = self._find_holder()
            if holder is None or any(member.is_expected for member in self._members()):
                return False
            holder.client.call(AcquireQuota(usage), lambda answer: self._on_answer(holder, usage, answer, on_answer))
        return True

    def _on_answer(
        self,
        holder: Member,
        usage: Usage,
        answer: bool | ServiceError,
        on_answer: Callable[[bool | ServiceError], None],
    ) -> None:
        if answer is True:
            with self._lock:
                self._has_changed = True
                self._copy.add(usage)
                if self._holder is not holder:
                    holder.client.report_usage(_report(CountedJob(usage), done=True))
                    if (new_holder := self._find_holder()) is not None:
                        self._move_to(new_holder)  # it gets this job, too; later, jobs may have ended unreported
        on_answer(answer)

    def charge(self, job_id: str, events: JobEvents) -> None:
        """Charge a job's new tokens. The holder learns them with the next `poll`."""
        if self._copy.charge(job_id, events.num_sampled, events.num_replayed) is not None:
            self._has_changed = True
            self._unreported[job_id] = None

    def end(self, job_id: str, refund: bool) -> None:
        """Stop counting a job.

        refund: no engine admitted it, so it costs nothing
        """
        with self._lock:
            holder = self._find_holder()
            self._unreported.pop(job_id, None)
            job = self._copy.end(job_id, refund)
            self._has_changed = True
            if holder is not None and job is not None:
                holder.client.report_usage(_report(job, done=True, refund=refund))

    def poll(self) -> None:
        """Report new tokens to the holder and learn its balances."""
        with self._lock:
            holder = self._find_holder()
            if holder is None:
                return
            self._take_balances(holder.client.balances)
            unreported, self._unreported = self._unreported, {}
            jobs = [job for job in self._copy.jobs() if job.usage.job_id in unreported] if unreported else []
            if jobs:
                holder.client.report_usage(*(_report(job) for job in jobs))

    def _take_balances(self, balances: list[Balance]) -> None:
        """Update the copy. A report that may lack this process's own changes raises no balance."""
        if balances is self._balances:
            return
        if self._has_changed:
            self._copy.merge(balances)
        else:
            self._copy.replace(balances)
        self._copy.age()
        self._balances, self._has_changed = balances, False

    def _find_holder(self) -> Member | None:
        """Return the engine that holds the ledger. A new one first gets what is known here."""
        members = self._members()
        if not any(member.is_expected for member in members):
            connected = [member for member in members if member.is_linked and member.client.is_connected]
            oldest = min(connected, key=lambda member: (member.client.engine_started, member.name), default=None)
            is_known = oldest is self._holder and (oldest is None or oldest.connection == self._connection)
            if oldest is not None and not is_known and not (oldest.is_new and _may_be_older(members)):
                self._move_to(oldest)
        holder = self._holder
        is_connected = holder is not None and holder.client.is_connected and holder.connection == self._connection
        return holder if is_connected else None

    def _members(self) -> list[Member]:
        return [member for source in list(self._sources) for member in source()]

    def _move_to(self, holder: Member) -> None:
        before, self._holder, self._connection = self._holder, holder, holder.connection
        self._has_changed = True
        jobs = self._copy.jobs()
        if before is not None and before is not holder:
            before.client.report_usage(*(_report(job, done=True) for job in jobs), ReleaseQuotas())
        started, self._holder_started = self._holder_started, holder.client.engine_started
        knows_own = before is holder and started == self._holder_started  # it was only out of reach
        balances = self._copy.balances() if knows_own else self._copy.own_balances()
        holder.client.report_usage(RestoreQuotas(balances, jobs, has_moved=before is not None))


def _may_be_older(members: Sequence[Member]) -> bool:
    """Return whether a loading engine may have started before all others. It is loading as far as this process sees."""
    return any(one.info.status is ModelStatus.LOADING and not one.client.is_connected for one in members)


def _report(job: CountedJob, done: bool = False, refund: bool = False) -> UsageReport:
    return UsageReport(job.usage.job_id, job.sampled, job.replayed, done, refund)
