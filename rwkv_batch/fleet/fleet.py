"""Several engines of one model behind one interface.

Each job runs on one engine. If that engine is lost or drains, the job continues on another one, or waits a while for
one. One engine is a fleet of one.

Any thread may call. Each engine's client has a thread that delivers its events. One more thread polls all engines.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Sequence

from rwkv_batch.calls import Answer, EngineCall, Reply
from rwkv_batch.errors import ErrorInfo, ErrorKind, ServiceError
from rwkv_batch.fleet.gather import gather
from rwkv_batch.fleet.in_flight_job import CANCELLED, ENGINE_GONE, Attempt, InFlightJob
from rwkv_batch.fleet.member import CONNECT_TIMEOUT_S, POLL_INTERVAL_S, Member
from rwkv_batch.fleet.quota_ledger import QuotaLedger
from rwkv_batch.fleet.routing import EngineLru, FleetLimits, RoutingHints, choose, prefix_key, rendezvous_weight
from rwkv_batch.ipc.client import LOADING
from rwkv_batch.ipc.served_model import ServedModel
from rwkv_batch.ipc.wire import Observe
from rwkv_batch.protocol import OnAdmitted, Sink
from rwkv_batch.request import Job, JobEvents, Usage

logger = logging.getLogger(__name__)


class Fleet:
    """`EngineProtocol` over the engines given to `update`."""

    def __init__(
        self,
        limits: FleetLimits,
        on_change: Callable[[bool], None] = lambda is_connected: None,
        quotas: QuotaLedger | None = None,
    ) -> None:
        """on_change: called with whether any engine accepts work, when that changes; must not call the fleet
        quotas: the ledger of another fleet of this process
        """
        self._limits = limits
        self._on_change = on_change
        self._name = ""
        self._is_shutting_down = False
        self._lock = threading.RLock()
        self._members: dict[str, Member] = {}
        self._in_flight_jobs: dict[str, InFlightJob] = {}
        self._waiting: dict[str, InFlightJob] = {}
        """jobs among them without an engine"""
        self._sessions, self._prompts = EngineLru(), EngineLru()
        self._was_connected = False
        self._lost_at = -math.inf
        """time.monotonic()"""
        self._notify_lock = threading.Lock()
        """held during `on_change`"""
        self._rng = random.Random()
        self._stopped = threading.Event()
        self.quotas = quotas or QuotaLedger()
        """API keys' limits; further fleets of this process share it"""
        self._list_members = lambda: self.members
        self.quotas.add_members(self._list_members)

    # Start and stop ------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        self._name = name
        for member in self.members:
            member.client.start(name)
        threading.Thread(target=self._poll_loop, name="fleet", daemon=True).start()

    def update(self, engines: Sequence[ServedModel]) -> None:
        """Set the current engines. Jobs of removed engines continue elsewhere."""
        info = {engine.address: engine for engine in engines}
        with self._lock:
            gone = [self._members.pop(address) for address in set(self._members) - set(info)]
            for address, engine in info.items():
                if address in self._members:
                    self._members[address].update(engine)
                else:
                    member = self._members[address] = Member(engine, self._changed)
                    member.client.is_shutting_down = self._is_shutting_down
                    if self._name:
                        member.client.start(self._name)
        for member in gone:
            member.client.stop()
        self._notify_change()

    def stop(self) -> None:
        self._stopped.set()
        self._is_shutting_down = True
        for member in self.members:
            member.client.stop()
        self._dispatch_waiting()
        self.quotas.remove_members(self._list_members)

    @property
    def is_shutting_down(self) -> bool:
        """Whether the service is shutting down. Then jobs do not wait for a lost engine; remaining engines continue."""
        return self._is_shutting_down

    @is_shutting_down.setter
    def is_shutting_down(self, value: bool) -> None:
        self._is_shutting_down = value
        for member in self.members:
            member.client.is_shutting_down = value

    @property
    def members(self) -> list[Member]:
        with self._lock:
            return list(self._members.values())

    @property
    def is_connected(self) -> bool:
        return any(member.is_available for member in self.members)

    @property
    def lost(self) -> list[str]:
        return [member.name for member in self.members if not member.is_available]

    @property
    def num_jobs(self) -> int:
        return len(self._in_flight_jobs)

    # EngineProtocol ------------------------------------------------------------------------------------------

    def submit(self, job: Job, sink: Sink, on_admitted: OnAdmitted) -> None:
        in_flight_job = InFlightJob(job, sink, on_admitted, self._limits.resubmit > 0)
        error = self._unavailable_reason()
        if not self.is_connected and not self._may_come_back():
            in_flight_job.fail(error)
            return
        with self._lock:
            self._in_flight_jobs[job.job_id] = in_flight_job
        self._dispatch(in_flight_job, error)

    def _acquire_quota(self, in_flight_job: InFlightJob, usage: Usage, error: ErrorInfo) -> None:
        """Count the job against its client's limits, then dispatch it. `error`: see `_dispatch`."""

        def on_answer(answer: bool | ServiceError) -> None:
            if answer is False:  # the next poll sends it again
                self._enqueue(in_flight_job, error)
                return
            if not isinstance(answer, ServiceError):
                in_flight_job.is_counted = True
                self._dispatch(in_flight_job, error)
                return
            in_flight_job.losses += answer.info.kind is ErrorKind.ENGINE_LOST
            if answer.info.kind in ENGINE_GONE and in_flight_job.losses <= self._limits.resubmit:
                self._enqueue(in_flight_job, answer.info)
            else:
                self._forget(in_flight_job)
                in_flight_job.report_admission(answer)

        if not self.quotas.acquire(usage, on_answer):
            self._enqueue(in_flight_job, error)

    def cancel(self, job_id: str) -> None:
        with self._lock:
            in_flight_job = self._in_flight_jobs.get(job_id)
            waits = self._waiting.pop(job_id, None) is not None
            if in_flight_job is None:
                return
            in_flight_job.is_cancelled = True  # under the lock: a concurrent `_dispatch` sees it or has set `member`
            member = in_flight_job.member
        if waits:
            self._fail(in_flight_job, CANCELLED)
        elif member is not None:
            member.client.cancel(in_flight_job.attempt_id)

    def call(self, call: EngineCall[Answer], reply: Reply[Answer]) -> None:
        connected = [member for member in self.members if member.client.is_connected]
        members = sorted(connected, key=lambda one: not one.is_available)  # one that drains may lack new states
        if not members:
            reply(ServiceError.from_info(self._unavailable_reason()))
            return
        gather(call, reply, members, lambda: self.members, self._session_member, self._limits.shares_sessions)

    def observe(self, observation: Observe) -> None:
        """Report an ended HTTP request to one engine. Dropped if there is no engine."""
        for member in self.members:
            if member.client.is_connected:
                member.client.observe(observation)
                return

    # Jobs ----------------------------------------------------------------------------------------------------

    def _dispatch(self, in_flight_job: InFlightJob, error: ErrorInfo) -> None:
        """Send the job to an engine, or let it wait for one. If none comes, it ends with `error`."""
        if in_flight_job.usage is not None and not in_flight_job.is_counted:
            self._acquire_quota(in_flight_job, in_flight_job.usage, error)
            return
        member = self._choose_member(in_flight_job)
        if member is None:
            self._enqueue(in_flight_job, error)
            return
        job = in_flight_job.next_attempt()
        if job is None:  # all its rows ended, only the job's end was not reported
            self._forget(in_flight_job)
            in_flight_job.forward(JobEvents(job_id=in_flight_job.job.job_id, deltas=[], done=True))
            return
        attempt = Attempt(in_flight_job.attempt, in_flight_job.attempt_id, member, member.connection)
        self._assign(in_flight_job, member)
        member.on_sent(job)
        member.client.submit(
            job,
            lambda events: self._on_events(in_flight_job, attempt, events),
            lambda refusal: self._on_admitted(in_flight_job, attempt, refusal),
        )
        if in_flight_job.is_cancelled:
            member.client.cancel(attempt.job_id)

    def _enqueue(self, in_flight_job: InFlightJob, error: ErrorInfo) -> None:
        with self._lock:
            self._assign(in_flight_job, None)
            end = CANCELLED if in_flight_job.is_cancelled else error if self._stopped.is_set() else None
            if end is None:
                in_flight_job.error = error
                is_uncounted = in_flight_job.usage is not None and not in_flight_job.is_counted
                wait_s = max(self._limits.wait_s, CONNECT_TIMEOUT_S) if is_uncounted else self._limits.wait_s
                in_flight_job.deadline = time.monotonic() + wait_s
                self._waiting[in_flight_job.job.job_id] = in_flight_job
        if end is not None:  # the polling thread has ended or will not see the job
            self._fail(in_flight_job, end)

    def _on_admitted(self, in_flight_job: InFlightJob, attempt: Attempt, refusal: ServiceError | None) -> None:
        if refusal is not None:
            attempt.member.on_refused(attempt.job_id)
        if attempt.number != in_flight_job.attempt:
            return
        if refusal is None:
            in_flight_job.report_admission(None)
        elif refusal.info.kind in ENGINE_GONE:
            is_draining = refusal.info.kind is ErrorKind.DRAINING and not self._is_shutting_down
            self._on_lost(in_flight_job, attempt, attempt.member.draining_error if is_draining else refusal.info)
        else:
            self._forget(in_flight_job)
            in_flight_job.report_admission(in_flight_job.final_refusal(refusal))

    def _on_events(self, in_flight_job: InFlightJob, attempt: Attempt, events: JobEvents) -> None:
        """Handle an engine's events of a job. Events of an earlier attempt are dropped."""
        if attempt.number != in_flight_job.attempt:
            return
        if events.done and events.error is not None and events.error.kind in ENGINE_GONE:
            in_flight_job.forward_last(events)
            self._on_lost(in_flight_job, attempt, events.error)
            return
        if in_flight_job.is_counted:
            self.quotas.charge(in_flight_job.job.job_id, events)
        if events.done:
            self._forget(in_flight_job)
        if in_flight_job.forward(events):
            attempt.member.client.confirm_turn(attempt.job_id)

    def _on_lost(self, in_flight_job: InFlightJob, attempt: Attempt, error: ErrorInfo) -> None:
        """Continue a job on another engine after its engine was lost. If this happens too often, the job fails."""
        attempt.member.mark_failed(attempt.connection)
        if in_flight_job.is_cancelled:
            self._fail(in_flight_job, CANCELLED)
            return
        in_flight_job.losses += error.kind is ErrorKind.ENGINE_LOST
        has_begun = in_flight_job.is_admitted or error.kind is ErrorKind.ENGINE_LOST
        has_too_many_losses = in_flight_job.losses > self._limits.resubmit
        is_last = self._stopped.is_set() or (self._is_shutting_down and not self.is_connected)
        if is_last or has_too_many_losses or (has_begun and not in_flight_job.can_resume):
            self._fail(
                in_flight_job,
                in_flight_job.too_many_losses_error(error)
                if has_too_many_losses and in_flight_job.can_resume
                else error,
            )
            return
        if in_flight_job.may_be_stored:
            self._fail(in_flight_job, in_flight_job.lost_error(error.message))
            return
        logger.info("job %s leaves engine %s", attempt.job_id, attempt.member.name)
        self._dispatch(in_flight_job, error)

    def _fail(self, in_flight_job: InFlightJob, error: ErrorInfo) -> None:
        self._forget(in_flight_job)
        in_flight_job.fail(error)

    def _forget(self, in_flight_job: InFlightJob) -> None:
        with self._lock:
            self._in_flight_jobs.pop(in_flight_job.job.job_id, None)
            self._assign(in_flight_job, None)
        if in_flight_job.is_counted:
            in_flight_job.is_counted = False
            self.quotas.end(in_flight_job.job.job_id, refund=not in_flight_job.is_admitted)

    def _assign(self, in_flight_job: InFlightJob, member: Member | None) -> None:
        with self._lock:
            if in_flight_job.member is not None:
                in_flight_job.member.assigned_rows -= in_flight_job.job.num_rows
            in_flight_job.member = member
            if member is not None:
                member.assigned_rows += in_flight_job.job.num_rows

    # Routing -------------------------------------------------------------------------------------------------

    def _choose_member(self, in_flight_job: InFlightJob) -> Member | None:
        available = [member for member in self.members if member.is_available]
        session = next((row.session.session_id for row in in_flight_job.job.rows if row.session is not None), None)
        if session is not None:
            return self._choose_for_session(session, available)
        if len(available) < 2:
            return available[0] if available else None
        names = [member.name for member in available]
        key = prefix_key(in_flight_job.job)
        preferred = self._prompts.get(key) if key else None
        chosen = self._choose_by_load(available, names.index(preferred) if preferred in names else None, None)
        if key:
            with self._lock:
                self._prompts.put(key, chosen.name)
        return chosen

    def _choose_by_load(self, available: list[Member], preferred: int | None, holder: int | None) -> Member:
        assigned_rows, unanswered = [one.assigned_rows for one in available], [one.num_unanswered for one in available]
        hints = RoutingHints(preferred, assigned_rows, unanswered, self._limits.num_routers)
        return available[choose(hints, [one.load for one in available], holder, self._rng)]

    def _choose_for_session(self, session: str, available: list[Member]) -> Member | None:
        session_member = self._session_member(session)
        if not self._limits.shares_sessions or not available:
            return session_member if session_member in available else None
        holder = available.index(session_member) if session_member in available else None
        chosen = self._choose_by_load(available, None, holder)
        with self._lock:
            self._sessions.put(session, chosen.name)
        return chosen

    def _session_member(self, session: str) -> Member | None:
        """Return the engine that served the session last.

        Without one, return the engine that every process would choose.
        """
        members = self.members
        known = self._sessions.get(session) if self._limits.shares_sessions else None
        named = next((member for member in members if member.name == known), None)
        return named or max(members, key=lambda member: rendezvous_weight(session, member.name), default=None)

    # Polling -------------------------------------------------------------------------------------------------

    def _changed(self, member: Member, is_connected: bool) -> None:
        if not is_connected and not (self._is_shutting_down or member.info.is_draining):
            logger.warning("engine %s is lost", member.name)
        self._notify_change()
        self.quotas.poll()  # what the lost engine's jobs have used, before they continue elsewhere
        if is_connected:
            self._dispatch_waiting()

    def _notify_change(self) -> None:
        with self._notify_lock:  # also during the callback, so that notifications keep their order
            is_connected = self.is_connected
            was_connected, self._was_connected = self._was_connected, is_connected
            if is_connected != was_connected:
                self._lost_at = self._lost_at if is_connected else time.monotonic()
                self._on_change(is_connected)

    def _poll_loop(self) -> None:
        while not self._stopped.wait(POLL_INTERVAL_S):
            self._poll_members()
            self.quotas.poll()
            self._notify_change()
            self._dispatch_waiting()

    def _poll_members(self) -> None:
        for member in self.members:
            member.poll(is_last=not any(one.is_available for one in self.members if one is not member))

    def _dispatch_waiting(self) -> None:
        """Send waiting jobs to available engines. End those that waited too long."""
        now = time.monotonic()
        with self._lock:
            waiting = list(self._waiting.values())
        for in_flight_job in waiting:
            has_waited = self._is_shutting_down or now >= in_flight_job.deadline
            if not has_waited and self._choose_member(in_flight_job) is None:
                continue
            with self._lock:
                if self._waiting.pop(in_flight_job.job.job_id, None) is None:
                    continue  # cancelled, or dispatched by another thread
            error = in_flight_job.error or LOADING
            if has_waited:
                self._fail(in_flight_job, error)
            else:
                self._dispatch(in_flight_job, error)

    def _may_come_back(self) -> bool:
        """Return whether a job without an engine waits: the last engine may have been lost a moment ago."""
        wait_s = 0.0 if self._is_shutting_down else self._limits.wait_s
        return wait_s > 0 and (self._was_connected or time.monotonic() < self._lost_at + wait_s)

    def _unavailable_reason(self) -> ErrorInfo:
        return next((member.client.reason for member in self.members), LOADING)
