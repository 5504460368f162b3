"""A row that another engine began continues with the same text. The text may be cut at any point."""

from __future__ import annotations

import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rwkv_batch.core.sequence import Phase
from rwkv_batch.engine import Engine
from rwkv_batch.errors import MAY_BE_KEPT, ServiceError
from rwkv_batch.fleet.fleet import Fleet
from rwkv_batch.fleet.in_flight_job import Progress
from rwkv_batch.fleet.routing import FleetLimits
from rwkv_batch.ipc.server import EngineServer
from rwkv_batch.ipc.wire import EventBatch, SocketLink, to_engine_decoder, to_worker_decoder
from rwkv_batch.request import Delta, GenerateRequest, Job, JobEvents, PromptLogprobs, Resumed
from sampling.grammar.constraint import Constraint, Form
from sampling.params import SamplingParams
from state_pool.config import PoolConfig
from test.fleet.fake_clients import engine_info
from test.harness import WAIT_S, RunningJob, eventually_holds, make_request, run, started_engine, tiny_model, turn
from test.serving import wait_for

PENALISED = SamplingParams(
    presence_penalty=0.9, frequency_penalty=0.4, penalty_decay=0.97, top_p=0.9, seed=11, logit_bias={40: 2.0}
)
SCORED = SamplingParams(seed=5, top_logprobs=2)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("resumed")
    with started_engine(tiny_model(folder), PoolConfig(state_db=""), overlap_on_cpu=True) as engine:
        yield engine


def deltas_of(running: RunningJob) -> list[Delta]:
    return [delta for events in running.events for delta in events.deltas]


def joined(deltas: list[Delta]) -> dict[int, Any]:
    """The client's result: each row's text, log-probabilities and end."""
    rows: dict[int, Any] = {}
    for delta in deltas:
        text, logprobs, scores, end = rows.get(delta.row, (b"", [], [], None))
        assert end is None, "a row continues after its end"
        logprobs = logprobs + [(one.token, round(one.logprob, 3)) for one in delta.logprobs or ()]
        scores = scores + [(one.token, round(one.logprob, 3)) for one in delta.prompt_logprobs or ()]
        finish = delta.finish
        end = None if finish is None else (finish.reason, finish.prompt_tokens, finish.completion_tokens)
        rows[delta.row] = (text + delta.text, logprobs, scores, end)
    return rows


def cut_and_resumed(engine: Engine, job: Job, deltas: list[Delta], at: int) -> list[Delta]:
    """The deltas if the first engine is lost after `at` deltas."""
    progress = Progress(job)
    before = [progress.record(JobEvents(job_id="x", deltas=[delta])).deltas[0] for delta in deltas[:at]]
    remaining_job = progress.remaining_job()
    if remaining_job is None:
        return before
    after = run(engine, *remaining_job.rows, return_token_ids=True)
    return before + [progress.record(JobEvents(job_id="x", deltas=[delta])).deltas[0] for delta in deltas_of(after)]


def stop_inside(engine: Engine, **fields: Any) -> list[bytes]:
    """Stops that the text approaches repeatedly, and one that it meets late."""
    text = run(engine, make_request("Once", **fields)).texts[0]
    near = {text[i : i + 6] + b"\xff" for i in range(0, len(text) - 6, 3)}
    return [*sorted(near), text[-12:-6]]


def cases(engine: Engine) -> dict[str, list[GenerateRequest]]:
    one = {"chunk_size": 1, "max_tokens": 24}
    stops = stop_inside(engine, **one)
    return {
        "greedy": [make_request("Once upon a time", **one)],
        "penalties": [make_request("The river", sampling=PENALISED, **one)],
        "stops": [make_request("Once", stop_strings=stops, **one)],
        "logprobs": [make_request("Once", sampling=SCORED, stop_strings=stops, **one)],
        "several": [
            make_request("Two roads", n=3, sampling=SamplingParams(seed=3), **one),
            make_request("Three", **one),
        ],
        "scored": [
            make_request("A much longer prompt that is scored", max_tokens=0, prompt_logprobs=PromptLogprobs(top=1))
        ],
        "candidates": [
            make_request("It is", max_tokens=0, candidates=[[40, 41], [50, 51, 52]], prompt_logprobs=PromptLogprobs())
        ],
        "constrained": [
            make_request("Number:", constraint=Constraint(form=Form.REGEX, source="[0-9]{3,12}(,[a-z]{2,9}){2}"), **one)
        ],
        "chunks": [make_request("Once", max_tokens=40, chunk_size=7, sampling=SamplingParams(seed=8))],
    }


