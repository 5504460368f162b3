"""A fleet's jobs when engines are lost, drain or refuse. Engines are fake clients."""

from __future__ import annotations

import queue
import socket
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rwkv_batch.calls import (
    AdapterInfo,
    AddAdapter,
    AddState,
    ListAdapters,
    ListStates,
    RemoveAdapter,
    RemoveState,
    StateInfo,
)
from rwkv_batch.errors import ErrorInfo, ErrorKind, ServiceError
from rwkv_batch.fleet import member
from rwkv_batch.fleet.member import MAX_SILENT_POLLS, MAX_SILENT_POLLS_LAST_ENGINE
from rwkv_batch.fleet.routing import FleetLimits
from rwkv_batch.ipc.served_model import ModelStatus
from rwkv_batch.ipc.wire import NO_LOAD, Answer, Heartbeat, SocketLink, to_worker_decoder
from rwkv_batch.request import Delta, Job, JobEvents, Load
from test.fleet.fake_clients import (
    LOST,
    FakeClient,
    FakeFleet,
    client_with_job,
    engine_info,
    make_fleet,
    submit,
    use_fake_clients,
)
from test.harness import RunningJob, make_request
from test.serving import wait_for

LEAVES = ErrorInfo(kind=ErrorKind.DRAINING, message="leaves")
CROWDED = ErrorInfo(kind=ErrorKind.OVERLOADED, message="the queue is full", retry_after_s=1)


def test_a_job_continues_elsewhere_and_its_lost_engine_is_ignored(two_engines: FakeFleet) -> None:
    fleet, engines = two_engines
    running = submit(fleet)
    first = client_with_job(engines)
    first.send_text(b"ab", [7, 8])
    late = first.jobs[0]
    first.lose()
    second = client_with_job(engines)
    job = second.jobs[0][0]
    assert second is not first and job.was_admitted and job.job_id == "job/1"
    assert job.rows[0].resumed is not None and job.rows[0].resumed.token_ids == [7, 8]
    late[1](JobEvents(job_id="job", deltas=[Delta(0, b"XX", 1)], done=True, error=LOST))
    second.send_text(b"c", [9], ends=True)
    assert running.texts[0] == b"abc" and running.done.is_set() and running.events[-1].error is None
    assert fleet.num_jobs == 0


def test_assigned_rows_are_counted_while_the_engine_has_them(two_engines: FakeFleet) -> None:
    fleet, engines = two_engines

    def assigned() -> list[int]:
        return sorted(one.assigned_rows for one in fleet.members)

    submit(fleet)
    assert assigned() == [0, 1]
    client_with_job(engines).lose()
    assert assigned() == [0, 1], "the other engine has the job"
    client_with_job(engines).send_text(b"a", [1], ends=True)
    assert assigned() == [0, 0]


def test_a_burst_is_split_evenly_without_reports(two_engines: FakeFleet) -> None:
    fleet, engines = two_engines
    for engine in engines:
        engine.on_load(Load(200, 0), None)  # type: ignore[call-arg]
    for number in range(40):
        running = RunningJob(Job(job_id=f"job-{number}", rows=[make_request("Once", chunk_size=1)]))
        fleet.submit(running.job, running.sink, running.on_admitted)
        engines[0].on_load(Load(200, 0), f"job-{number}")  # type: ignore[call-arg]
        engines[1].on_load(Load(201, 0), f"job-{number}")  # type: ignore[call-arg]
    assert [len(engine.jobs) for engine in engines] == [20, 20]


def test_a_job_that_loses_too_many_engines_fails(two_engines: FakeFleet) -> None:
    fleet, engines = two_engines
    running = submit(fleet)
    for _ in range(3):
        victim = client_with_job(engines)
        victim.lose()
        victim.connect()
    error = running.events[-1].error
    assert error is not None and error.retry_after_s is None
    assert "on 3 engines that were lost, --resubmit allows 2" in error.message
    assert running.events[-1].done and not any(one.jobs for one in engines)


def test_draining_engines_do_not_count_as_lost(two_engines: FakeFleet) -> None:
    fleet, engines = two_engines
    running = submit(fleet)
    for _ in range(8):
        leaving = client_with_job(engines)
        leaving.lose(LEAVES)
        leaving.connect()
    client_with_job(engines).send_text(b"a", [1], ends=True)
    assert running.texts == {0: b"a"}


def test_without_resubmission_a_job_ends_with_its_engine(two_engines: FakeFleet) -> None:
    fleet, engines = make_fleet(FleetLimits(resubmit=0))
    running = submit(fleet)
    assert not client_with_job(engines).jobs[0][0].return_token_ids
    client_with_job(engines).lose()
    assert running.events[-1].error == LOST


