"""What a fleet does with jobs whose engines are lost, leave or refuse; engines are played by hand."""

from __future__ import annotations

import queue
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from cluster import member
from cluster.fleet import Fleet, FleetLimits
from cluster.member import LAST_SILENT_LOOKS, SILENT_LOOKS
from rwkv_batch.calls import ListSessions
from rwkv_batch.errors import ErrorInfo, ErrorKind, ServiceError
from rwkv_batch.ipc.served_model import ModelStatus, ModelWish, ServedModel
from rwkv_batch.ipc.wire import NO_LOAD, Answer, Heartbeat, SocketLink, Spent, to_worker_decoder
from rwkv_batch.request import ClientLimits, Delta, Finish, FinishReason, Job, JobEvents, Load
from state_pool.session_page import SessionEntry, SessionPage, Tier
from test.harness import Running, ask, turn
from test.serving import wait_for

LOST = ErrorInfo(kind=ErrorKind.ENGINE_LOST, message="lost")
LEAVES = ErrorInfo(kind=ErrorKind.DRAINING, message="leaves")
CROWDED = ErrorInfo(kind=ErrorKind.OVERLOADED, message="the queue is full", retry_after_s=1)


class Played:
    """An engine's client, as far as a fleet sees it."""

    def __init__(self, address: str, on_change: Callable[[bool], None], on_load: Callable[[Load], None]) -> None:
        self.name = address
        self.on_change, self.on_load = on_change, on_load
        self.is_connected = self.is_ending = False
        self.num_heard = 0
        self.jobs: list[tuple[Job, Any]] = []
        self.cancelled: list[str] = []
        self.refuses: ErrorInfo | None = None
        self.reason = LOST
        self.was_dropped = False
        self.asked: list[Any] = []
        self.spent: list[Spent] = []
        self.limit: ErrorInfo | None = None

    def start(self, name: str) -> None:
        """Nothing: tests connect it."""

    def stop(self) -> None:
        self.connect(False)

    def drop(self) -> None:
        self.was_dropped = True
        self.lose()

    def connect(self, is_there: bool = True) -> None:
        self.is_connected = is_there
        self.on_change(is_there)

    def submit(self, job: Job, sink: Any, admitted: Any) -> None:
        if self.refuses is not None:
            admitted(ServiceError.from_info(self.refuses))
            return
        self.jobs.append((job, sink))
        admitted(None)

    def call(self, call: Any, reply: Any) -> None:
        self.asked.append(call)
        reply(True if self.limit is None else ServiceError.from_info(self.limit))

    def spend(self, spent: Spent) -> None:
        self.spent.append(spent)

    def cancel(self, job_id: str) -> None:
        self.cancelled.append(job_id)

    def says(self, text: bytes, ids: list[int], *, ends: bool = False, job: int = -1) -> None:
        """Tell of its latest job's row."""
        finish = Finish(reason=FinishReason.LENGTH, prompt_tokens=1, completion_tokens=1) if ends else None
        spec, sink = self.jobs[job]
        sink(JobEvents(job_id=spec.job_id, deltas=[Delta(0, text, len(ids), finish, token_ids=ids)], done=ends))

    def lose(self, error: ErrorInfo = LOST) -> None:
        """It is gone, and its jobs with it."""
        self.connect(False)
        jobs, self.jobs = self.jobs, []
        for job, sink in jobs:
            sink(JobEvents(job_id=job.job_id, deltas=[], done=True, error=error))


Made = tuple[Fleet, list[Played]]


def play(monkeypatch: pytest.MonkeyPatch, role: type[Played]) -> None:
    """Have engines played, each under its address."""
    monkeypatch.setattr(member, "dial", lambda address: address)
    monkeypatch.setattr(member, "EngineClient", role)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Made:
    """A fleet of two engines that are there."""
    play(monkeypatch, Played)
    return made(FleetLimits(resubmit=2, wait_s=0.0))


def made(limits: FleetLimits, count: int = 2, on_change: Callable[[bool], None] = lambda is_there: None) -> Made:
    fleet = Fleet(limits, on_change)
    fleet.update([told(f"engine-{number}") for number in range(count)])
    engines: list[Any] = [one.client for one in fleet.members]
    for engine in engines:
        engine.connect()
    return fleet, engines


def told(name: str, status: ModelStatus = ModelStatus.READY) -> ServedModel:
    return ServedModel(wish=ModelWish(name="m", file=""), status=status, address=name, since=0, engine=name)


def submit(fleet: Fleet, row: Any = None) -> Running:
    running = Running(Job(job_id="job", rows=[row or ask("Once", chunk_size=1)]))
    fleet.submit(running.job, running.sink, running.admitted)
    return running


