"""Large jobs of one client: they are sent compactly, and one too many is refused. The link stays open for others."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from rwkv_batch.calls import GetStatus
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.ipc import wire
from rwkv_batch.ipc.buffered_link import BufferedLink
from rwkv_batch.ipc.client import EngineClient
from rwkv_batch.ipc.job_packing import pack, unpack
from rwkv_batch.ipc.wire import (
    NO_LOAD,
    Admitted,
    Cancel,
    Heartbeat,
    Link,
    LinkFull,
    SocketLink,
    Submit,
    to_engine_decoder,
    to_worker_decoder,
)
from rwkv_batch.request import Job, Resumed
from sampling.grammar.constraint import MAX_SOURCE_CHARACTERS, Constraint, Form
from test.harness import make_request
from test.serving import wait_for


def constrained_job(name: str, rows: int, characters: int = MAX_SOURCE_CHARACTERS) -> Job:
    constraint = Constraint(form=Form.REGEX, source="é" * characters)
    stops = [b"%d" % number * 200 for number in range(64)]
    made = [make_request([number % 7 + 1], constraint=constraint, stop_strings=stops) for number in range(rows)]
    return Job(job_id=name, rows=made, client="few")


def test_a_constraint_is_sent_once_for_all_rows() -> None:
    job = constrained_job("job", 4096)
    message = msgspec.msgpack.encode([pack(job)])
    assert len(message) < 4 << 20
    (received,) = to_engine_decoder.decode(message)
    assert isinstance(received, Submit)
    copy = unpack(received)
    assert copy == job
    assert len({id(row.constraint) for row in copy.rows}) == len({id(row.stop_strings) for row in copy.rows}) == 1


def test_rows_that_differ_keep_what_is_their_own() -> None:
    one, other = constrained_job("job", 2).rows, constrained_job("job", 2, 9).rows
    resumed = msgspec.structs.replace(one[0], resumed=Resumed(token_ids=[1, 2], shown=1), n=1)
    plain = make_request([1], state="tuned", mixture=[("a", 1.0), ("", 2.0)])
    job = Job(job_id="job", rows=[plain, *one, resumed, *other, one[0], plain, make_request([2]), make_request([3])])
    (received,) = to_engine_decoder.decode(msgspec.msgpack.encode([pack(job)]))
    assert isinstance(received, Submit) and unpack(received) == job
    assert unpack(pack(Job(job_id="empty", rows=[]))).rows == []
    assert pack(Job(job_id="two", rows=[plain, plain])).job.rows[1].mixture == [], "it is sent once"


class Engine:
    """The engine's end of a client's link. It reads nothing until `read`."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._link: SocketLink[Any, Any] = SocketLink(ours, to_engine_decoder, "engine")
        connects = iter([SocketLink(theirs, to_worker_decoder, "worker")])
        self.changes: list[bool] = []
        self.client = EngineClient(lambda: next(connects, None), self.changes.append)
        self.client.start("test")
        self._link.send(Heartbeat(NO_LOAD))
        wait_for(lambda: self.client.is_connected, 30, "the client is connected")

    def submit(self, job: Job) -> list[ServiceError | None]:
        """Submit a job and return the list for its admission or refusal."""
        admissions: list[ServiceError | None] = []
        self.client.submit(job, lambda events: None, admissions.append)
        return admissions

    def read_until_cancel(self) -> list[str]:
        """Read all messages up to the first cancel, and admit the jobs. Returns their ids."""
        admitted = []
        for message in self._link.receive():
            if isinstance(message, Cancel):
                break
            if isinstance(message, Submit):
                admitted.append(message.job.job_id)
                self._link.send(Admitted(message.job.job_id, None))
        return admitted

    def close(self) -> None:
        self.client.stop()
        self._link.close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


def test_jobs_that_the_engine_does_not_read_are_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier jobs, cancels and the link survive."""
    monkeypatch.setattr(wire, "MAX_OFFERED_BYTES", 3 << 20)
    monkeypatch.setattr(wire, "MAX_WAITING_BYTES", 4 << 20)
    answers = {name: engine.submit(constrained_job(name, 1)) for name in map(str, range(40))}
    refused = {name for name, answer in answers.items() if answer}
    for name in refused:
        (refusal,) = answers[name]
        assert refusal is not None and refusal.info.kind is ErrorKind.OVERLOADED
        assert refusal.info.retry_after_s and "bytes wait" in refusal.info.message
    assert 0 < len(refused) < 40
    replies: list[Any] = []
    engine.client.call(GetStatus(), replies.append)
    engine.client.cancel("0")
    assert set(engine.read_until_cancel()) == set(answers) - refused
    wait_for(lambda: all(answers.values()), 30, "the others are admitted")
    assert engine.changes == [True], "the link is open"
    assert engine.submit(constrained_job("later", 1)) == []


def test_a_job_has_a_largest_size(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_JOB_BYTES", 200_000)
    (refusal,) = engine.submit(constrained_job("large", 1))
    assert refusal is not None and refusal.info.kind is ErrorKind.BODY_TOO_LARGE
    assert "the limit is 200000" in refusal.info.message
    assert engine.submit(constrained_job("small", 1, 9)) == []
    engine.client.cancel("small")
    assert engine.read_until_cancel() == ["small"]


@pytest.mark.parametrize("carried", [False, True])
def test_a_full_link_refuses_offers_and_stays_open(carried: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_OFFERED_BYTES", 3 << 20)
    ours, theirs = socket.socketpair()
    decoder: Any = msgspec.msgpack.Decoder()
    link: Link[Any, Any] = BufferedLink(decoder) if carried else SocketLink(ours, decoder, "test")
    with pytest.raises(LinkFull, match="the limit is 3145728"):
        for _ in range(9):
            link.offer(bytes(1 << 20))
    assert link.is_sending
    link.send(b"events are still sent")
    link.close()
    theirs.close()