def test_streams_of_a_draining_machine_continue_on_other_engines(two_engines: FakeFleet) -> None:
    fleet, engines = two_engines
    running = submit(fleet)
    fleet.is_shutting_down = True
    client_with_job(engines).lose(LEAVES)
    client_with_job(engines).send_text(b"a", [1], ends=True)
    assert running.texts == {0: b"a"}
    client_with_job(engines).jobs.clear()
    cut_off = submit(fleet)
    client_with_job(engines).lose(LEAVES)
    assert cut_off.events[-1].error == LEAVES, "it was the last engine"


def test_a_job_waits_for_an_engine_for_a_limited_time(two_engines: FakeFleet) -> None:
    for wait_s in (60.0, 0.0):
        fleet, (only,) = make_fleet(FleetLimits(wait_s=wait_s), 1)
        running = submit(fleet)
        only.send_text(b"a", [1])
        only.lose()
        if wait_s:
            only.connect()
            only.send_text(b"b", [2], ends=True)
            assert running.texts == {0: b"ab"}
        else:
            fleet._dispatch_waiting()
            assert running.events[-1].error == LOST


@pytest.mark.parametrize("is_reported", [True, False])
def test_a_job_submitted_as_the_only_engine_is_lost_waits(two_engines: FakeFleet, is_reported: bool) -> None:
    """Its submitter had seen a connected engine."""
    fleet, (only,) = make_fleet(FleetLimits(wait_s=60.0), 1)
    only.is_connected = False
    if is_reported:
        only.connect(False)
    running = submit(fleet)
    assert running.refusal is None and not only.jobs
    only.connect()
    only.send_text(b"a", [1], ends=True)
    assert running.texts == {0: b"a"}


def test_a_job_long_after_the_only_engine_was_lost_is_refused(two_engines: FakeFleet) -> None:
    for wait_s, ago_s in ((60.0, 61.0), (0.0, 0.0)):
        fleet, (only,) = make_fleet(FleetLimits(wait_s=wait_s), 1)
        only.connect(False)
        fleet._lost_at -= ago_s
        refusal = submit(fleet).refusal
        assert refusal is not None and refusal.info == LOST


def test_a_job_cancelled_while_it_waits_ends(two_engines: FakeFleet) -> None:
    fleet, (only,) = make_fleet(FleetLimits(wait_s=60.0), 1)
    running = submit(fleet)
    only.lose()
    fleet.cancel("job")
    error = running.events[-1].error
    assert error is not None and error.kind is ErrorKind.CANCELLED
    only.connect()
    assert not only.jobs


def test_a_cancel_reaches_the_current_engine(two_engines: FakeFleet) -> None:
    fleet, engines = two_engines
    submit(fleet)
    client_with_job(engines).lose()
    fleet.cancel("job")
    assert client_with_job(engines).cancelled == ["job/1"]


def test_a_refusal_is_final_unless_the_engine_drains(two_engines: FakeFleet) -> None:
    fleet, engines = two_engines
    for engine in engines:
        engine.refusal_info = CROWDED
    refusal = submit(fleet).refusal
    assert refusal is not None and refusal.info == CROWDED
    engines[0].refusal_info, engines[1].refusal_info = LEAVES, None
    for _ in range(4):
        assert submit(fleet).refusal is None
        client_with_job(engines[1:]).send_text(b"a", [1], ends=True)


@pytest.mark.parametrize("is_shutting_down", [False, True])
def test_a_draining_only_engine_does_not_report_a_shutdown(
    monkeypatch: pytest.MonkeyPatch, is_shutting_down: bool
) -> None:
    use_fake_clients(monkeypatch, FakeClient)
    fleet, (only,) = make_fleet(FleetLimits(wait_s=0.0), 1)
    only.refusal_info = LEAVES
    fleet.is_shutting_down = is_shutting_down
    running = submit(fleet)
    fleet._dispatch_waiting()
    refusal = running.refusal
    assert refusal is not None and refusal.info.kind is ErrorKind.DRAINING
    assert (
        refusal.info == LEAVES if is_shutting_down else "engine-0 is being removed or restarted" in refusal.info.message
    )


def test_a_draining_engine_gets_no_jobs_and_a_removed_one_loses_its_jobs(two_engines: FakeFleet) -> None:
    fleet, engines = two_engines
    running = submit(fleet)
    first = client_with_job(engines)
    other = next(engine for engine in engines if engine is not first)
    fleet.update([engine_info(first.name, ModelStatus.UNLOADING), engine_info(other.name)])
    assert fleet.lost == [first.name] and first.jobs
    fleet.update([engine_info(other.name)])
    first.lose()
    client_with_job([other]).send_text(b"a", [1], ends=True)
    assert running.texts == {0: b"a"}


