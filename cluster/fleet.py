"""Several engines of one model behind the face of one: who gets a job, and how it goes on when its engine is lost.

A job is handed to one engine and followed; if that engine is lost, or leaves, the job goes on with another one, or
waits a while for one to come. One engine is a fleet of one.

Threads: any may call. Each engine's client has a thread, on which its events are passed on; one looks after all.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from cluster.affinity import Remembered, key_of, weight_of
from cluster.choose import Wish, choose
from cluster.gather import gather
from cluster.journey import AWAY, CANCELLED, Journey
from cluster.member import LOOK_S, Member
from rwkv_batch.calls import Answer, EngineCall, EnterClient, Reply
from rwkv_batch.errors import ErrorInfo, ErrorKind, ServiceError
from rwkv_batch.ipc.client import LOADING
from rwkv_batch.ipc.served_model import ServedModel
from rwkv_batch.ipc.wire import Observe, Spent
from rwkv_batch.protocol import Admitted, Sink
from rwkv_batch.request import Job, JobEvents, Usage

logger = logging.getLogger(__name__)


class FleetLimits(NamedTuple):
    """How long a job is held on to."""

    resubmit: int = 2
    """Engines that it may lose and go on; 0: none, then it ends with its engine."""
    wait_s: float = 10.0
    """It waits so long for an engine each time."""
    shares_sessions: bool = False
    """Whether any engine can go on with any session; else each session has its engine for good."""
    askers: int = 1
    """Processes that choose engines as this one does, itself among them."""


class Attempt(NamedTuple):
    """A job with one engine."""

    number: int
    job_id: str
    """Under which the engine knows it."""
    member: Member
    connection: int
    """The engine's, when the job was handed to it."""