def having(engines: list[Played]) -> Played:
    """The one that has the job."""
    (found,) = [engine for engine in engines if engine.jobs]
    return found


def test_a_job_goes_on_where_it_was_and_its_lost_engine_is_not_heard_any_more(two: Made) -> None:
    fleet, engines = two
    running = submit(fleet)
    first = having(engines)
    first.says(b"ab", [7, 8])
    late = first.jobs[0]
    first.lose()
    second = having(engines)
    job = second.jobs[0][0]
    assert second is not first and job.attempt == 1
    assert job.rows[0].resumed is not None and job.rows[0].resumed.token_ids == [7, 8]
    late[1](JobEvents(job_id="job", deltas=[Delta(0, b"XX", 1)], done=True, error=LOST))
    second.says(b"c", [9], ends=True)
    assert running.texts[0] == b"abc" and running.done.is_set() and running.events[-1].error is None
    assert fleet.num_jobs == 0


def test_the_rows_that_each_engine_was_given_are_counted_as_long_as_it_has_them(two: Made) -> None:
    fleet, engines = two

    def given() -> list[int]:
        return sorted(one.given_rows for one in fleet.members)

    submit(fleet)
    assert given() == [0, 1]
    having(engines).lose()
    assert given() == [0, 1], "the other one has it"
    having(engines).says(b"a", [1], ends=True)
    assert given() == [0, 0]


def test_a_crowd_is_halved_though_the_engines_report_nothing_of_it(two: Made) -> None:
    fleet, engines = two
    for engine in engines:
        engine.on_load(Load(200, 0), None)  # type: ignore[call-arg]
    for number in range(40):
        running = Running(Job(job_id=f"job-{number}", rows=[ask("Once", chunk_size=1)]))
        fleet.submit(running.job, running.sink, running.admitted)
        engines[0].on_load(Load(200, 0), f"job-{number}")  # type: ignore[call-arg]
        engines[1].on_load(Load(201, 0), f"job-{number}")  # type: ignore[call-arg]
    assert [len(engine.jobs) for engine in engines] == [20, 20]


def test_a_job_that_loses_its_engine_too_often_ends_with_the_error(two: Made) -> None:
    fleet, engines = two
    running = submit(fleet)
    for _ in range(3):
        victim = having(engines)
        victim.lose()
        victim.connect()
    error = running.events[-1].error
    assert error is not None and error.retry_after_s is None
    assert "on 3 engines that were lost, --resubmit allows 2" in error.message
    assert running.events[-1].done and not any(one.jobs for one in engines)


def test_engines_that_leave_are_not_counted(two: Made) -> None:
    fleet, engines = two
    running = submit(fleet)
    for _ in range(8):
        leaving = having(engines)
        leaving.lose(LEAVES)
        leaving.connect()
    having(engines).says(b"a", [1], ends=True)
    assert running.texts == {0: b"a"}


def test_without_resubmission_a_job_ends_with_its_engine(two: Made) -> None:
    fleet, engines = made(FleetLimits(resubmit=0))
    running = submit(fleet)
    assert not having(engines).jobs[0][0].tells_ids
    having(engines).lose()
    assert running.events[-1].error == LOST


def test_a_machine_that_drains_lets_its_streams_go_on_with_engines_that_stay(two: Made) -> None:
    fleet, engines = two
    running = submit(fleet)
    fleet.is_ending = True
    having(engines).lose(LEAVES)
    having(engines).says(b"a", [1], ends=True)
    assert running.texts == {0: b"a"}
    having(engines).jobs.clear()
    cut_off = submit(fleet)
    having(engines).lose(LEAVES)
    assert cut_off.events[-1].error == LEAVES, "it was the last one"


def test_a_job_waits_for_an_engine_only_so_long(two: Made) -> None:
    for wait_s in (60.0, 0.0):
        fleet, (only,) = made(FleetLimits(wait_s=wait_s), 1)
        running = submit(fleet)
        only.says(b"a", [1])
        only.lose()
        if wait_s:
            only.connect()
            only.says(b"b", [2], ends=True)
            assert running.texts == {0: b"ab"}
        else:
            fleet._send_waiting()
            assert running.events[-1].error == LOST


@pytest.mark.parametrize("is_told", [True, False])
def test_a_job_that_comes_just_as_the_only_engine_is_lost_waits_for_it(two: Made, is_told: bool) -> None:
    """Whoever handed it over had been told that there is one."""
    fleet, (only,) = made(FleetLimits(wait_s=60.0), 1)
    only.is_connected = False
    if is_told:
        only.connect(False)
    running = submit(fleet)
    assert running.refusal is None and not only.jobs
    only.connect()
    only.says(b"a", [1], ends=True)
    assert running.texts == {0: b"a"}