def test_lists_come_from_an_engine_that_does_not_drain(two_engines: FakeFleet) -> None:
    """A worker without a link to a draining engine adds a state to the other one; lists of the first lacked it."""
    fleet, engines = two_engines
    fleet.update([engine_info("engine-0", ModelStatus.UNLOADING), engine_info("engine-1")])
    fleet.call(ListStates(), lambda answer: None)
    assert engines[1].received_calls == [ListStates()] and not engines[0].received_calls


@pytest.mark.parametrize("call", [AddState("s"), RemoveState("s"), AddAdapter("a", "a.pth"), RemoveAdapter("a")])
def test_a_change_of_states_reaches_all_engines_or_none(two_engines: FakeFleet, call: Any) -> None:
    """A starting engine has read its files, perhaps before the change."""
    fleet, engines = two_engines
    answers: list[Any] = []
    for status in (ModelStatus.READY, ModelStatus.LOADING):
        fleet.update([engine_info("engine-0"), engine_info("engine-1", status)])
        engines[1].connect(False)
        fleet.call(call, answers.append)
        refusal = answers.pop()
        assert refusal.info.kind is ErrorKind.ENGINE_LOST and "engine-1 is being started" in refusal.info.message
        assert refusal.info.retry_after_s and not engines[0].received_calls
    fleet.update([engine_info("engine-0"), engine_info("engine-1", ModelStatus.FAILED)])
    fleet.call(call, answers.append)
    engines[1].connect()
    fleet.call(call, answers.append)
    assert answers == [True, True] and (len(engines[0].received_calls), len(engines[1].received_calls)) == (2, 1)


@pytest.mark.parametrize("call", [AddState("s"), RemoveState("s"), AddAdapter("a", "a.pth"), RemoveAdapter("a")])
def test_a_change_of_states_counts_when_an_engine_that_started_meanwhile_has_it(
    two_engines: FakeFleet, monkeypatch: pytest.MonkeyPatch, call: Any
) -> None:
    fleet, engines = two_engines
    fleet.update([engine_info("engine-0")])
    unanswered: list[Any] = []
    monkeypatch.setattr(engines[0], "call", lambda call, reply: unanswered.append(reply))
    answers: list[Any] = []
    fleet.call(call, answers.append)
    fleet.update([engine_info("engine-0"), engine_info("engine-2", ModelStatus.LOADING)])
    unanswered.pop()(True)
    assert "engine-2 is being started" in answers.pop().info.message
    started: Any = next(one.client for one in fleet.members if one.name == "engine-2")
    started.connect()
    is_removal = isinstance(call, RemoveState | RemoveAdapter)
    kinds = {RemoveState: ErrorKind.STATE_NOT_FOUND, RemoveAdapter: ErrorKind.ADAPTER_NOT_FOUND}
    done_before = ServiceError(kinds.get(type(call), ErrorKind.NAME_TAKEN), "engine-0 has made the change")
    info_class: Any = StateInfo if isinstance(call, AddState) else AdapterInfo
    for digest in ["same", "other"][: 1 if is_removal else 2]:
        added, known = info_class(name=call.name, digest="same"), info_class(name=call.name, digest=digest)
        monkeypatch.setattr(started, "call", lambda call, reply, added=added: reply(_answer(call, added)))
        fleet.call(call, answers.append)
        unanswered.pop()(done_before)
        if not is_removal:
            unanswered.pop()([known])
        answer = answers.pop()
        assert answer == added if digest == "same" else answer.info.kind is ErrorKind.NAME_TAKEN


def _answer(call: Any, added: Any) -> Any:
    return [added] if isinstance(call, ListStates | ListAdapters) else added


def test_a_silent_engine_is_dropped(two_engines: FakeFleet) -> None:
    fleet, engines = two_engines
    for _ in range(MAX_SILENT_POLLS):
        assert not engines[1].was_dropped
        engines[0].num_received += 1
        fleet._poll_members()
    assert engines[1].was_dropped and not engines[0].was_dropped and fleet.lost == ["engine-1"]


def test_the_last_engine_may_be_silent_for_longer(two_engines: FakeFleet) -> None:
    """No other engine would do its work. A busy machine may delay its process."""
    fleet, engines = two_engines
    engines[0].lose()
    for _ in range(MAX_SILENT_POLLS_LAST_ENGINE):
        assert not engines[1].was_dropped
        fleet._poll_members()
    assert engines[1].was_dropped