class Fleet:
    """`EngineProtocol` over the engines that `update` names; see above."""

    def __init__(self, limits: FleetLimits, on_change: Callable[[bool], None] = lambda is_there: None) -> None:
        """`on_change` is told when some engine takes work, and when none does any more; it must not ask the fleet."""
        self._limits = limits
        self._on_change = on_change
        self._name = ""
        self._is_ending = False
        self._lock = threading.RLock()
        self._members: dict[str, Member] = {}
        """by address"""
        self._journeys: dict[str, Journey] = {}
        self._waiting: dict[str, Journey] = {}
        """those among them that no engine has"""
        self._sessions, self._prompts = Remembered(), Remembered()
        self._was_there = False
        self._lost_at = -math.inf
        """time.monotonic when it was told that none takes work"""
        self._telling = threading.Lock()
        """held to tell `on_change`, which waits for nothing"""
        self._rng = random.Random()
        self._stopped = threading.Event()

    # Life ----------------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Begin to connect, as the process of that name."""
        self._name = name
        for member in self.members:
            member.client.start(name)
        threading.Thread(target=self._look_after, name="fleet", daemon=True).start()

    def update(self, engines: Sequence[ServedModel]) -> None:
        """The engines there are now. Those that are here no longer are let go of; their jobs go on elsewhere."""
        told = {engine.address: engine for engine in engines}
        with self._lock:
            gone = [self._members.pop(address) for address in set(self._members) - set(told)]
            for address, engine in told.items():
                if address in self._members:
                    self._members[address].told = engine
                else:
                    member = self._members[address] = Member(engine, self._changed)
                    member.client.is_ending = self._is_ending
                    if self._name:
                        member.client.start(self._name)
        for member in gone:
            member.client.stop()
        self._tell_change()

    def stop(self) -> None:
        """Let go of all engines for good."""
        self._stopped.set()
        self._is_ending = True
        for member in self.members:
            member.client.stop()
        self._send_waiting()

    @property
    def is_ending(self) -> bool:
        """The service is being shut down: an engine that is lost now is not waited for; another that stays goes on."""
        return self._is_ending

    @is_ending.setter
    def is_ending(self, value: bool) -> None:
        self._is_ending = value
        for member in self.members:
            member.client.is_ending = value

    @property
    def members(self) -> list[Member]:
        """The engines, whether or not they are there."""
        with self._lock:
            return list(self._members.values())

    @property
    def is_connected(self) -> bool:
        """Whether some engine takes work."""
        return any(member.takes_work for member in self.members)

    @property
    def lost(self) -> list[str]:
        """Names of the engines that take no work now."""
        return [member.name for member in self.members if not member.takes_work]

    @property
    def num_jobs(self) -> int:
        """Jobs under way."""
        return len(self._journeys)

    # EngineProtocol ------------------------------------------------------------------------------------------

    def submit(self, job: Job, sink: Sink, admitted: Admitted) -> None:
        """See EngineProtocol."""
        journey = Journey(job, sink, admitted, self._limits.resubmit > 0)
        error = self._why_none()
        if not self.is_connected and not self._may_come_back():
            journey.fail(error)
            return
        with self._lock:
            self._journeys[job.job_id] = journey
        usage = job.usage
        if usage is None or len(self.members) < 2:
            self._go_to_one(journey, error)
        else:
            self._enter(journey, usage)

    def _enter(self, journey: Journey, usage: Usage) -> None:
        """Have one engine, the same for all processes, hold the client's limits; whoever runs the job does not."""
        keeper = min((one for one in self.members if one.client.is_connected), key=lambda one: one.name, default=None)

        def entered(answer: bool | ServiceError) -> None:
            if isinstance(answer, ServiceError) and answer.info.kind not in AWAY:
                self._forget(journey)
                journey.answer(answer)
                return
            journey.keeper = keeper
            self._go_to_one(journey, LOADING)

        journey.job = msgspec.structs.replace(journey.job, limits=None)
        if keeper is None:
            self._go_to_one(journey, LOADING)
        else:
            keeper.client.call(EnterClient(usage), entered)

    def cancel(self, job_id: str) -> None:
        """See EngineProtocol."""
        with self._lock:
            journey = self._journeys.get(job_id)
            waits = self._waiting.pop(job_id, None) is not None
            if journey is None:
                return
            journey.is_cancelled = True  # under the lock: who hands it on meanwhile sees it, or has told its place
            place = journey.place
        if waits:
            self._fail(journey, CANCELLED)
        elif place is not None:
            place.client.cancel(journey.attempt_id)

    def call(self, call: EngineCall[Answer], reply: Reply[Answer]) -> None:
        """See EngineProtocol."""
        members = [member for member in self.members if member.client.is_connected]
        if not members:
            reply(ServiceError.from_info(self._why_none()))
            return
        gather(call, reply, members, self.members, self._home, self._limits.shares_sessions)

    def observe(self, observation: Observe) -> None:
        """Report an ended HTTP request to one engine; forgotten when there is none."""
        for member in self.members:
            if member.client.is_connected:
                member.client.observe(observation)
                return

    # The way of a job ----------------------------------------------------------------------------------------

    def _go_to_one(self, journey: Journey, error: ErrorInfo) -> None:
        """Hand it to an engine, or let it wait for one; `error` is what it is told if none comes."""
        member = self._choice(journey)
        if member is None:
            self._let_wait(journey, error)
            return
        job = journey.next_attempt()
        if job is None:  # its rows had ended, and only that was not told
            self._forget(journey)
            journey.tell(JobEvents(job_id=journey.job.job_id, deltas=[], done=True))
            return
        attempt = Attempt(journey.attempt, journey.attempt_id, member, member.connection)
        self._put(journey, member)
        member.sent(job)
        member.client.submit(
            job,
            lambda events: self._heard(journey, attempt, events),
            lambda refusal: self._answered(journey, attempt, refusal),
        )
        if journey.is_cancelled:
            member.client.cancel(attempt.job_id)

    def _let_wait(self, journey: Journey, error: ErrorInfo) -> None:
        with self._lock:
            self._put(journey, None)
            over = CANCELLED if journey.is_cancelled else error if self._stopped.is_set() else None
            if over is None:
                journey.error = error
                journey.deadline = time.monotonic() + self._limits.wait_s
                self._waiting[journey.job.job_id] = journey
        if over is not None:  # nobody would look after it
            self._fail(journey, over)

    def _answered(self, journey: Journey, attempt: Attempt, refusal: ServiceError | None) -> None:
        """An engine has admitted a job, or not."""
        if refusal is not None:
            attempt.member.refused(attempt.job_id)
        if attempt.number != journey.attempt:
            return
        if refusal is None:
            journey.answer(None)
        elif refusal.info.kind in AWAY:
            leaves = refusal.info.kind is ErrorKind.DRAINING and not self._is_ending
            self._lost(journey, attempt, attempt.member.leaves if leaves else refusal.info)
        else:
            self._forget(journey)
            journey.answer(refusal)

    def _heard(self, journey: Journey, attempt: Attempt, events: JobEvents) -> None:
        """An engine says something of a job. What is said of an earlier attempt comes too late."""
        if attempt.number != journey.attempt:
            return
        if events.done and events.error is not None and events.error.kind in AWAY:
            journey.leave(events)
            self._lost(journey, attempt, events.error)
            return
        if journey.keeper is not None:
            tokens = sum(delta.num_tokens for delta in events.deltas)
            journey.keeper.client.spend(Spent(journey.job.job_id, tokens, done=False))
        if events.done:
            self._forget(journey)
        journey.tell(events)

    def _lost(self, journey: Journey, attempt: Attempt, error: ErrorInfo) -> None:
        """Its engine does not go on with a job: another one does, unless that has happened too often."""
        attempt.member.fails(attempt.connection)
        if journey.is_cancelled:
            self._fail(journey, CANCELLED)
            return
        journey.losses += error.kind is ErrorKind.ENGINE_LOST
        has_begun = journey.is_admitted or error.kind is ErrorKind.ENGINE_LOST
        is_too_often = journey.losses > self._limits.resubmit
        is_last = self._stopped.is_set() or (self._is_ending and not self.is_connected)
        if is_last or is_too_often or (has_begun and not journey.may_go_on):
            self._fail(journey, journey.lost_too_often(error) if is_too_often and journey.may_go_on else error)
            return
        logger.info("job %s leaves engine %s", attempt.job_id, attempt.member.name)
        self._go_to_one(journey, error)

    def _fail(self, journey: Journey, error: ErrorInfo) -> None:
        self._forget(journey)
        journey.fail(error)

    def _forget(self, journey: Journey) -> None:
        with self._lock:
            self._journeys.pop(journey.job.job_id, None)
            self._put(journey, None)
        if journey.keeper is not None:
            journey.keeper.client.spend(Spent(journey.job.job_id, 0, done=True))

    def _put(self, journey: Journey, member: Member | None) -> None:
        """It is with that engine from now on, or with none."""
        with self._lock:
            if journey.place is not None:
                journey.place.given_rows -= journey.job.num_rows
            journey.place = member
            if member is not None:
                member.given_rows += journey.job.num_rows

    # Who gets it ---------------------------------------------------------------------------------------------

    def _choice(self, journey: Journey) -> Member | None:
        takers = [member for member in self.members if member.takes_work]
        session = next((row.session.session_id for row in journey.job.rows if row.session is not None), None)
        if session is not None:
            return self._choice_of_session(session, takers)
        if len(takers) < 2:
            return takers[0] if takers else None
        names = [member.name for member in takers]
        key = key_of(journey.job)
        prefers = self._prompts.get(key) if key else None
        chosen = self._chosen(takers, names.index(prefers) if prefers in names else None, None)
        if key:
            with self._lock:
                self._prompts.put(key, chosen.name)
        return chosen

    def _chosen(self, takers: list[Member], prefers: int | None, holder: int | None) -> Member:
        given, unanswered = [one.given_rows for one in takers], [one.num_unanswered for one in takers]
        wish = Wish(prefers, given, unanswered, self._limits.askers)
        return takers[choose(wish, [one.load for one in takers], holder, self._rng)]

    def _choice_of_session(self, session: str, takers: list[Member]) -> Member | None:
        home = self._home(session)
        if not self._limits.shares_sessions or not takers:
            return home if home in takers else None
        holder = takers.index(home) if home in takers else None
        chosen = self._chosen(takers, None, holder)
        with self._lock:
            self._sessions.put(session, chosen.name)
        return chosen

    def _home(self, session: str) -> Member | None:
        """The engine that a session is with as far as is known here, else the one that every process would name."""
        members = self.members
        known = self._sessions.get(session) if self._limits.shares_sessions else None
        named = next((member for member in members if member.name == known), None)
        return named or max(members, key=lambda member: weight_of(session, member.name), default=None)

    # Looking after -------------------------------------------------------------------------------------------

    def _changed(self, member: Member, is_there: bool) -> None:
        if not is_there and not (self._is_ending or member.told.is_draining):
            logger.warning("engine %s is lost", member.name)
        self._tell_change()
        if is_there:
            self._send_waiting()

    def _tell_change(self) -> None:
        with self._telling:  # until it is told: a thread that has looked before must not tell after
            is_there = self.is_connected
            was_there, self._was_there = self._was_there, is_there
            if is_there != was_there:
                self._lost_at = self._lost_at if is_there else time.monotonic()
                self._on_change(is_there)

    def _look_after(self) -> None:
        while not self._stopped.wait(LOOK_S):
            self._look_at_engines()
            self._tell_change()
            self._send_waiting()

    def _look_at_engines(self) -> None:
        for member in self.members:
            member.look(is_last=not any(one.takes_work for one in self.members if one is not member))

    def _send_waiting(self) -> None:
        """Hand jobs that wait to engines that are there, and end those that have waited too long."""
        now = time.monotonic()
        with self._lock:
            waiting = list(self._waiting.values())
        for journey in waiting:
            has_waited = self._is_ending or now >= journey.deadline
            if not has_waited and self._choice(journey) is None:
                continue
            with self._lock:
                if self._waiting.pop(journey.job.job_id, None) is None:
                    continue  # cancelled, or taken by another thread
            error = journey.error or LOADING
            if has_waited:
                self._fail(journey, error)
            else:
                self._go_to_one(journey, error)

    def _may_come_back(self) -> bool:
        """Whether a job that finds no engine waits: it may have been on its way here when the last one was lost."""
        wait_s = 0.0 if self._is_ending else self._limits.wait_s
        return wait_s > 0 and (self._was_there or time.monotonic() < self._lost_at + wait_s)

    def _why_none(self) -> ErrorInfo:
        return next((member.client.reason for member in self.members), LOADING)