def test_a_job_that_comes_long_after_the_only_engine_was_lost_is_refused_at_once(two: Made) -> None:
    for wait_s, ago_s in ((60.0, 61.0), (0.0, 0.0)):
        fleet, (only,) = made(FleetLimits(wait_s=wait_s), 1)
        only.connect(False)
        fleet._lost_at -= ago_s
        refusal = submit(fleet).refusal
        assert refusal is not None and refusal.info == LOST


def test_a_job_that_is_cancelled_while_it_waits_ends(two: Made) -> None:
    fleet, (only,) = made(FleetLimits(wait_s=60.0), 1)
    running = submit(fleet)
    only.lose()
    fleet.cancel("job")
    error = running.events[-1].error
    assert error is not None and error.kind is ErrorKind.CANCELLED
    only.connect()
    assert not only.jobs


def test_cancelling_reaches_the_engine_that_has_the_job_now(two: Made) -> None:
    fleet, engines = two
    submit(fleet)
    having(engines).lose()
    fleet.cancel("job")
    assert having(engines).cancelled == ["job/1"]


def test_a_refusal_is_the_clients_and_one_of_an_engine_that_leaves_is_not(two: Made) -> None:
    fleet, engines = two
    for engine in engines:
        engine.refuses = CROWDED
    refusal = submit(fleet).refusal
    assert refusal is not None and refusal.info == CROWDED
    engines[0].refuses, engines[1].refuses = LEAVES, None
    for _ in range(4):
        assert submit(fleet).refusal is None
        having(engines[1:]).says(b"a", [1], ends=True)


@pytest.mark.parametrize("is_ending", [False, True])
def test_where_the_only_engine_leaves_nobody_is_told_that_the_service_ends(
    monkeypatch: pytest.MonkeyPatch, is_ending: bool
) -> None:
    play(monkeypatch, Played)
    fleet, (only,) = made(FleetLimits(wait_s=0.0), 1)
    only.refuses = LEAVES
    fleet.is_ending = is_ending
    running = submit(fleet)
    fleet._send_waiting()
    told_it = running.refusal
    assert told_it is not None and told_it.info.kind is ErrorKind.DRAINING
    assert told_it.info == LEAVES if is_ending else "engine-0 is removed or started anew" in told_it.info.message


def test_a_draining_engine_gets_nothing_new_and_one_that_has_gone_gives_its_jobs_away(two: Made) -> None:
    fleet, engines = two
    running = submit(fleet)
    first = having(engines)
    other = next(engine for engine in engines if engine is not first)
    fleet.update([told(first.name, ModelStatus.UNLOADING), told(other.name)])
    assert fleet.lost == [first.name] and first.jobs
    fleet.update([told(other.name)])
    first.lose()
    having([other]).says(b"a", [1], ends=True)
    assert running.texts == {0: b"a"}


def test_an_engine_that_says_nothing_is_dropped(two: Made) -> None:
    fleet, engines = two
    for _ in range(SILENT_LOOKS):
        assert not engines[1].was_dropped
        engines[0].num_heard += 1
        fleet._look_at_engines()
    assert engines[1].was_dropped and not engines[0].was_dropped and fleet.lost == ["engine-1"]


def test_the_last_engine_that_says_nothing_is_given_more_time(two: Made) -> None:
    """Nobody else would do its work; a busy machine may hold up a process that is as it should be."""
    fleet, engines = two
    engines[0].lose()
    for _ in range(LAST_SILENT_LOOKS):
        assert not engines[1].was_dropped
        fleet._look_at_engines()
    assert engines[1].was_dropped


def test_a_refusal_of_the_connection_before_says_nothing_of_the_next(two: Made) -> None:
    fleet, (only,) = made(FleetLimits(resubmit=0), 1)

    def submit_while_it_comes_back(job: Job, sink: Any, admitted: Any) -> None:
        only.connect(False)
        only.connect()
        admitted(ServiceError.from_info(LOST))

    only.submit = submit_while_it_comes_back  # type: ignore[method-assign]
    refusal = submit(fleet).refusal
    assert refusal is not None and refusal.info == LOST
    assert fleet.lost == [] and fleet.is_connected