def test_a_refusal_does_not_affect_the_next_connection(two_engines: FakeFleet) -> None:
    fleet, (only,) = make_fleet(FleetLimits(resubmit=0), 1)

    def submit_while_it_comes_back(job: Job, sink: Any, admitted: Any) -> None:
        only.connect(False)
        only.connect()
        admitted(ServiceError.from_info(LOST))

    only.submit = submit_while_it_comes_back  # type: ignore[method-assign]
    refusal = submit(fleet).refusal
    assert refusal is not None and refusal.info == LOST
    assert fleet.lost == [] and fleet.is_connected


def test_a_long_frame_is_not_silence(tmp_path: Path) -> None:
    address = str(tmp_path / "engine")
    listener = socket.create_server(address, family=socket.AF_UNIX)
    changes: queue.Queue[bool] = queue.Queue()
    one = member.Member(engine_info(address), lambda _, is_connected: changes.put(is_connected))
    one.client.start("test")
    connection, _ = listener.accept()
    sender: SocketLink[Any, Any] = SocketLink(connection, to_worker_decoder, "engine")
    sender.send(Heartbeat(NO_LOAD))
    assert changes.get(timeout=30)
    answer = msgspec.msgpack.encode([Answer(1, bytes(8 << 20), None)])
    connection.sendall(len(answer).to_bytes(4, "big"))
    for i in range(2 * MAX_SILENT_POLLS):
        before = one.client.num_received
        connection.sendall(answer[i << 18 : (i + 1) << 18])
        wait_for(lambda before=before: one.client.num_received > before, 10, "a piece is read")
        one.poll()
    assert changes.empty() and one.client.is_connected
    one.client.stop()
    assert changes.get(timeout=30) is False
    listener.close()


def test_the_last_notification_is_correct(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine reconnects while another thread reports that none is connected."""
    use_fake_clients(monkeypatch, FakeClient)
    heard: list[bool] = []
    threads: list[threading.Thread] = []

    def on_change(is_connected: bool) -> None:
        if not is_connected and not threads:
            threads.append(threading.Thread(target=only.connect))
            threads[0].start()
            threads[0].join(0.3)  # notified within, or right after this callback
        heard.append(is_connected)

    _, (only,) = make_fleet(FleetLimits(), 1, on_change)
    only.connect(False)
    threads[0].join()
    assert only.is_connected and heard == [True, False, True]


class PausingLock:
    """A fleet's lock. The thread of that name stops after its first hold until the other thread has continued."""

    def __init__(self, name: str) -> None:
        self._lock = threading.RLock()
        self._name = name
        self.has_stopped, self.may_continue = threading.Event(), threading.Event()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if threading.current_thread().name == self._name and not self.has_stopped.is_set():
            self.has_stopped.set()
            assert self.may_continue.wait(60)


@pytest.mark.parametrize("others", [0, 1])
def test_a_job_cancelled_while_it_moves_ends(monkeypatch: pytest.MonkeyPatch, others: int) -> None:
    """Its client disconnects while its engine is lost. The other thread is the lost engine's."""
    use_fake_clients(monkeypatch, FakeClient)
    fleet, engines = make_fleet(FleetLimits(wait_s=60.0), 1 + others)
    running = submit(fleet)
    lost, lock, choice = client_with_job(engines), PausingLock("cancels"), fleet._choose_member
    monkeypatch.setattr(fleet, "_lock", lock)
    canceller = threading.Thread(target=fleet.cancel, args=("job",), name="cancels")

    def choice_while_it_is_cancelled(in_flight_job: Any) -> Any:
        chosen = choice(in_flight_job)
        canceller.start()
        assert lock.has_stopped.wait(60)
        return chosen

    monkeypatch.setattr(fleet, "_choose_member", choice_while_it_is_cancelled)
    lost.lose()
    lock.may_continue.set()
    canceller.join(60)
    if others:
        assert client_with_job(engines).cancelled == ["job/1"]
    else:
        error = running.events[-1].error
        assert error is not None and error.kind is ErrorKind.CANCELLED and fleet.num_jobs == 0


def test_a_job_that_starts_to_wait_after_the_fleets_end_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, a model is unloaded while its engine is lost: no thread polls waiting jobs any more."""
    use_fake_clients(monkeypatch, FakeClient)
    fleet, engines = make_fleet(FleetLimits(wait_s=3600.0), 1)
    running = submit(fleet)
    monkeypatch.setattr(fleet, "_choose_member", lambda in_flight_job: fleet.stop())
    client_with_job(engines).lose()
    assert running.events[-1].error is not None and fleet.num_jobs == 0
