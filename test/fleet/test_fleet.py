"""What a fleet does with jobs whose engines are lost, leave or refuse; engines are played by hand."""

from __future__ import annotations

import queue
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rwkv_batch.errors import ErrorInfo, ErrorKind, ServiceError
from rwkv_batch.fleet import member
from rwkv_batch.fleet.fleet import FleetLimits
from rwkv_batch.fleet.member import MAX_SILENT_POLLS, MAX_SILENT_POLLS_LAST_ENGINE
from rwkv_batch.ipc.served_model import ModelStatus
from rwkv_batch.ipc.wire import NO_LOAD, Answer, Heartbeat, SocketLink, to_worker_decoder
from rwkv_batch.request import ClientLimits, Delta, Job, JobEvents, Load
from test.fleet.fake_clients import (
    LOST,
    Made,
    Played,
    having,
    made,
    play,
    submit,
    told,
)
from test.harness import RunningJob, make_request
from test.serving import wait_for

LEAVES = ErrorInfo(kind=ErrorKind.DRAINING, message="leaves")
CROWDED = ErrorInfo(kind=ErrorKind.OVERLOADED, message="the queue is full", retry_after_s=1)


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
        return sorted(one.assigned_rows for one in fleet.members)

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
        running = RunningJob(Job(job_id=f"job-{number}", rows=[make_request("Once", chunk_size=1)]))
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
    assert not having(engines).jobs[0][0].return_token_ids
    having(engines).lose()
    assert running.events[-1].error == LOST


def test_a_machine_that_drains_lets_its_streams_go_on_with_engines_that_stay(two: Made) -> None:
    fleet, engines = two
    running = submit(fleet)
    fleet.is_shutting_down = True
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
            fleet._dispatch_waiting()
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


@pytest.mark.parametrize("is_shutting_down", [False, True])
def test_where_the_only_engine_leaves_nobody_is_told_that_the_service_ends(
    monkeypatch: pytest.MonkeyPatch, is_shutting_down: bool
) -> None:
    play(monkeypatch, Played)
    fleet, (only,) = made(FleetLimits(wait_s=0.0), 1)
    only.refuses = LEAVES
    fleet.is_shutting_down = is_shutting_down
    running = submit(fleet)
    fleet._dispatch_waiting()
    told_it = running.refusal
    assert told_it is not None and told_it.info.kind is ErrorKind.DRAINING
    assert told_it.info == LEAVES if is_shutting_down else "engine-0 is being removed or restarted" in told_it.info.message


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
    for _ in range(MAX_SILENT_POLLS):
        assert not engines[1].was_dropped
        engines[0].num_received += 1
        fleet._poll_members()
    assert engines[1].was_dropped and not engines[0].was_dropped and fleet.lost == ["engine-1"]


def test_the_last_engine_that_says_nothing_is_given_more_time(two: Made) -> None:
    """Nobody else would do its work; a busy machine may hold up a process that is as it should be."""
    fleet, engines = two
    engines[0].lose()
    for _ in range(MAX_SILENT_POLLS_LAST_ENGINE):
        assert not engines[1].was_dropped
        fleet._poll_members()
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
    one = member.Member(told(address), lambda _, is_connected: changes.put(is_connected))
    one.client.start("test")
    connection, _ = listener.accept()
    sender: SocketLink[Any, Any] = SocketLink(connection, to_worker_decoder, "engine")
    sender.send(Heartbeat(NO_LOAD))
    assert changes.get(timeout=30)
    answer = msgspec.msgpack.encode([Answer(1, bytes(8 << 20), None)])
    connection.sendall(len(answer).to_bytes(4, "big"))
    for at in range(2 * MAX_SILENT_POLLS):
        before = one.client.num_received
        connection.sendall(answer[at << 18 : (at + 1) << 18])
        wait_for(lambda before=before: one.client.num_received > before, 10, "a piece is read")
        one.poll()
    assert changes.empty() and one.client.is_connected
    one.client.stop()
    assert changes.get(timeout=30) is False
    listener.close()


def test_one_engine_holds_a_clients_limits_for_all(two: Made) -> None:
    fleet, engines = two
    limits = ClientLimits(rows=4)
    for number in range(12):
        running = RunningJob(Job(job_id=f"j{number}", rows=[make_request("Once")], client="key", limits=limits))
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
    refused = RunningJob(Job(job_id="no", rows=[make_request("Once")], client="key", limits=limits))
    fleet.submit(refused.job, refused.sink, refused.admitted)
    assert refused.refusal is not None and refused.refusal.info == CROWDED and fleet.num_jobs == 0