def test_an_engine_that_sends_a_long_frame_is_not_silent(tmp_path: Path) -> None:
    address = str(tmp_path / "engine")
    listener = socket.create_server(address, family=socket.AF_UNIX)
    changes: queue.Queue[bool] = queue.Queue()
    one = member.Member(told(address), lambda _, is_there: changes.put(is_there))
    one.client.start("test")
    connection, _ = listener.accept()
    sender: SocketLink[Any, Any] = SocketLink(connection, to_worker_decoder, "engine")
    sender.send(Heartbeat(NO_LOAD))
    assert changes.get(timeout=30)
    answer = msgspec.msgpack.encode([Answer(1, bytes(8 << 20), None)])
    connection.sendall(len(answer).to_bytes(4, "big"))
    for at in range(2 * SILENT_LOOKS):
        before = one.client.num_heard
        connection.sendall(answer[at << 18 : (at + 1) << 18])
        wait_for(lambda before=before: one.client.num_heard > before, 10, "a piece is read")
        one.look()
    assert changes.empty() and one.client.is_connected
    one.client.stop()
    assert changes.get(timeout=30) is False
    listener.close()


def page_of(fleet: Fleet, limit: int, offset: int) -> Any:
    answers: list[Any] = []
    fleet.call(ListSessions(limit, offset), answers.append)
    return answers[0]


class Listing(Played):
    """Lists sessions, numbered down from the newest."""

    names: ClassVar[dict[str, range]] = {}

    def call(self, call: Any, reply: Any) -> None:
        self.asked.append(call)
        mine = [SessionEntry(f"s{number}", Tier.DISK, 1000.0 - number) for number in self.names[self.name]]
        part = mine[call.offset : call.offset + call.limit]
        reply(SessionPage(total=len(mine), in_slots=1, in_host_memory=0, on_disk=9, sessions=part))


@pytest.mark.parametrize("shares", [True, False])
def test_no_offset_makes_engines_list_everything(monkeypatch: pytest.MonkeyPatch, shares: bool) -> None:
    play(monkeypatch, Listing)
    both = range(40)
    names = (both, both) if shares else (range(0, 40, 2), range(1, 40, 2))
    monkeypatch.setattr(Listing, "names", {f"engine-{number}": names[number] for number in range(2)})
    fleet, engines = made(FleetLimits(shares_sessions=shares))
    for offset in (0, 10, 38, 50):
        page = page_of(fleet, 5, offset)
        assert [one.session_id for one in page.sessions] == [f"s{n}" for n in range(offset, min(offset + 5, 40))]
        assert (page.total, page.in_slots, page.on_disk) == (40, 2, 9)
    far = page_of(fleet, 5, 2**52)
    if shares:
        assert far.sessions == [] and far.total == 40
        assert all(call.limit == 5 for one in engines for call in one.asked)
    else:
        assert far.info.kind is ErrorKind.INVALID_FIELD and far.info.field == "offset" and "100000" in far.info.message
        assert all(call.limit < 100 for one in engines for call in one.asked)


def test_a_turn_is_taken_again_only_if_its_session_is_as_it_was(two: Made) -> None:
    fleet, engines = made(FleetLimits(shares_sessions=True))
    running = submit(fleet, turn("s", "Hello"))
    first = having(engines)
    first.jobs[0][1](JobEvents(job_id="job", deltas=[Delta(0, b"", 0, session_tokens=12)]))
    assert not running.events, "that is the fleet's business"
    first.lose()
    (row,) = having(engines).jobs[0][0].rows
    assert row.session is not None and row.session.expected_tokens == 12 and row.resumed is None


def test_a_session_stays_with_its_engine_where_none_shares_it(two: Made) -> None:
    fleet, engines = two
    homes = set()
    for number in range(40):
        submit(fleet, turn(f"s{number}", "Hello"))
        homes.add(having(engines).name)
        home = having(engines)
        home.says(b"", [], ends=True)
        home.jobs.clear()
        submit(fleet, turn(f"s{number}", "Hello"))
        assert having(engines) is home
        home.says(b"", [], ends=True)
        home.jobs.clear()
    assert homes == {"engine-0", "engine-1"}


def test_one_engine_holds_a_clients_limits_for_all(two: Made) -> None:
    fleet, engines = two
    limits = ClientLimits(rows=4)
    for number in range(12):
        running = Running(Job(job_id=f"j{number}", rows=[ask("Once")], client="key", limits=limits))
        fleet.submit(running.job, running.sink, running.admitted)
        at = having(engines)
        assert at.jobs[0][0].limits is None and at.jobs[0][0].client == "key"
        at.says(b"ab", [1, 2])
        at.says(b"c", [3], ends=True)
        at.jobs.clear()
        assert engines[0].asked[-1].usage == running.job.usage
        assert [(one.tokens, one.done) for one in engines[0].spent[-3:]] == [(2, False), (1, False), (0, True)]
    assert not engines[1].asked and not engines[1].spent
    engines[0].limit = CROWDED
    refused = Running(Job(job_id="no", rows=[ask("Once")], client="key", limits=limits))
    fleet.submit(refused.job, refused.sink, refused.admitted)
    assert refused.refusal is not None and refused.refusal.info == CROWDED and fleet.num_jobs == 0