@pytest.mark.parametrize(
    "name", ["greedy", "penalties", "stops", "logprobs", "several", "scored", "candidates", "constrained", "chunks"]
)
def test_a_cut_row_continues_with_the_same_text(engine: Engine, name: str) -> None:
    rows = cases(engine)[name]
    whole = run(engine, *rows, return_token_ids=True)
    deltas = deltas_of(whole)
    expected = joined(deltas)
    for at in sorted({0, 1, 2, len(deltas) // 3, len(deltas) // 2, len(deltas) - 2, len(deltas) - 1, len(deltas)}):
        assert joined(cut_and_resumed(engine, whole.job, deltas, max(0, at))) == expected, f"cut after delta {at}"


def test_a_cut_turn_restarts_from_the_state_before_it(engine: Engine) -> None:
    for name in ("kept", "cut"):
        run(engine, turn(name, "My name is Ada."))
    whole = run(engine, turn("kept", " What is it?", chunk_size=1), return_token_ids=True)
    progress = Progress(whole.job)
    for delta in deltas_of(whole)[:5]:
        progress.record(JobEvents(job_id="x", deltas=[delta]))
    remaining_job = progress.remaining_job()
    assert remaining_job is not None
    request = GenerateRequest(
        **{
            name: getattr(remaining_job.rows[0], name)
            for name in GenerateRequest.__struct_fields__
            if name != "session"
        },
        session=turn("cut", " What is it?").session,
    )
    resumed = run(engine, request)
    begun = b"".join(delta.text for delta in deltas_of(whole)[:5])
    assert begun + resumed.texts[0] == whole.texts[0]
    following = [run(engine, turn(name, " And again?")).texts[0] for name in ("kept", "cut")]
    assert following[0] == following[1]


def serve_without(is_lost: Callable[[Delta], bool], engine: str, address: str) -> None:
    """Connect one HTTP worker to the engine. Events with such a delta do not arrive."""
    listener, to_engine = (socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(2))
    listener.bind(address)
    listener.listen()
    to_engine.connect(engine)

    def forward(source: Any, target: Any) -> None:
        for message in source.receive():
            if not (isinstance(message, EventBatch) and any(is_lost(one) for e in message.events for one in e.deltas)):
                target.send(message)
        target.close()

    def serve() -> None:
        ends: list[Any] = [
            SocketLink(to_engine, to_worker_decoder, "engine"),
            SocketLink(listener.accept()[0], to_engine_decoder, "worker"),
        ]
        threading.Thread(target=forward, args=ends[::-1], daemon=True).start()
        forward(*ends)

    threading.Thread(target=serve, daemon=True).start()


@contextmanager
def lossy_fleet(engine: Engine, folder: Path, is_lost: Callable[[Delta], bool]) -> Iterator[tuple[Fleet, str]]:
    """A fleet whose link to the engine loses some events.

    Those with such a delta. Yields it, and the address of a good link.
    """
    direct, lossy = str(folder / "direct"), str(folder / "lossy")
    EngineServer(engine).listen(direct)
    serve_without(is_lost, direct, lossy)
    fleet = Fleet(FleetLimits(resubmit=2, wait_s=WAIT_S, shares_sessions=True))
    fleet.update([engine_info(lossy)])
    fleet.start("http-0")
    wait_for(lambda: fleet.is_connected, WAIT_S, "the engine is connected")
    yield fleet, direct
    fleet.stop()


def num_stored(engine: Engine, session_id: str) -> int:
    return sum(one.exists and one.key.session_id == session_id for one in engine.model_runner.pool._index)


def test_a_turn_whose_start_nobody_heard_of_is_stored_once(engine: Engine, tmp_path: Path) -> None:
    """The link is lost after the engine has generated the turn. The HTTP worker then sends the turn again."""
    running = RunningJob(Job(job_id="once", rows=[turn("once", "My name is Ada.")]))
    with lossy_fleet(engine, tmp_path, lambda delta: True) as (fleet, direct):
        fleet.submit(running.job, running.sink, running.on_admitted)

        def is_generated() -> bool:
            return bool(num_stored(engine, "once") or any(row.phase is Phase.ANSWERED for row in engine.jobs._leased))

        assert eventually_holds(engine, is_generated)
        fleet.update([engine_info(direct)])
        running.wait()
    assert running.texts == run(engine, turn("twin", "My name is Ada.")).texts
    first, second = (run(engine, turn(name, " And yours?")).finishes[0] for name in ("once", "twin"))
    assert first.prompt_tokens == second.prompt_tokens


def test_a_branch_whose_end_nobody_heard_of_is_stored_once(engine: Engine, tmp_path: Path) -> None:
    """It is a new dialogue: the length of its parent does not show whether it was stored."""
    running = RunningJob(Job(job_id="branch", rows=[turn("tree", "My name is Ada.", branch_from=0)]))
    with lossy_fleet(engine, tmp_path, lambda delta: delta.finish is not None) as (fleet, direct):
        fleet.submit(running.job, running.sink, running.on_admitted)
        assert eventually_holds(engine, lambda: num_stored(engine, "tree") > 0)
        fleet.update([engine_info(direct)])
        running.wait()
    error = running.events[-1].error
    assert num_stored(engine, "tree") == 1 and error is not None and MAY_BE_KEPT in error.message


def test_invalid_resumed_rows_are_refused(engine: Engine) -> None:
    for fields in ({"n": 2}, {"max_tokens": 2}):
        request = make_request("Once", resumed=Resumed(token_ids=[5, 6], shown=2), **fields)
        with pytest.raises(ServiceError, match="resumed"):
            run(engine, request)


def test_token_ids_are_sent_only_on_request(engine: Engine) -> None:
    assert all(not delta.token_ids for delta in deltas_of(run(engine, make_request("Once"))))
    requested = deltas_of(run(engine, make_request("Once"), return_token_ids=True))
    assert [len(delta.token_ids) for delta in requested] == [delta.num_tokens for delta in requested]


def test_a_job_without_output_moves_unchanged() -> None:
    job = Job(job_id="j", rows=[make_request("a", n=2), make_request("b")])
    remaining_job = Progress(job).remaining_job()
    assert remaining_job is not None and remaining_job.rows == job.rows


def test_a_sent_token_takes_four_bytes_until_its_stream_ends() -> None:
    """A list takes about forty bytes per token. Each HTTP worker holds all tokens of its streams."""
    progress = Progress(Job(job_id="x", rows=[make_request("Once")]))
    tracemalloc.start()
    for number in range(20_000):
        progress.record(JobEvents(job_id="x", deltas=[Delta(row=0, text=b"", num_tokens=1, token_ids=[1000 + number])]))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 10 * 20_000
    remaining_job = progress.remaining_job()
    assert remaining_job is not None and remaining_job.rows[0].resumed == Resumed(
        token_ids=list(range(1000, 21_000)), shown=0
    )
